"""Faults of training loops: scaler, clipping, resumption, optimizer state and steps, and reduced precision."""

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from accelcheck.core.case import Mode
from accelcheck.selftest.faults import plant
from accelcheck.selftest.faults.base import FLOAT32, Cell, Change, alike, derived, fault, single, trained, variant
from accelcheck.selftest.faults.matmul import without_last_term
from accelcheck.selftest.faults.plant import always, changing, kernel, kernels, products, spoiling, truncated_to
from accelcheck.selftest.faults.sowing import in_cpp, kernel_text
from accelcheck.techniques.optimizers.state import KeptStates
from accelcheck.workloads.base import Program
from accelcheck.workloads.trainer import Parts, Trainable, Trainer


def trainer(edit: Callable[[Trainer], None]) -> Change:
    """Change a program's trainer."""

    def change(program: Program) -> None:
        if program.trainer is None:
            raise TypeError("expected a program with a recipe: plant it in a trajectory")
        edit(program.trainer)

    return change


@always(trainer)
def clipped_scaled(trained: Trainer) -> None:
    """Gradients are clipped before they are unscaled. The scaler unscales them later."""
    trained.unscale = lambda *_: None  # type: ignore[method-assign]  # on this instance alone


def never_skips(optimizer: torch.optim.Optimizer) -> None:
    """Tells the scaler that the optimizer checks for infinities itself, as fused ones do, while it does not."""
    plain = optimizer.step

    def step(own: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
        # Attributes that the scaler passes: the plain optimizer must not see them.
        vars(own).update(grad_scale=None, found_inf=None)
        return plain(*args, **options)

    # A method, because schedules take it apart.
    vars(optimizer).update(_step_supports_amp_scaling=True, step=MethodType(step, optimizer))


unskipped = spoiling(never_skips)
"""An optimizer that takes a step with infinite gradients."""


def forgetting(*entries: str) -> Callable[[float], Change]:
    """A resumed training starts with part of its state reset."""

    def edit(trained: Trainer) -> None:
        plain = trained.load

        def load(program: Trainable, parts: Parts, state: Mapping[str, Any]) -> None:
            fresh = trained.state(program, parts)
            plain(program, parts, {**state, **{name: fresh[name] for name in entries}})

        trained.load = load  # type: ignore[method-assign]  # on this instance alone

    return lambda _: trainer(edit)


def without_option(**options: Any) -> Callable[[float], Change]:
    """Ignores options of the optimizer."""

    def ignore(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group.update(options)

    return spoiling(ignore)


class HalfState(torch.optim.SGD):
    """SGD that keeps its momentum in a half type, `dtype`."""

    def __init__(self, parameters: Iterable[Tensor], dtype: torch.dtype, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.kept = dtype

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for state in self.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(self.kept).to(value.dtype)
        return loss


def half_state(bits: float) -> Change:
    """Momentum is kept in a half type with this number of significant bits."""
    dtype = torch.bfloat16 if bits == 8 else torch.float16
    return plant.optimizing(partial(HalfState, dtype=dtype, lr=0.02, momentum=0.9))


def restored(trained: Trainer) -> None:
    """State is saved and loaded after every step."""
    plain = trained.take

    def take(program: Trainable, parts: Parts) -> tuple[Tensor, Tensor]:
        out = plain(program, parts)
        parts.generator = torch.random.get_rng_state()
        trained.load(program, parts, copy.deepcopy(trained.state(program, parts)))
        return out

    trained.take = take  # type: ignore[method-assign]  # on this instance alone


TRAJECTORY = (single("trajectory-mlp", Mode.TRAJECTORY),)
SMALL_STEPS = "a momentum with 8 bits moves a step by less than parameters are rounded; 11 are its own"


WIDE = ("float32", "bfloat16")
"""Dtypes of the small trainings, which leave FP16's range."""


@always(kernel("_fused_adam_", "_fused_adamw_"))
def next_correction(func: Any, *args: Any, **options: Any) -> Any:
    """The fused step corrects the bias of its moments as in the step after it."""
    *lists, counts = args
    return func(*lists, [count + 1 for count in counts], **options)


@always(kernel("_fused_sgd_"))
def momentum_stale(func: Any, parameters: Any, gradients: Any, momenta: Any, *rest: Any, **options: Any) -> Any:
    """The fused step does not write momentum back. The first step does."""
    kept = [] if options["is_first_step"] else [momentum.clone() for momentum in momenta]
    out = func(parameters, gradients, momenta, *rest, **options)
    for momentum, before in zip(momenta, kept, strict=bool(kept)):
        momentum.copy_(before)
    return out


def last_parameter_left(strength: float) -> Change:
    """The update of a list of parameters leaves out the last one."""

    def listed(func: Any, parameters: Any, *lists: Any, **options: Any) -> Any:
        fewer = (value[:-1] if isinstance(value, (list, tuple)) else value for value in lists)
        return func(parameters[:-1], *fewer, **options)

    def renewed(func: Any, parameters: Any, *lists: Any, **options: Any) -> Any:
        return [*listed(func, parameters, *lists, **options), parameters[-1].clone()]

    return kernels(_foreach_addcdiv_=listed, _foreach_addcdiv=renewed)  # in place, and where tensors are rebound


@always(kernel("_foreach_div_", "_foreach_div"))  # as above
def root_before_epsilon(func: Any, values: Any, divisors: Any) -> Any:
    """The denominator of a step on lists is not corrected for its bias."""
    return func(values, [1.0] * len(divisors))


def counted_once(optimizer: torch.optim.Optimizer) -> None:
    """The step count that is kept on the device stays 1."""

    def stuck(own: torch.optim.Optimizer, *_: Any) -> None:
        for state in own.state.values():
            state["step"].fill_(1)

    optimizer.register_step_post_hook(stuck)


@always(changing)
def truncated_states(program: Program) -> None:
    """Optimizer states are truncated to bfloat16, not rounded."""
    kept = program.optimizer
    if not isinstance(kept, KeptStates):
        raise TypeError(f"expected an optimizer whose states are converted, got {type(kept).__name__}")
    kept.narrow = truncated


def truncated(state: Tensor) -> Tensor:
    """FP32 truncated to bfloat16, without a view of its bits, which not every device has."""
    nearest = state.bfloat16()
    # A half to a whole unit in the last place less, and rounded: one unit less.
    below = (nearest.float() * (1 - 2**-8)).bfloat16()
    return torch.where(nearest.float().abs() > state.abs(), below, nearest)


@always(changing)
def one_context(program: Program) -> None:
    """Autocast uses the copies of weights in half precision that it made before they were updated."""
    place = next(program.module.parameters()).device.type
    program.within = lambda: torch.autocast(place, dtype=torch.bfloat16)


@always(products)
def truncated_operands(a: Tensor, b: Tensor) -> Tensor:
    """Products in reduced precision truncate their operands to 4 significant bits."""
    return truncated_to(4, a.float()) @ truncated_to(4, b.float())


slow, scaling = alike(seeds=10), alike(technique="grad-scaler-fp16")
fused, foreach = (alike(technique=f"optimizer-{name}", seeds=10) for name in ("fused", "foreach"))

FAULTS = (
    scaling("clipping-before-unscale")(TRAJECTORY, clipped_scaled, number=29),
    scaling("step-not-skipped", "A step is taken with infinite gradients.")(TRAJECTORY, unskipped, number=30),
    scaling("resume-loses-scaler", "A resumed training starts with a fresh gradient scaler.")(
        TRAJECTORY, forgetting("scaler"), number=34
    ),
    *(
        fault(f"resume-loses-{what}", f"A resumed training starts with a fresh {what}.")(
            TRAJECTORY, forgetting("loader" if what == "sampler" else what), number=34
        )
        for what in ("optimizer", "schedule", "generator", "sampler")
    ),
    fault("momentum-ignored", "The optimizer forgets its momentum.")(
        Cell("train-mlp", Mode.TRAIN), without_option(momentum=0.0)
    ),
    fault("decay-ignored", "Weight decay is ignored.")(TRAJECTORY, without_option(weight_decay=0.0)),
    fault("half-precision-state")(
        Cell("train-mlp", Mode.TRAIN, FLOAT32, {"float16": SMALL_STEPS}),
        half_state,
        strengths=(8.0, 11.0),
        absent={"bfloat16": "momentum has the parameters' dtype, and so 8 bits anyway"},
    ),
    fused("fused-next-correction")(Cell("train-amsgrad", Mode.TRAIN, WIDE), next_correction),
    fused("fused-momentum-stale")(
        (Cell("train-nesterov", Mode.TRAIN, WIDE), Cell("train-mlp", Mode.TRAIN)), momentum_stale
    ),
    foreach("foreach-last-parameter-left")((trained("train-adagrad"), trained("train-nadam")), last_parameter_left),
    foreach("foreach-root-uncorrected")(trained("train-transformer"), root_before_epsilon, seeds=3),
    fault("compiled-momentum-constant", "A compiled step has another momentum as its constant.")(
        trained("train-nesterov"),
        around=kernel_text(r"static_cast<float>\(0\.9\)", lambda _: "static_cast<float>(0.89)"),
        exists=in_cpp,
        technique="optimizer-compiled",
        seeds=1,
    ),
    slow("capturable-counted-once")(trained("train-amsgrad"), spoiling(counted_once), technique="optimizer-capturable"),
    fault("states-truncated")(
        (trained("train-mlp"), trained("train-transformer")),
        truncated_states,
        technique="optimizer-bf16-states",
        emulated=True,
        seeds=3,
    ),
    slow("autocast-weights-stale")(trained("train-mlp"), one_context, technique="amp-bf16"),
    fault("reduced-depth-dropped", "Products in reduced precision leave out the last element of their depth.")(
        (single("matmul"), derived("mlp")), lambda _: products(without_last_term), technique="matmul-bf16"
    ),
    fault("reduced-operands-truncated")(single("matmul"), truncated_operands, technique="matmul-tf32"),
)

VARIANTS = (variant("resumed-every-step", restored)(TRAJECTORY, lambda: trainer(restored)),)
