"""Describes workloads: their traits, and a deterministic function that makes a module with parameters and inputs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from accelcheck.core.case import Mode
from accelcheck.workloads.signatures import Batch, Loss, OptimizerMaker, Target
from accelcheck.workloads.trainer import Recipe

TRAITS: Mapping[str, str] = MappingProxyType(
    {
        "activations": "memory that is mostly activations",
        "attention": "calls of scaled_dot_product_attention",
        "batches": "several batches, one for each training step",
        "batchnorm": "batch normalisation",
        "blocks": "an nn.ModuleList named `blocks`, or the longest list of modules of one class, whose members take a "
        "tensor first and can be called again",
        "branching": "Python control flow that depends on data",
        "constants": "expressions that depend on no input",
        "conv": "NCHW convolutions",
        "custom-function": "an autograd function of its own, whose gradients are then checked by finite differences",
        "decoder": "a module of `accelcheck.workloads.decoders`",
        "domain": "inputs whose values have a structure or a domain: they are drawn anew, and not scaled",
        "exact": "no rounding at all, as in indexing and copies",
        "index-operators": "calls of torch.index_select or torch.gather",
        "index-tensors": "indexing with tensors in brackets",
        "inplace": "submodules with an attribute `inplace`, which is False",
        "known": "results in FP64 that are known otherwise than by the operators, so that eager is under test too",
        "linear": "nn.Linear",
        "matmul": "matrix products",
        "packed": "a module that is an `accelcheck.workloads.packed.Packed`",
        "resizable": "a maker that follows its argument `extent`",
        "samplewise": "samples, along the first dimension of every input, that do not depend on each other",
        "scriptable": "a module that torch.jit.script can compile",
        "stream": "a submodule `net` that is called once for each input",
        "training": "a target, a loss and an optimizer",
        "twice-differentiable": "gradients that can be differentiated again, and are in backward mode",
        "unsteady": "results whose last bits may follow from where memory lies, as LAPACK's do: no rerun has to give "
        "the same bits",
        "variable-length": "sequences that differ in length",
        "views": "outputs that are all views of the first input",
    }
)
"""Properties of workloads, by trait. Techniques of other packages may require further traits."""

_SLOWER = """compile-dynamic compile-aot-eager compile-openxla export export-decomposed aot-inductor onnxruntime
openvino jit-trace func-vmap-copies func-jacfwd view-padded""".split()
TRANSLATORS: Mapping[str, int] = MappingProxyType({"eager": 2, "compile-static": 3, **dict.fromkeys(_SLOWER, 4)})
"""Levels of techniques with an implementation of their own for each operator of torch, which run all operators."""
RUNTIMES: Mapping[str, int] = MappingProxyType({"onnxruntime": 3, "openvino": 3})
"""Levels of the runtimes, which have kernels of their own, for families that take them seconds."""

CONTRACTING = frozenset({"attention", "conv", "linear", "matmul"})
"""Traits of workloads with contractions, which reduced precision and tuned kernels are about."""


def described(name: str) -> str:
    """Name and meaning of a trait, for a sentence."""
    return f"{name} ({TRAITS[name]})" if name in TRAITS else name


@dataclass(frozen=True)
class Problem:
    """Instance of a workload, with parameters and inputs on the CPU, in FP32; integer and bool inputs keep their dtype.

    `Program.of` moves it to a device and casts it.

    Attributes:
        module: The model or function. A function without parameters is a module without parameters.
        inputs: Positional arguments of the module: tensors or plain numbers.
        target: Second argument of `loss`. Train and trajectory mode, and tasks, need target, loss and optimizer.
        loss: ``loss(output, target)`` returns a 0-D tensor.
        optimizer: Makes an optimizer of a list of parameters.
        steps: Number of optimizer steps in train and trajectory mode.
        recipe: Training in trajectory mode; `inputs` and `target` are then a data set with one sample a row.
        further: Batches after the first one, `inputs` and `target`. Step k of train mode takes batch k, cyclically. The
            workload has the trait ``batches``.
        writes: Places of the inputs that the module writes to. Their final values are judged like outputs, and each run
            starts from their original ones.
    """

    module: nn.Module
    inputs: tuple[Any, ...]
    target: Target = None
    loss: Loss | None = None
    optimizer: OptimizerMaker | None = None
    steps: int = 4
    recipe: Recipe | None = None
    further: tuple[Batch, ...] = ()
    writes: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            raise TypeError(
                f"Problem.module: expected an nn.Module, got {type(self.module).__name__}: put a function into the "
                "`forward` of a module, or register it with `workload_of`"
            )
        if not isinstance(self.inputs, (tuple, list)):
            raise TypeError(
                "Problem.inputs: expected a tuple of the module's positional arguments, got "
                f"{type(self.inputs).__name__}; for one argument give (x,)"
            )


@runtime_checkable
class Divisible(Protocol):
    """Module of independent parts, with a mapping of outputs by the parts' labels."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the parts."""

    def without(self, labels: frozenset[str]) -> nn.Module:
        """Module with the same inputs, without the parts of these labels."""

    def readers(self, place: int) -> frozenset[str]:
        """Labels of the parts that read the input at a place."""


@dataclass(frozen=True)
class Dropout:
    """Dropout layer of a workload, and the tensors that show its mask.

    In random mode, each element of one output and of one gradient must be its value without dropout (the module in
    evaluation mode) times 0 or ``1 / (1 - rate)``. That value must be clearly different from 0, so that a zero shows a
    dropped element.

    Attributes:
        output: Path of the output, such as ``out[1]``.
        gradient: Path of the gradient, such as ``grad:input[0]``.
        rate: Probability that an element is dropped, between 0 and 1.
        transposed: True if the last two dimensions of the gradient are those of the output in reverse order.
    """

    output: str
    gradient: str
    rate: float
    transposed: bool = False


@dataclass(frozen=True)
class Workload:
    """Model or function that techniques are applied to.

    Each module of the package ``accelcheck.workloads`` is a family and lists its instances in ``WORKLOADS``; other
    packages register theirs with the hook ``pytest_accel_workloads``.

    Attributes:
        name: Name on the command line and in case ids, unique among workloads. It alone decides the seed of parameters
            and inputs; never reuse it for another workload, since baselines and ledgers are stored under case ids.
        summary: Sentence about the workload, and the shapes or operators it stresses.
        make: ``make(generator, extent)`` returns the problem. Draw all random numbers from ``generator``, which is on
            the CPU. Parameters must depend on the generator alone. Workloads with the trait ``resizable`` add
            ``extent`` (an int, 0 for the nominal size) to the sizes that may vary between calls, such as batch or
            length; others ignore it.
        level: Level from which a cheap technique runs the workload: 1 smoke, 2 standard, 3 full.
        modes: Modes of its cases.
        traits: Properties that techniques match with `Technique.requires`, `works_on` and `excludes`: see
            `TRAITS`. A workload without a trait has fewer cases, and
            ``accelcheck list --workload=NAME`` says why; one that claims a trait wrongly fails.
    """

    name: str
    summary: str
    make: Callable[[torch.Generator, int], Problem]
    level: int = 1
    modes: frozenset[Mode] = frozenset({Mode.FORWARD, Mode.BACKWARD})
    traits: frozenset[str] = frozenset()
    dtypes: frozenset[str] = frozenset({"float32", "bfloat16", "float16"})
    """Storage dtypes of its cases. Leave out those in which eager itself does not solve the problem, such as FP16 where
    its range is exceeded."""
    features: frozenset[str] = frozenset()
    """Features that a device must declare, see `accelcheck.devices.base.Device.features`; elsewhere cases are
    ``unsupported``."""
    probes: frozenset[str] = frozenset()
    """Structured inputs to run besides the random ones: names in `accelcheck.workloads.probes.PROBES`. An unknown name
    raises `UnknownNameError` when a case runs."""
    draws: int = 0
    """Number of random draws; 0 for the usual ones. 1 where no parameter or input is random."""
    dropouts: tuple[Dropout, ...] = ()
    """Dropout layers, needed if `modes` has ``random``."""
    idle: frozenset[str] = frozenset()
    """Parameters, by name, and inputs, such as ``input[1]``, that nothing depends on, so that they get no gradient. A
    gradient that is missing elsewhere is an error in backward mode."""
    techniques: frozenset[str] = frozenset()
    """Names of the techniques that run it, of those that accept it; empty for all."""
    levels: Mapping[str, int] = field(default_factory=dict)
    """Levels of its cases by technique, or by technique and mode as in ``compile-static/backward``, in the technique's
    first dtype. The cost of a technique decides the level where it is absent here."""
    divisible: bool = False
    """True for `Divisible` modules: parts that a technique refuses are left out of a case, and named."""
    sizes: OtherSizes | None = None
    """User-owned model at other sizes, which forward and backward cases judge too; None for built-in workloads."""
    estimators: frozenset[str] = frozenset()
    """Names of a user-owned model's custom autograd functions with gradients that are not derivatives by design."""
    given: bool = False
    """True for a model that nobody would change for its check. Tensors decided by rounding errors alone, such as the
    gradient of a bias before batch norm, are left out of the judgement, and named; elsewhere they are an error."""

    @property
    def owned(self) -> bool:
        """True for a user-owned model; built-in operators are `given` but not owned."""
        return self.sizes is not None

    def without(self, labels: frozenset[str]) -> Workload:
        """Workload without some parts of its modules; for a `divisible` one."""
        digest = hashlib.sha256("\n".join(sorted(labels)).encode()).hexdigest()[:12]
        return replace(self, name=f"{self.name}~{digest}", make=partial(_reduced, self.make, labels))

    def only(self, label: str) -> Workload:
        """Workload with one part of its modules; for a `divisible` one."""
        return replace(self, name=f"{self.name}~{label}", make=partial(_single, self.make, label))

    def narrowed(self) -> Workload:
        """Workload with only the inputs that its parts read, and the first one; for a `divisible` one.

        A converter takes 1.2 s for the 277 inputs of a bundle with four parts left, and 0.1 s for their nine.
        """
        return replace(self, name=f"{self.name}~narrowed", make=partial(_narrowed, self.make))

    def problem(self, seed: int, extent: int = 0) -> Problem:
        """Problem of a seed, bitwise the same on every machine with the same torch.

        Args:
            seed: Seed of the generator for `make`, and of a fork of torch's global generator, from which `torch.nn`'s
                initialisers draw. The global generator itself does not change.
            extent: Amount added to the sizes that may vary: see `make`.
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # the CPU's alone: the fork does not restore other devices'
            made: Any = self.make(generator, extent)
        if not isinstance(made, Problem):
            raise TypeError(
                f"the maker of the workload {self.name} returned {type(made).__name__}: expected a Problem, such as "
                "Problem(module, inputs=(x,))"
            )
        return made


@dataclass(frozen=True)
class OtherSizes:
    """Workload at other sizes than its example's.

    Attributes:
        workloads: Workloads by size, such as ``dimension 0 = 9``, the most important one first.
        refused: Reasons why other dimensions keep their sizes.
    """

    workloads: Mapping[str, Workload]
    refused: tuple[str, ...] = ()


def _reduced(
    make: Callable[[torch.Generator, int], Problem], labels: frozenset[str], generator: torch.Generator, extent: int
) -> Problem:
    """Problem without the parts of these labels."""
    problem = make(generator, extent)
    module = divided(problem.module).without(labels)
    return replace(problem, module=module, writes=frozenset(filter(divided(module).readers, problem.writes)))


def _single(
    make: Callable[[torch.Generator, int], Problem], label: str, generator: torch.Generator, extent: int
) -> Problem:
    """Problem with the part of this label alone."""
    problem = make(generator, extent)
    others = frozenset(divided(problem.module).labels) - {label}
    return _reduced(lambda *_: problem, others, generator, extent)


class _Narrowed(nn.Module):
    """`Divisible` module that takes only the inputs at some places, and passes None for the others."""

    def __init__(self, module: Divisible, places: Sequence[int], count: int) -> None:
        super().__init__()
        self.module: Any = module
        self.places = tuple(places)
        self.count = count

    def forward(self, *inputs: Any) -> Any:
        given = dict(zip(self.places, inputs, strict=True))
        return self.module(*(given.get(place) for place in range(self.count)))

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the parts."""
        labels: tuple[str, ...] = self.module.labels
        return labels


def _narrowed(make: Callable[[torch.Generator, int], Problem], generator: torch.Generator, extent: int) -> Problem:
    problem = make(generator, extent)
    module = divided(problem.module)
    places = [place for place in range(len(problem.inputs)) if not place or module.readers(place)]
    return replace(
        problem,
        module=_Narrowed(module, places, len(problem.inputs)),
        inputs=tuple(problem.inputs[place] for place in places),
        writes=frozenset(new for new, place in enumerate(places) if place in problem.writes),
    )


_PLACE = re.compile(r"grad:input\[([0-9]+)\]")


def part_of(module: Divisible, path: str) -> str:
    """Label of the part that alone decides the tensor at a path; empty for no part or several."""
    if gradient := _PLACE.match(path):
        readers = module.readers(int(gradient[1]))
        return next(iter(readers)) if len(readers) == 1 else ""
    return next((label for label in module.labels if path.startswith(f"out[{label!r}]")), "")


def divided(module: nn.Module) -> Divisible:
    """Module of a `Workload.divisible`.

    Raises:
        TypeError: It is not `Divisible`.
    """
    if not isinstance(module, Divisible):
        raise TypeError(f"expected a module with `labels`, `without` and `readers`, got {type(module).__name__}")
    return module
