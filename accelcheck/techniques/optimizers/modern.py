"""Optimizers of large models: Muon, and AdamW with 8-bit states by two packages, with FP64 emulations."""

import importlib
import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.core.quiet import torchao_imported
from accelcheck.devices.base import Device
from accelcheck.devices.torch_names import disable_current_modes
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.compilation.compile import INDUCTOR_GRAPH, Compilation, inductor_capability
from accelcheck.techniques.observe import Log, OperatorLog, at_least, operators
from accelcheck.techniques.optimizers.state import states_of
from accelcheck.techniques.quantization.emulation import RELATIVE, RoundedSides, dynamic_map, nearest_of
from accelcheck.techniques.quantization.torchao import AO_PACKAGE
from accelcheck.verify.rounding import Rounding
from accelcheck.workloads.base import OptimizerMaker, Program

LEAST, BLOCK = 4096, 256
"""Fewest elements of a parameter whose states have 8 bits, and number of neighbours that share a scale."""
_MADE = "optimizers that were made"


class MuonAndRest(torch.optim.Optimizer):
    """Two optimizers as one: Muon for matrices, and another one for all other parameters."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer | None) -> None:
        self.parts = [first, *([second] if second else [])]
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is ever given
        for part in self.parts:
            part.step()


@dataclass
class WithMuon:
    """Makes `torch.optim.Muon` for matrices and the program's own optimizer for the rest; in FP64 with `exact`.

    `flips` works as in `accelcheck.techniques.quantization.emulation.Quantizer`: steps then round as in bfloat16.
    """

    make: OptimizerMaker
    exact: bool = False
    flips: torch.Generator | None = None
    matrices: int = 0

    def __call__(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        whole = self.make(parameters)
        rate = whole.param_groups[0]["lr"]
        wide, rest = ([p for p in parameters if (p.dim() == 2) is two] for two in (True, False))
        self.matrices = len(wide)
        if not wide:
            return whole
        # The rate of AdamW fits Muon too, with this factor: arXiv:2502.16982.
        words: dict[str, Any] = {"lr": rate, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
        muon = ExactMuon(wide, self, **words) if self.exact else torch.optim.Muon(wide, **words)
        return MuonAndRest(muon, self.make(rest) if rest else None)


class ExactMuon(torch.optim.Optimizer):
    """Muon by its formula in the dtype of the parameters: K. Jordan, https://kellerjordan.github.io/posts/muon/."""

    def __init__(self, parameters: Sequence[nn.Parameter], maker: WithMuon, **words: Any) -> None:
        super().__init__(parameters, {"momentum": 0.95, "coefficients": (3.4445, -4.775, 2.0315), "steps": 5, **words})
        self.maker = maker

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is ever given
        for group in self.param_groups:
            for parameter in group["params"]:
                if (grad := parameter.grad) is None:
                    continue
                held = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(grad))
                held.lerp_(grad, 1 - group["momentum"])
                with disable_current_modes():
                    flips = self.maker.flips
                    with Rounding("bfloat16", "bfloat16", flips) if flips else nullcontext():
                        update = self.orthogonal(grad.lerp(held, group["momentum"]), group)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(0.2 * math.sqrt(max(grad.shape)) * group["lr"] * update)

    @staticmethod
    def orthogonal(x: Tensor, group: dict[str, Any]) -> Tensor:
        """Moves the singular values of a matrix towards 1 by the quintic iteration of Newton and Schulz."""
        (a, b, c), tall = group["coefficients"], x.shape[0] > x.shape[1]
        x = (x.t() if tall else x) * 1.0  # cast to bfloat16: a rounding
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(group["steps"]):
            gram = x @ x.t()
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.t() if tall else x


class Muon(Technique):
    """Muon for all matrices; the program's own optimizer for all other parameters."""

    name = "muon"
    family = "optimizer"
    modes = frozenset({Mode.TRAIN})  # another algorithm learns at a pace of its own, in FP64 too
    requires = frozenset({"training"})
    promise = "Matrices get updates with singular values near 1, computed in bfloat16; other parameters keep theirs."
    source = "https://docs.pytorch.org/docs/stable/generated/torch.optim.Muon.html"
    oracle = "muon"
    maker: type[Any] = WithMuon
    level = 2
    workloads = frozenset({"train-mlp", "train-transformer"})

    def capability(self, device: Device) -> Capability:
        if not hasattr(torch.optim, "Muon"):
            return unsupported(Code.WRONG_VERSION, f"torch {torch.__version__} has no torch.optim.Muon")
        return SUPPORTED if "bfloat16" in device.dtypes else device.lacks("bfloat16", Code.NO_DTYPE)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        if program.optimizer is None:
            raise TypeError("expected a program with an optimizer: give the Problem one")
        program.extras[_MADE] = program.optimizer = self.maker(program.optimizer)

    def emulate_optimizer(self, make: OptimizerMaker) -> OptimizerMaker:
        return WithMuon(make, exact=True)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        matrices = program.extras[_MADE].matrices
        if not matrices:
            raise Unsupported(unsupported(Code.NO_EFFECT, "no parameter is a matrix"))
        products = operators(log).having(lambda op: op.name == "aten::addmm" and op.takes(torch.bfloat16))
        yield at_least(f"bfloat16 products for {matrices} matrices", products, 2 * 5 * matrices * program.steps)


@dataclass
class WithEightBits:
    """Makes AdamW with 8-bit states, of a module, in place of `torch.optim.AdamW`, with its options."""

    make: OptimizerMaker
    module: str = "torchao.optim"
    made: Any = None

    def __call__(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        plain = self.make(parameters)
        grows = bool(plain.defaults.get("maximize"))
        if type(plain) is not torch.optim.AdamW or len(plain.param_groups) > 1 or grows:
            kind = type(plain).__name__ + " with maximize" * grows
            reason = f"8-bit AdamW takes the place of torch's with one group, not of {kind}"
            raise Unsupported(unsupported(Code.NO_FEATURE, reason))
        with torchao_imported():
            tools: Any = importlib.import_module(self.module)
        words = {name: plain.defaults[name] for name in ("lr", "betas", "eps", "weight_decay", "amsgrad")}
        words |= {"block_size": BLOCK} if self.module == "torchao.optim" else {}  # the other one's has no other size
        made: torch.optim.Optimizer = tools.AdamW8bit(list(parameters), **words)
        self.made = made
        return made


@dataclass
class EightBitStates:
    """Emulation in FP64: moments are rounded after each step by the dynamic map. `flips` works as in `Quantizer`."""

    make: OptimizerMaker
    flips: torch.Generator | None = None

    def __call__(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        made = self.make(parameters)
        made.register_step_post_hook(self.round_all)
        return made

    def round_all(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Rounds all moments in place; the first one alone has a sign."""
        for state, name, value in list(states_of(optimizer)):
            state[name] = self.rounded(value, signed=name == "exp_avg")

    def rounded(self, state: Tensor, *, signed: bool) -> Tensor:
        """Rounds a moment; those of small parameters stay."""
        if state.numel() < LEAST or state.numel() % BLOCK:
            return state
        with disable_current_modes():
            side, single = RoundedSides(self.flips), state.float().reshape(-1, BLOCK)
            scale = single.abs().amax(1, keepdim=True).clamp(min=1e-12)
            position = side.position(single / scale, single, RELATIVE)
            return (nearest_of(dynamic_map(signed=signed), position) * side.scale(scale)).reshape(state.shape)


class EightBit(Muon, Compilation):
    """AdamW with 8-bit states by torchao, which compiles its steps."""

    promise = f"Moments of parameters with {LEAST} elements or more take a byte each, rounded after every step."
    oracle = "adamw-8bit"
    maker = WithEightBits
    warmups = 0
    workloads = frozenset({"train-vocabulary"})
    name = "adamw-8bit-torchao"
    source = "https://docs.pytorch.org/ao/stable/api_reference/api_ref_optim.html"
    packages = {"torchao": AO_PACKAGE}  # noqa: RUF012 - as in the base class

    def capability(self, device: Device) -> Capability:
        return inductor_capability(device)  # torchao compiles the step

    def emulate_optimizer(self, make: OptimizerMaker) -> OptimizerMaker:
        return EightBitStates(make)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        states = list(program.extras[_MADE].made.state.values()) if program.extras[_MADE].made else []
        moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
        small = [m for m in moments if type(m).__name__ == "OptimState8bit" and m.codes.dtype == torch.uint8]
        wanted = sum(m.numel() >= LEAST and not m.numel() % BLOCK for m in moments)
        if not wanted:
            raise Unsupported(unsupported(Code.NO_EFFECT, f"no parameter has {LEAST} elements in whole blocks"))
        yield Evidence(f"moments of 8 bits = {wanted} >= 2", len(small), engaged=len(small) == wanted >= 2)
        yield at_least("compiled steps", log.count(INDUCTOR_GRAPH), program.steps)


class EightBitBits(EightBit):
    """AdamW with 8-bit states by bitsandbytes."""

    watch = OperatorLog  # type: ignore[assignment]  # its steps are operators
    maker: Any = staticmethod(partial(WithEightBits, module="bitsandbytes.optim"))
    name = "adamw-8bit-bitsandbytes"
    source = "https://huggingface.co/docs/bitsandbytes/reference/optim/adamw"
    packages = {"bitsandbytes": "pip install 'accelcheck[checkpoints]'"}  # noqa: RUF012 - as in the base class
    capability = Technique.capability

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        whole = sum(p.numel() >= LEAST and not p.numel() % BLOCK for p in program.module.parameters())
        if not whole:
            raise Unsupported(unsupported(Code.NO_EFFECT, f"no parameter has {LEAST} elements in whole blocks"))
        steps = log.count("bitsandbytes::optimizer_update_8bit_blockwise")
        yield at_least(f"steps of {whole} parameters with states of 8 bits", steps, whole * program.steps)


TECHNIQUES: tuple[Technique, ...] = (Muon(), EightBit(), EightBitBits())
