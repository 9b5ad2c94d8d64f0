"""A workload: a module with a deterministic maker of parameters and inputs, and how it is run in each mode."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from accelcheck.core.case import Mode
from accelcheck.workloads.signatures import Loss, OptimizerMaker, Result
from accelcheck.workloads.trainer import Recipe, Trainer

__all__ = ["Dropout", "Loss", "OptimizerMaker", "Problem", "Program", "Result", "Workload", "flatten", "leaf", "to"]


@dataclass(frozen=True)
class Problem:
    """A workload made concrete: on the CPU, in FP32 (integer and bool inputs keep their dtype).

    Attributes:
        module: The model or function. Stateless functions are modules without parameters.
        inputs: Positional arguments of the module; tensors or plain numbers.
        target: What `loss` compares the output with; for training.
        loss: Scalar loss of the module's output and `target`; for training.
        optimizer: Makes the optimizer from the parameters; for training.
        steps: Number of optimizer steps of a training run.
        recipe: How it is trained in trajectory mode; inputs and target are then a data set, one sample a row.
    """

    module: nn.Module
    inputs: tuple[Any, ...]
    target: Tensor | None = None
    loss: Loss | None = None
    optimizer: OptimizerMaker | None = None
    steps: int = 4
    recipe: Recipe | None = None


@dataclass(frozen=True)
class Dropout:
    """One dropout of a workload, and where its mask shows.

    Of an output and of a gradient, each element must be what it is without dropout (the module in evaluation mode), and
    clearly not 0, times 0 or ``1 / (1 - rate)``: from both, the mask can be read.

    Attributes:
        output: Path of the output, such as ``out[1]``.
        gradient: Path of the gradient, such as ``grad:input[0]``.
        rate: Probability that an element is dropped.
        transposed: Whether the gradient has the last two dimensions of the output swapped.
    """

    output: str
    gradient: str
    rate: float
    transposed: bool = False


@dataclass(frozen=True)
class Workload:
    """A model or function that techniques are applied to. One file a family; each lists its `WORKLOADS`.

    Attributes:
        name: Its word on the command line and in case ids.
        summary: One sentence: what it is and which shapes it stresses.
        make: ``make(generator, extent)`` gives the problem. All randomness comes from the CPU generator. Parameters
            depend on the generator alone; `extent` is added to the sizes that may vary between calls (batch, length),
            0 being the nominal size, for workloads with the trait ``resizable``.
        level: 1 smoke, 2 standard, 3 full: the level at which a cheap technique runs it.
        modes: The modes that make sense for it.
        traits: What techniques ask for: ``matmul``, ``linear`` (has nn.Linear), ``conv`` (NCHW convolution), ``attention``
            (calls scaled_dot_product_attention), ``inplace`` (submodules with an ``inplace`` attribute), ``blocks``
            (a ``blocks`` ModuleList whose members can be checkpointed), ``resizable``, ``branching`` (Python control
            flow on data), ``batchnorm``, ``exact`` (no rounding at all: indexing, copies), ``custom-function`` (has one: gradients are checked by finite differences),
            ``twice-differentiable`` (its gradients are differentiated too), ``packed`` (its module is a
            `accelcheck.workloads.packed.Packed`), ``variable-length`` (a packed one of sequences that differ in length),
            ``scriptable``, ``training``, ``constants`` (has expressions that no input goes into), ``stream`` (calls its
            ``net`` for one input after the other), ``activations`` (its memory is mostly activations), ``views`` (all
            outputs are views of the first input), ``index-tensors`` (in brackets), ``index-operators`` (calls
            torch.index_select or torch.gather).
    """

    name: str
    summary: str
    make: Callable[[torch.Generator, int], Problem]
    level: int = 1
    modes: frozenset[Mode] = frozenset({Mode.FORWARD, Mode.BACKWARD})
    traits: frozenset[str] = frozenset()
    dtypes: frozenset[str] = frozenset({"float32", "bfloat16", "float16"})
    """Storage dtypes in which eager itself still solves the problem."""
    features: frozenset[str] = frozenset()
    """What a device must declare for it to exist there: see `accelcheck.devices.base.Device.features`."""
    probes: frozenset[str] = frozenset()
    """Structured inputs that mean something for it besides random ones: names of `accelcheck.workloads.probes.PROBES`."""
    dropouts: tuple[Dropout, ...] = ()
    """Its random operations; at least one where the modes have ``random``."""

    def problem(self, seed: int, extent: int = 0) -> Problem:
        """The problem of this seed: bitwise the same on every machine with the same torch.

        Parameters are drawn under a forked global generator too, since `torch.nn` modules initialise from it.
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # no other device's, which would not be restored
            return self.make(generator, extent)


@dataclass
class Program:
    """A problem on a device, ready to run; techniques change its parts.

    Attributes:
        module: On the device. Its parameters are those that gradients are taken of.
        inputs: On the device; float tensors get gradients in backward mode.
        target, loss, optimizer, steps: As in `Problem`, on the device.
        seed: Seed of the output gradients of backward mode.
        call: What is called in place of `module`: a compiled, scripted or wrapped one. Defaults to `module`.
        around: Context of every forward pass (loss included): autocast, a forced SDPA backend. A fresh one each time.
        scaler: Scales the loss in backward and train modes when set.
        synchronize: Called after every optimizer step and at the end: materialises lazy devices.
        update: Context of every optimizer step.
        within: Context of all that is run: forward, backward, optimizer step.
        strided_cotangents: Whether the output gradients of backward mode lie in memory with their dimensions reversed.
        twice: Whether backward mode differentiates the gradients too.
        backpropagate: Given the number of a training step (0 begins a training), gives the parameters their gradients and
            returns the loss; in train mode, in place of one pass over the whole batch.
        advance: Given the optimizer and the number of a training step, takes the step and returns the loss; in train mode,
            in place of `backpropagate` and `update`. Gradients are cleared before.
        trainer: Trains it in trajectory mode; each of its parts can be replaced. None without a recipe.
        elsewhere: Runs the program in a mode in this one's place: in other processes, or in a context that spans forward and
            backward. What it gives is on the device.
    """

    module: nn.Module
    inputs: tuple[Any, ...]
    target: Tensor | None = None
    loss: Loss | None = None
    optimizer: OptimizerMaker | None = None
    steps: int = 4
    seed: int = 0
    call: Callable[..., Any] | None = None
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    scaler: torch.amp.GradScaler | None = None
    synchronize: Callable[[], None] = lambda: None
    update: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    backpropagate: Callable[[int], Tensor] | None = None
    advance: Callable[[torch.optim.Optimizer, int], Tensor] | None = None
    trainer: Trainer | None = None
    elsewhere: Callable[[Program, Mode], Result] | None = None
    strided_cotangents: bool = False
    twice: bool = False
    extras: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        problem: Problem,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        synchronize: Callable[[], None] = lambda: None,
    ) -> Program:
        """Move a problem to a device and cast its floating-point parameters, buffers, inputs and target to `dtype`.

        The problem is consumed: its module is moved, not copied.
        """
        return cls(
            module=problem.module.to(device=device, dtype=dtype),
            inputs=tuple(to(value, device, dtype) for value in problem.inputs),
            target=None if problem.target is None else to(problem.target, device, dtype),
            loss=problem.loss,
            optimizer=problem.optimizer,
            steps=problem.steps,
            seed=seed,
            synchronize=synchronize,
            trainer=None if problem.recipe is None else Trainer(problem.recipe),
        )

    def widened(self) -> Self:
        """This program, which is on the CPU, in FP64; its numbers stay as the present dtype has rounded them."""
        self.module.double()
        self.inputs = tuple(to(value, "cpu", torch.float64) for value in self.inputs)
        self.target = to(self.target, "cpu", torch.float64)
        return self

    def problem(self) -> Problem:
        """The problem that it is now: a copy on the CPU, in the dtypes that it has. See `of` for the way back."""
        host = torch.device("cpu")
        return Problem(
            copy.deepcopy(self.module).to(host),
            tuple(value.detach().to(host) if isinstance(value, Tensor) else value for value in self.inputs),
            target=None if self.target is None else self.target.to(host),
            loss=self.loss,
            optimizer=self.optimizer,
            steps=self.steps,
            recipe=None if self.trainer is None else self.trainer.recipe,
        )

    def run(self, mode: Mode) -> Result:
        """Run once in a mode. Gradients are cleared before; parameters change in train and trajectory mode only.

        Raises:
            ValueError: The problem lacks a loss, target or optimizer for train mode, or a recipe for trajectory mode, or
                the mode is none of forward, backward, train and trajectory.
        """
        with self.within():
            result = self._ran(mode) if self.elsewhere is None else self.elsewhere(self, mode)
        self.synchronize()
        return {path: tensor.detach() for path, tensor in result.items()}

    def _ran(self, mode: Mode) -> Result:
        if mode is Mode.FORWARD:
            return self._forward()
        if mode is Mode.BACKWARD:
            return self._backward()
        if mode is Mode.TRAIN:
            return self._train()
        if mode is Mode.TRAJECTORY and self.trainer is not None:
            return self.trainer.train(self)
        needs = "; the problem has no recipe" if mode is Mode.TRAJECTORY else ""
        raise ValueError(f"a program runs forward, backward, train or trajectory, not {mode}{needs}")

    def repeated(self, mode: Mode) -> Callable[[], object]:
        """What does the work of a mode once a call, and nothing besides: a forward pass, or the next training step.

        Its inputs are those that the program has when it is called.

        Raises:
            ValueError: The mode is neither forward nor train, or the problem lacks a loss, target or optimizer for train mode.
        """
        if self.elsewhere is not None:
            return lambda: self.run(mode)
        if mode is Mode.FORWARD:
            self.module.eval()

            def inferred() -> object:
                with self.within(), torch.no_grad():
                    return self._called()

            return inferred
        if mode is Mode.TRAIN:
            optimizer, steps = self.begin(), itertools.count()

            def trained() -> object:
                with self.within():
                    return self.take(optimizer, next(steps))

            return trained
        raise ValueError(f"forward passes and training steps can be repeated, not {mode}")

    def _called(self) -> Any:
        call = self.module if self.call is None else self.call
        with self.around():
            return call(*self.inputs)

    def _forward(self) -> Result:
        self.module.eval()
        with torch.no_grad():
            return dict(flatten(self._called()))

    def _backward(self) -> Result:
        self.module.train()
        return self.gradients()

    def gradients(self) -> Result:
        """Outputs, gradients and buffers, with the module in the mode (training or evaluation) that it is in."""
        self.module.zero_grad(set_to_none=True)
        self.inputs = tuple(leaf(value) for value in self.inputs)
        result = dict(flatten(self._called()))
        # Integer outputs carry no gradient; the gradient of a path depends on its name alone.
        roots = {path: out for path, out in result.items() if out.requires_grad}
        cotangents = [self.cotangent(path, out) for path, out in roots.items()]
        factor = 1.0
        outs = list(roots.values())
        if self.scaler is not None:
            outs = [self.scaler.scale(out) for out in outs]
            factor = float(self.scaler.get_scale())
        torch.autograd.backward(outs, cotangents)
        for index, value in enumerate(self.inputs):
            if isinstance(value, Tensor) and value.grad is not None:
                result[f"grad:input[{index}]"] = value.grad / factor
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                result[f"grad:{name}"] = parameter.grad / factor
        if self.twice:
            result |= self._second()
        return result | self._buffers()

    def _second(self) -> Result:
        """Gradients of the gradients, each contracted with a direction of its own."""
        outs = {path: out for path, out in flatten(self._called()) if out.requires_grad}
        leaves = {f"input[{i}]": v for i, v in enumerate(self.inputs) if isinstance(v, Tensor) and v.requires_grad}
        leaves |= {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        cotangents = [self.cotangent(path, out) for path, out in outs.items()]
        first = torch.autograd.grad(
            list(outs.values()), list(leaves.values()), cotangents, create_graph=True, allow_unused=True
        )
        found = {name: g for name, g in zip(leaves, first, strict=True) if g is not None and g.requires_grad}
        directions = [self.cotangent(f"grad:{name}", gradient) for name, gradient in found.items()]
        # Where nothing depends on a leaf, some implementations know it and others compute zeros: all give zeros.
        second = torch.autograd.grad(list(found.values()), list(leaves.values()), directions, materialize_grads=True)
        return {f"grad2:{name}": gradient for name, gradient in zip(leaves, second, strict=True)}

    def cotangent(self, path: str, out: Tensor) -> Tensor:
        """The output gradient of a path, of the shape, dtype and device of `out`: it depends on path and seed alone."""
        from accelcheck.core.case import stable_seed

        generator = torch.Generator().manual_seed(self.seed ^ stable_seed(path))
        drawn = torch.randn(out.shape, generator=generator, dtype=torch.float32)
        # Multiples of 1/64 below 4 are the same numbers in every dtype: the oracle and a half-precision run see one gradient.
        drawn = (64 * drawn).round().clamp(-255, 255).div(64).to(device=out.device, dtype=out.dtype)
        return _reversed(drawn) if self.strided_cotangents else drawn

    def _train(self) -> Result:
        optimizer = self.begin()
        return self.trained([self.take(optimizer, step) for step in range(self.steps)])

    def begin(self) -> torch.optim.Optimizer:
        """Begin a training of train mode: a fresh optimizer of the module, put in training mode.

        Raises:
            ValueError: The problem lacks a loss, a target or an optimizer.
        """
        if self.loss is None or self.target is None or self.optimizer is None:
            raise ValueError("train mode needs a loss, a target and an optimizer: give the Problem all three")
        self.module.train()
        return self.optimizer(list(self.module.parameters()))

    def take(self, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        """One step of train mode, with its number; gives its loss, 0-D."""
        optimizer.zero_grad(set_to_none=True)
        advance = self._advance if self.advance is None else self.advance
        loss = advance(optimizer, step)
        self.synchronize()
        return loss

    def _advance(self, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        backpropagate = self._backpropagate if self.backpropagate is None else self.backpropagate
        loss = backpropagate(step).detach().clone()
        with self.update():
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
                self.scaler.update()
        return loss

    def trained(self, losses: Sequence[Tensor]) -> Result:
        """What train mode gives after steps of these losses."""
        result: Result = {f"loss[{step}]": loss for step, loss in enumerate(losses)}
        result |= {f"parameter:{name}": parameter for name, parameter in self.module.named_parameters()}
        return result | self._buffers()

    def training_loss(self, inputs: tuple[Any, ...], target: Tensor | None) -> Tensor:
        """The loss of one forward pass over these inputs, as train mode computes it.

        Raises:
            ValueError: The problem has no loss, or no target is given.
        """
        if self.loss is None or target is None:
            raise ValueError("a training loss needs a loss and a target: give the Problem both")
        call = self.module if self.call is None else self.call
        with self.around():
            return self.loss(call(*inputs), target)

    def _backpropagate(self, step: int) -> Tensor:
        del step
        loss = self.training_loss(self.inputs, self.target)
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]  # torch annotates Tensor.backward only in part
        return loss

    def _buffers(self) -> Result:
        # A side effect of the forward pass is part of the result: batch-norm statistics, for one.
        return {f"buffer:{name}": buffer.clone() for name, buffer in self.module.named_buffers()}


def _reversed(tensor: Tensor) -> Tensor:
    """The same values with the first dimension as the fastest in memory."""
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def leaf(value: Any) -> Any:
    """A floating-point tensor as a leaf that collects a fresh gradient, sharing storage and strides; else `value`."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def to(value: Any, device: torch.device | str, dtype: torch.dtype) -> Any:
    """A tensor on `device`, in `dtype` when it is floating-point; anything else as it is.

    Strides survive: what is transposed, sliced or expanded on the CPU is so on the device, by way of its base.
    """
    if not isinstance(value, Tensor):
        return value
    target = dtype if value.is_floating_point() else value.dtype
    if value.is_contiguous():
        return value.to(device=device, dtype=target)
    # `Tensor.to` densifies sliced and expanded tensors: move the storage behind them, then take the same view of it.
    storage_size = value.untyped_storage().nbytes() // value.element_size()
    base = value.as_strided((storage_size,), (1,), 0).to(device=device, dtype=target)
    return base.as_strided(value.shape, value.stride(), value.storage_offset())


def flatten(value: Any, path: str = "out") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of nested tuples, lists and mappings, with its path.

    Raises:
        TypeError: Something else than a tensor was found, named by its path.
    """
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key in value:
            yield from flatten(value[key], f"{path}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from flatten(item, f"{path}[{index}]")
    else:
        raise TypeError(f"{path}: expected a tensor, or tuples, lists and mappings of them; got {type(value).__name__}")
