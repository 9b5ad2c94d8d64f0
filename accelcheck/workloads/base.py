"""Runs workloads: a problem on a device, in each mode. `accelcheck.workloads.problem` describes them."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from accelcheck.core.case import Mode
from accelcheck.devices.layouts import dense, sparse
from accelcheck.devices.torch_names import pytree
from accelcheck.workloads.problem import Dropout, Problem, Workload
from accelcheck.workloads.signatures import Batch, Loss, OptimizerMaker, Result, Target, tensors_in
from accelcheck.workloads.trainer import Trainer

__all__ = [
    "Batch", "Dropout", "Loss", "OptimizerMaker", "Problem", "Program", "Result", "Workload", "flatten", "leaf", "to"
]  # fmt: skip

Copied = TypeVar("Copied")


@dataclass
class Program:
    """Problem on a device, ready to run. `Technique.prepare` changes its attributes to apply a technique.

    Attributes:
        module: Module on the device, whose parameters get gradients and updates.
        inputs: Inputs on the device. Floating-point tensors get gradients in backward mode.
        target, further: Those of `Problem`, on the device.
        loss, steps, writes: Those of `Problem`.
        optimizer: Maker of `Problem`, called at the beginning of each training.
        seed: Seed of the output gradients of backward mode, and of the order of mini-batches in trajectory mode.
        call: Called in place of `module` with the inputs: a compiled, scripted or wrapped module. None for `module`.
        around: Returns the context of a forward pass, loss included, such as autocast. Called for every pass.
        scaler: Scales outputs in backward mode, and losses in train and trajectory mode. None for no scaling.
        synchronize: Called after every optimizer step and run; makes lazy devices compute queued operations.
        update: Returns the context of an optimizer step. Called for every step.
        within: Returns the context of a whole run: forward, backward and optimizer steps. Called for every run.
        backpropagate: ``backpropagate(step)`` computes the gradients of a training step, sets them on the parameters
            and returns the loss. ``step`` counts from 0 in each training. In train mode, it replaces one pass over the
            batch.
        advance: ``advance(optimizer, step)`` takes a whole training step, from cleared gradients, and returns the loss.
            In train mode, it replaces `backpropagate` and `update`.
        trainer: Trains the program in trajectory mode; techniques may replace it by a subclass. None without a recipe.
        elsewhere: ``elsewhere(program, mode)`` runs the program and returns its result, on the device. It replaces the
            whole run: in other processes, or in a context that includes forward and backward. None for this process.
        strided_cotangents: True for output gradients of backward mode whose first dimension is the fastest in memory.
        twice: True if backward mode also computes gradients of gradients, as ``grad2:...``.
        extras: Data that `Technique.prepare` leaves for `Technique.evidence`.
        resets: Functions called before each judged run, which clear what a technique counts, such as `Counter.clear`,
            so that `Technique.evidence` is about this run alone.
        accumulates: True if a run in backward mode adds to the previous run's gradients instead of clearing them.
        overwrites: Documented reason why the next run may overwrite this one's result; empty where it must not.
    """

    module: nn.Module
    inputs: tuple[Any, ...]
    target: Target = None
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
    resets: list[Callable[[], object]] = field(default_factory=list)
    further: tuple[Batch, ...] = ()
    accumulates: bool = False
    overwrites: str = ""
    writes: frozenset[int] = frozenset()

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
        """Moves a problem to a device and casts its parameters, buffers, inputs and target to `dtype`: see `in_dtype`.

        The module is moved, not copied: do not use the problem afterwards.
        """
        return cls(
            module=cast(problem.module, device, dtype),
            inputs=tuple(to(value, device, dtype) for value in problem.inputs),
            target=to(problem.target, device, dtype),
            loss=problem.loss,
            optimizer=problem.optimizer,
            steps=problem.steps,
            seed=seed,
            synchronize=synchronize,
            trainer=None if problem.recipe is None else Trainer(problem.recipe),
            further=batches_to(problem.further, device, dtype),
            writes=problem.writes,
        )

    def widened(self) -> Self:
        """Casts this program, on the CPU, to FP64 in place, with values as its previous dtype rounded them."""
        cast(self.module, "cpu", torch.float64)
        self.inputs = tuple(to(value, "cpu", torch.float64) for value in self.inputs)
        self.target = to(self.target, "cpu", torch.float64)
        self.further = batches_to(self.further, "cpu", torch.float64)
        return self

    def problem(self) -> Problem:
        """Copy of the program's present state as a problem, on the CPU, in its present dtypes. `of` is the inverse."""
        host = torch.device("cpu")
        return Problem(
            duplicate(self.module).to(host),
            tuple(value.detach().to(host) if isinstance(value, Tensor) else value for value in self.inputs),
            target=pytree.tree_map_only(Tensor, lambda value: value.to(host), self.target),
            loss=self.loss,
            optimizer=self.optimizer,
            steps=self.steps,
            recipe=None if self.trainer is None else self.trainer.recipe,
            further=tuple(
                (
                    tuple(value.to(host) for value in inputs),
                    pytree.tree_map_only(Tensor, lambda value: value.to(host), target),
                )
                for inputs, target in self.further
            ),
            writes=self.writes,
        )

    def run(self, mode: Mode) -> Result:
        """Runs once in a mode. Clears gradients first unless it `accumulates`; only trainings change parameters.

        Returns:
            Tensors on the device, detached: outputs (forward, backward), gradients and buffers (backward), or losses,
            parameters and buffers (train), see `Trainer.train` for trajectory mode; and inputs that the module `writes`
            to, as it leaves them.

        Raises:
            ValueError: The problem lacks a loss, target or optimizer for train or trajectory mode, or a recipe for
                trajectory mode, or the mode is none of these four.
        """
        before = {place: self.inputs[place].detach().clone() for place in self.writes}
        with self.within():
            result = self._ran(mode) if self.elsewhere is None else self.elsewhere(self, mode)
        self.synchronize()
        stored_result = {path: stored(tensor) for path, tensor in result.items()} | self.left()
        if before:
            # The next run needs the same inputs in the same memory, without this run's graph; outputs may lie there.
            stored_result = {path: tensor.clone() for path, tensor in stored_result.items()}
            self.inputs = tuple(
                value.detach().copy_(before[place]) if place in before else value
                for place, value in enumerate(self.inputs)
            )
        return stored_result

    def left(self) -> Result:
        """Copies of the inputs that the module `writes` to, by path."""
        return {f"input[{place}]": stored(self.inputs[place]).clone() for place in sorted(self.writes)}

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
        """Function to time: each call does one forward pass or the next training step with the present inputs.

        Raises:
            ValueError: The mode is neither forward nor train, or train mode lacks a loss, target or optimizer.
        """
        if self.elsewhere is not None:
            return lambda: self.run(mode)
        if mode is Mode.FORWARD:
            self.switch(training=False)

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

    def switch(self, *, training: bool) -> None:
        """Switches the module, and the one called in its place, to training or evaluation mode.

        A script keeps its mode: it does not know overrides of `train`, such as one that keeps a norm frozen.
        """
        self.module.train(training)
        if isinstance(self.call, nn.Module) and not isinstance(self.call, torch.jit.ScriptModule):
            with contextlib.suppress(NotImplementedError):  # an exported program keeps the mode that it was exported in
                self.call.train(training)

    def _forward(self) -> Result:
        self.switch(training=False)
        with torch.no_grad():
            return dict(flatten(self._called()))

    def _backward(self) -> Result:
        self.switch(training=True)
        return self.gradients()

    def gradients(self) -> Result:
        """Outputs, gradients and buffers, in the module's present mode (training or evaluation)."""
        if not self.accumulates:
            self.module.zero_grad(set_to_none=True)
            self.inputs = tuple(
                value if place in self.writes else leaf(value) for place, value in enumerate(self.inputs)
            )
        result = dict(flatten(self._called()))
        # Integer outputs have no gradient. An output gradient depends on the path alone, not on the number of outputs.
        roots = {path: out for path, out in result.items() if out.requires_grad}
        cotangents = [self.cotangent(path, out) for path, out in roots.items()]
        outs = list(roots.values())
        if self.scaler is not None:
            outs = [self.scaler.scale(out) for out in outs]
        torch.autograd.backward(outs, cotangents)
        for index, value in enumerate(self.inputs):
            if isinstance(value, Tensor) and value.grad is not None:
                result[f"grad:input[{index}]"] = self._unscaled(value.grad)
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                result[f"grad:{name}"] = self._unscaled(parameter.grad)
        if self.twice:
            result |= self._second()
        return result | self._buffers()

    def _unscaled(self, grad: Tensor) -> Tensor:
        factor = 1.0 if self.scaler is None else float(self.scaler.get_scale())  # a power of two
        # torch_xla drops the imaginary part of a quotient: https://github.com/pytorch/xla/issues/4519.
        return grad * (1.0 / factor) if grad.is_complex() else grad / factor

    def _second(self) -> Result:
        """Gradients of the gradients, each contracted with its own random direction."""
        outs = {path: out for path, out in flatten(self._called()) if out.requires_grad}
        leaves = {f"input[{i}]": v for i, v in enumerate(self.inputs) if isinstance(v, Tensor) and v.requires_grad}
        leaves |= {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        cotangents = [self.cotangent(path, out) for path, out in outs.items()]
        first = torch.autograd.grad(
            list(outs.values()), list(leaves.values()), cotangents, create_graph=True, allow_unused=True
        )
        gradients = {name: g for name, g in zip(leaves, first, strict=True) if g is not None and g.requires_grad}
        directions = [self.cotangent(f"grad:{name}", gradient) for name, gradient in gradients.items()]
        # Where nothing depends on a leaf, some implementations return None and others zeros: make it zeros for all.
        second = torch.autograd.grad(
            list(gradients.values()), list(leaves.values()), directions, materialize_grads=True
        )
        return {f"grad2:{name}": gradient for name, gradient in zip(leaves, second, strict=True)}

    def cotangent(self, path: str, out: Tensor) -> Tensor:
        """Output gradient of a path in the shape, dtype and device of `out`; path and seed alone decide its values."""
        from accelcheck.core.case import stable_seed

        generator = torch.Generator().manual_seed(self.seed ^ stable_seed(path))
        shape = (*out.shape, 2) if out.is_complex() else out.shape
        normal = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").numpy()
        # Multiples of 1/64 below 4 are exact in every dtype: the oracle and a half-precision run get the same gradient.
        # By NumPy, which no dispatch mode sees: simulated rounding errors would round some to another multiple.
        exact = np.clip(np.round(64 * normal), -255, 255) / np.float32(64)
        drawn = torch.from_numpy(np.asarray(exact.view(np.complex64)[..., 0] if out.is_complex() else exact))
        drawn = drawn.to(device=out.device, dtype=out.dtype)
        return _reversed(drawn) if self.strided_cotangents else drawn

    def _train(self) -> Result:
        optimizer = self.begin()
        with self.batches() as load:
            losses = []
            for step in range(self.steps):
                load(step)
                losses.append(self.take(optimizer, step))
        return self.trained(losses)

    @contextlib.contextmanager
    def batches(self) -> Iterator[Callable[[int], None]]:
        """Yields a function that loads the batch of a step, counted from 0; reloads the first batch at the end."""
        if not self.further:
            yield lambda _: None
            return
        first: Batch = tuple(map(_snapshot, self.inputs)), pytree.tree_map(_snapshot, self.target)
        every = (first, *self.further)
        try:
            yield lambda step: self.load(every[step % len(every)])
        finally:
            self.load(first)

    @torch.no_grad()
    def load(self, batch: Batch) -> None:
        """Writes a batch into the tensors of inputs and target, which so keep a technique's changes to them."""
        inputs, target = batch
        values = (*inputs, *tensors_in(target))
        # A loss within the model has a target here, and none in its batches.
        for own, new in zip((*self.inputs, *tensors_in(self.target)), values, strict=target is not None):
            if isinstance(own, Tensor):
                own.copy_(new)

    def begin(self) -> torch.optim.Optimizer:
        """Begins a training in train mode: switches the module to training mode and returns a new optimizer.

        Raises:
            ValueError: The problem lacks a loss, a target or an optimizer.
        """
        if self.loss is None or self.target is None or self.optimizer is None:
            raise ValueError("train mode needs a loss, a target and an optimizer: give the Problem all three")
        self.switch(training=True)
        return self.optimizer(list(self.module.parameters()))

    def take(self, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        """Takes the training step with number `step`, counted from 0; returns its loss, 0-D."""
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
        """Result of train mode after steps with these losses: losses, parameters and buffers."""
        result: Result = {f"loss[{step}]": loss for step, loss in enumerate(losses)}
        result |= {f"parameter:{name}": parameter for name, parameter in self.module.named_parameters()}
        return result | self._buffers()

    def training_loss(self, inputs: tuple[Any, ...], target: Target) -> Tensor:
        """Loss of one forward pass over `inputs`, 0-D, as in train mode.

        Raises:
            ValueError: The loss or the target is missing.
        """
        if self.loss is None or target is None:
            raise ValueError("a training loss needs a loss and a target: give the Problem both")
        call = self.module if self.call is None else self.call
        with self.around():
            return self.loss(call(*inputs), target)

    def _backpropagate(self, step: int) -> Tensor:
        loss = self.training_loss(self.inputs, self.target)
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]  # torch annotates Tensor.backward only in part
        return loss

    def _buffers(self) -> Result:
        # Side effects of the forward pass, such as batch-norm statistics, are part of the result.
        return {f"buffer:{name}": buffer.clone() for name, buffer in self.module.named_buffers()}


def _reversed(tensor: Tensor) -> Tensor:
    """Values of a tensor, with the first dimension as the fastest in memory."""
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def _snapshot(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def batches_to(batches: Sequence[Batch], device: torch.device | str, dtype: torch.dtype) -> tuple[Batch, ...]:
    """Batches moved and cast by `to`."""
    return tuple(
        (tuple(to(value, device, dtype) for value in inputs), to(target, device, dtype)) for inputs, target in batches
    )


def is_inexact(value: Any) -> bool:
    """True for floating-point and complex tensors."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def duplicate(value: Copied) -> Copied:
    """Copies a module, or nested inputs.

    `copy.deepcopy` alone refuses sparse tensors, and results that a module keeps, such as ``torch.nn.utils.weight_norm``
    does.
    """
    tensors = pytree.tree_leaves(value)
    if isinstance(value, nn.Module):
        kept = pytree.tree_leaves([list(vars(part).values()) for part in value.modules()])
        tensors = [*value.parameters(), *value.buffers(), *kept]
    refused = (own for own in tensors if isinstance(own, Tensor) and (sparse(own) or not own.is_leaf))
    return copy.deepcopy(value, {id(own): own.detach().clone() for own in refused})


def leaf(value: Any) -> Any:
    """Detaches a floating-point or complex tensor as a new leaf in the same memory; returns other values unchanged.

    Sparse tensors, such as a graph's edges, get no gradients.
    """
    return value.detach().requires_grad_() if is_inexact(value) and not sparse(value) else value


def in_dtype(value: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Dtype of a tensor after a cast to `dtype`: complex numbers get such parts, integers and bool stay."""
    if value.is_complex():
        return dtype.to_complex()
    return dtype if value.is_floating_point() else value.dtype


def cast(module: nn.Module, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
    """Moves a module and casts it in place by `in_dtype`: `nn.Module.to` drops imaginary parts of parameters."""

    def placed(value: Tensor) -> Tensor:
        return value.to(device=device, dtype=in_dtype(value, dtype))

    module._apply(placed)  # type: ignore[no-untyped-call]  # noqa: SLF001 - untyped in torch, and no public name
    return module


def to(value: Any, device: torch.device | str, dtype: torch.dtype) -> Any:
    """Moves a tensor, or each of a tuple, to `device` and casts it by `in_dtype`; returns other values unchanged.

    Strides are kept: a transposed, sliced or expanded tensor moves with the storage behind it.
    """
    if isinstance(value, tuple):
        return tuple(to(part, device, dtype) for part in value)
    if not isinstance(value, Tensor):
        return value
    target = in_dtype(value, dtype)
    if sparse(value) or value.is_contiguous():
        return value.to(device=device, dtype=target)
    # `Tensor.to` makes sliced and expanded tensors dense: move the storage behind them, then take the same view of it.
    storage_size = value.untyped_storage().nbytes() // value.element_size()
    # Detached: a view of flat memory, copied or not, which compilers guard.
    base = value.as_strided((storage_size,), (1,), 0).detach().to(device=device, dtype=target)
    return base.as_strided(value.shape, value.stride(), value.storage_offset())


def stored(tensor: Tensor) -> Tensor:
    """Detaches a tensor and gives it memory, which some of torch's gradients, such as a sign's zeros, have not.

    Complex numbers become real and imaginary parts, side by side in the last dimension: a row keeps its norm, and a
    lost imaginary part shows beside large real parts. Sparse tensors become dense.
    """
    tensor = dense(tensor)
    tensor = torch.zeros_like(tensor) if tensor._is_zerotensor() else tensor.detach()  # noqa: SLF001 - no public name
    return torch.view_as_real(tensor.resolve_conj()).flatten(-2) if tensor.is_complex() else tensor


def flatten(value: Any, path: str = "out") -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of nested tuples, lists and mappings, with its path.

    Raises:
        TypeError: A value is neither a tensor nor such a container; the message names its path.
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
        raise TypeError(
            f"{path}: expected a tensor, or tuples, lists and mappings of them; got {type(value).__name__}, which "
            "cannot be compared: let the module return its tensors alone"
        )
