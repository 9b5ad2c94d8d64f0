"""A technique of the suite on a workload, beside FP32 eager: judged as a case, then measured."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.checks import numerics
from accelcheck.checks.speed import Contender
from accelcheck.checks.trial import Trial, warm_up
from accelcheck.core.capability import Capability, Code, unsupported
from accelcheck.core.case import Case, Mode
from accelcheck.core.files import scratch
from accelcheck.experiments.claims.catalogue import What
from accelcheck.experiments.claims.experiment import Contest, Experiment, Side
from accelcheck.experiments.curve import WrongError
from accelcheck.measure.memory import held
from accelcheck.techniques.eager import Eager
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify.judge import judge
from accelcheck.verify.oracle import FIRST, Store
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.deep import Deep
from accelcheck.workloads.draw import initialise, integers, normal, separated
from accelcheck.workloads.large_models import VocabularyLoss
from accelcheck.workloads.mlp import Mlp
from accelcheck.workloads.signatures import tensors_in
from accelcheck.workloads.speed import WORKLOADS as SPEED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from accelcheck.devices.base import Device
    from accelcheck.techniques.base import Technique


@dataclass(frozen=True)
class Applied(Experiment):
    """A technique on a workload, forward or in training.

    Attributes:
        dtype: Storage dtype of the technique's side; eager's is float32.
        elsewhere: Names of techniques that replace it, by feature of the device.
    """

    name: str
    technique_name: str
    workload: Workload
    gives: frozenset[What] = frozenset({What.SPEED_UP, What.MEMORY})
    mode: Mode = Mode.FORWARD
    dtype: str = "float32"
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    def technique(self, device: Device) -> Technique:
        """The technique that is measured on a device."""
        other = (name for feature, name in self.elsewhere.items() if device.has(feature))
        return techniques()[next(other, self.technique_name)]

    def answer(self, device: Device) -> Capability:
        if self.dtype not in device.dtypes:
            return unsupported(Code.NO_DTYPE, f"{device.name} does not declare {self.dtype}")
        return self.technique(device).answer(device)

    @contextlib.contextmanager
    def contest(self, device: Device) -> Iterator[Contest]:
        technique = self.technique(device)
        with trial(technique, self.workload, device, self.mode, self.dtype) as judged:
            case = replace(judged.case, technique=Eager.name, dtype="float32")
            plain = Contender(replace(judged, technique=Eager(), case=case))
            fast = Contender(judged)
            fast.call()
            warm_up(judged, fast.program)
            yield Contest(_side(plain, device, self.mode), _side(fast, device, self.mode))
            again(judged, fast)


@contextlib.contextmanager
def trial(technique: Technique, workload: Workload, device: Device, mode: Mode, dtype: str) -> Iterator[Trial]:
    """Prepare and judge a case; raises `WrongError` if the result is wrong, or the technique did not engage."""
    case = Case(technique.name, workload.name, device.name, dtype, mode, 1)
    with tempfile.TemporaryDirectory(prefix="files-", dir=scratch()) as folder:
        made = Trial(case, technique, workload, device, Store(Path(folder)))
        try:
            finding = numerics.verify(made, (FIRST,))
            if finding.wrong or finding.undecided:
                raise WrongError(f"{case.id}: {next(iter(finding.wrong), finding.undecided)}")
            technique.finish()
            yield made
        finally:
            technique.finish()


def again(judged: Trial, contender: Contender) -> None:
    """Raise `WrongError` unless the timed program is still right for the first inputs and original parameters."""
    contender.rewind()
    contender.program.synchronize = judged.device.synchronize
    judged.device.seed(judged.case.seed)
    result = {path: tensor.cpu() for path, tensor in contender.program.run(judged.case.mode).items()}
    faults = judge(result, judged.store.get(judged.case, judged.technique, judged.workload, FIRST)).faults
    if faults:
        raise WrongError(f"{judged.case.id}: after timing: {faults[0]}")


@functools.cache
def techniques() -> Mapping[str, Technique]:
    """All techniques of the package, by name."""
    return Matrix.load().techniques


def _side(contender: Contender, device: Device, mode: Mode) -> Side:
    program = contender.program
    called = program.call if isinstance(program.call, nn.Module) else program.module
    values = [
        *called.state_dict().values(),
        *program.inputs,
        *(tensors_in(program.target) if mode is Mode.TRAIN else ()),
    ]
    return Side(contender.call, device, held(values), lambda: program.module.zero_grad(set_to_none=True))


class MatmulRelu(nn.Module):
    """``relu(a @ b)``."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.relu(a @ b)


def _matmul_relu(generator: torch.Generator, extent: int) -> Problem:
    return Problem(MatmulRelu(), (normal(generator, 128, 256), normal(generator, 256, 512)))


def _linear(generator: torch.Generator, extent: int) -> Problem:
    # Without bias, whose gradient PJRT's CPU client sums in bfloat16 (docs/findings.md): the claim is about products.
    module = initialise(nn.Linear(256, 512, bias=False), generator)
    return _trained(module, normal(generator, 1024, 256), normal(generator, 1024, 512), functional.mse_loss)


def _mlp(generator: torch.Generator, extent: int) -> Problem:
    module = initialise(Mlp(features=512, hidden=1024, classes=10), generator, relu=True)
    return _trained(module, separated(generator, 128, 512), integers(generator, 0, 10, 128), functional.cross_entropy)


def _deep(generator: torch.Generator, extent: int) -> Problem:
    module = initialise(Deep(), generator)
    return _trained(module, normal(generator, 1024, 32), integers(generator, 0, 10, 1024), functional.cross_entropy)


def _vocabulary(generator: torch.Generator, extent: int) -> Problem:
    module = initialise(VocabularyLoss(width=64, words=4096), generator)
    made = _trained(module, normal(generator, 256, 64), torch.zeros(1), lambda loss, _: loss)
    return replace(made, inputs=(*made.inputs, integers(generator, 0, 4096, 256)))


def _trained(module: nn.Module, x: Tensor, target: Tensor, loss: Any) -> Problem:
    # Without momentum, so that memory is parameters, gradients and activations, without optimizer state.
    optimizer = partial(torch.optim.SGD, lr=0.01)
    return Problem(module, (x,), target=target, loss=loss, optimizer=optimizer, steps=2)


_BOTH = frozenset({Mode.FORWARD, Mode.TRAIN})
MATMUL_RELU = Workload("claim-matmul-relu", "relu(a @ b), 128 x 256 by 256 x 512.", _matmul_relu)
LINEAR = Workload("claim-linear", "A linear layer without bias, 256 to 512, on 1024 samples.", _linear, modes=_BOTH)
MLP = Workload("claim-mlp", "Three linear layers, 512 to 1024 to 1024 to 10, on 128 samples.", _mlp, modes=_BOTH)
WORDS = Workload("claim-vocabulary", "A head of 4096 words on 256 tokens, and its loss.", _vocabulary, modes=_BOTH)
DEEP = Workload("claim-deep", "Eight wide residual blocks on 1024 samples.", _deep, modes=_BOTH)

_SPEED = frozenset({What.SPEED_UP})
_MEMORY = frozenset({What.MEMORY})

EXPERIMENTS: tuple[Experiment, ...] = (
    Applied("torchscript-matmul-relu", "jit-script", MATMUL_RELU, _SPEED),
    Applied("amp-training", "amp-bf16", LINEAR, mode=Mode.TRAIN, elsewhere={"torch-cuda": "grad-scaler-fp16"}),
    Applied("tensorrt", "tensorrt-fp16", next(w for w in SPEED if w.name == "speed-cnn"), _SPEED),
    Applied("int8-dynamic", "int8-dynamic", MLP),
    Applied("int8-static", "int8-static", MLP),
    Applied("fp16", "eager", MLP, dtype="float16"),
    Applied(
        "checkpointing",
        "checkpoint-non-reentrant",
        DEEP,
        _MEMORY,
        Mode.TRAIN,
        elsewhere={"torch-xla": "checkpoint-xla"},
    ),
    Applied("liger-linear-cross-entropy", "liger-linear-cross-entropy", WORDS, _MEMORY, Mode.TRAIN),
    Applied("cut-cross-entropy", "cut-cross-entropy", WORDS, _MEMORY, Mode.TRAIN, dtype="bfloat16"),
    Applied("llm-int8", "int8-bitsandbytes", MLP, _MEMORY),
    Applied("float8-training", "float8-training-rowwise", LINEAR, _SPEED, Mode.TRAIN),
    Applied("compile-amp-training", "compile-autocast-bf16", MLP, mode=Mode.TRAIN),
)
