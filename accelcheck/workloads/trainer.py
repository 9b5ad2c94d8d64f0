"""Training loop of trajectory mode: loader, accumulation, clipping, schedule. Each part can be replaced and saved."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from accelcheck.devices.torch_names import pytree
from accelcheck.workloads.signatures import Loss, OptimizerMaker, Result, Target
from accelcheck.workloads.states import pack, unpack

Inputs = tuple[Any, ...]


def _as_they_are(inputs: Inputs) -> Inputs:
    """No augmentation. Not a lambda: recipes are sent to other processes."""
    return inputs


@dataclass(frozen=True)
class Recipe:
    """Training of a problem in trajectory mode. Inputs and target are a data set with one sample a row.

    Attributes:
        batches: Number of equal mini-batches of the data set. Left-over rows are not used in that epoch.
        schedule: Makes the learning-rate schedule from the optimizer. It is stepped once per optimizer step.
        clip: Largest norm of the gradient; longer gradients are scaled down to it.
        accumulation: Number of mini-batches whose gradients are averaged for one optimizer step.
        augment: Changes the inputs of a mini-batch, on the device. Draw from torch's CPU generator, so that all devices
            get the same random numbers. Must be picklable.
    """

    batches: int
    schedule: Callable[[torch.optim.Optimizer], LRScheduler]
    clip: float
    accumulation: int = 1
    augment: Callable[[Inputs], Inputs] = _as_they_are


class Trainable(Protocol):
    """Parts of a program that a trainer uses; see the attributes of `accelcheck.workloads.base.Program`."""

    module: nn.Module
    inputs: tuple[Any, ...]
    target: Target
    loss: Loss | None
    optimizer: OptimizerMaker | None
    steps: int
    seed: int
    call: Callable[..., Any] | None
    scaler: torch.amp.GradScaler | None

    def switch(self, *, training: bool) -> None: ...

    # Properties: a dataclass whose default is a function is read-only to type checkers.
    @property
    def around(self) -> Callable[[], AbstractContextManager[Any]]: ...
    @property
    def update(self) -> Callable[[], AbstractContextManager[Any]]: ...
    @property
    def synchronize(self) -> Callable[[], None]: ...


class Loader:
    """Yields endless shuffled mini-batches of row numbers, in another order each epoch; its position can be saved."""

    def __init__(self, rows: int, batches: int, seed: int) -> None:
        self.rows = rows
        self.size = rows // batches
        self.generator = torch.Generator().manual_seed(seed)
        self.order = torch.empty(0, dtype=torch.int64)
        self.position = 0

    def draw(self) -> Tensor:
        """Row numbers of the next mini-batch, ``(rows // batches,)`` int64 on the CPU."""
        if self.position + self.size > len(self.order):
            self.order, self.position = torch.randperm(self.rows, generator=self.generator), 0
        self.position += self.size
        return self.order[self.position - self.size : self.position]

    def state_dict(self) -> dict[str, Any]:
        """Position: the generator's state, the order of the present epoch, and the next row in it."""
        return {"generator": self.generator.get_state(), "order": self.order, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from the position of another loader, given by its `state_dict`."""
        self.generator.set_state(state["generator"])
        self.order, self.position = state["order"], state["position"]


@dataclass
class Parts:
    """State of a training besides the program, made by `Trainer.parts`, saved and restored with it.

    `generator` is the state of torch's CPU generator when the parts were made, or after the last run with them.
    """

    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    loader: Loader
    generator: Tensor = field(default_factory=torch.random.get_rng_state)


def milestone(step: int) -> bool:
    """True for numbers of steps after which parameters are recorded: powers of two, and multiples of ten."""
    return step & (step - 1) == 0 or step % 10 == 0


class Trainer:
    """Trains a program according to a recipe. A subclass can replace each part of a step.

    Attributes:
        recipe: Recipe of the training.
        start: State to continue from, as returned by `save` after an earlier run; None for a new training.
        scales: Scale of the scaler after each step of the last run, by step; empty without a scaler.
        step: Number of the present step, counted from 0 at the beginning of the training.
        records: ``records(count)`` is true if parameters are recorded after ``count`` steps.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.start: bytes | None = None
        self._parts: Parts | None = None
        self.scales: dict[int, float] = {}
        self.step = 0
        self.records: Callable[[int], bool] = milestone

    def train(self, program: Trainable) -> Result:
        """Takes `program.steps` optimizer steps.

        Returns:
            ``loss[i]`` and ``norm[i]`` (of the gradient before clipping) of step i, 0-D; and ``parameter:name@n`` after
            n steps, for each n that `records` selects.

        Raises:
            ValueError: The program lacks a loss, a target or an optimizer.
        """
        if program.loss is None or program.target is None or program.optimizer is None:
            raise ValueError("trajectory mode needs a loss, a target and an optimizer: give the Problem all three")
        program.switch(training=True)
        parts = self.parts(program)
        self.step = 0
        if self.start is not None:
            self.restore(program, parts, self.start)
        self.scales = {}
        result: Result = {}
        for _ in range(program.steps):
            result[f"loss[{self.step}]"], result[f"norm[{self.step}]"] = self.take(program, parts)
            program.synchronize()
            if program.scaler is not None:
                self.scales[self.step] = float(program.scaler.get_scale())
            self.step += 1
            if self.records(self.step):
                for name, parameter in program.module.named_parameters():
                    result[f"parameter:{name}@{self.step}"] = parameter.detach().clone()
                program.synchronize()  # or a lazy device would compile the copies into the next step
        parts.generator = torch.random.get_rng_state()
        self._parts = parts
        return result

    def parts(self, program: Trainable) -> Parts:
        """Makes new parts for a training from its beginning."""
        if program.optimizer is None:
            raise ValueError("a training needs an optimizer: give the Problem one")
        optimizer = program.optimizer(list(program.module.parameters()))
        loader = Loader(len(program.inputs[0]), self.recipe.batches, program.seed)
        return Parts(optimizer, self.recipe.schedule(optimizer), loader)

    def take(self, program: Trainable, parts: Parts) -> tuple[Tensor, Tensor]:
        """Takes one optimizer step; returns its mean loss over mini-batches, and the gradient norm before clipping."""
        parts.optimizer.zero_grad(set_to_none=True)
        losses = []
        for _ in range(self.recipe.accumulation):
            loss = self.share(self.loss(program, parts))
            losses.append(loss.detach())
            scaled: Tensor = loss if program.scaler is None else program.scaler.scale(loss)
            scaled.backward()  # type: ignore[no-untyped-call]  # torch annotates Tensor.backward only in part
        with program.update():
            self.unscale(program, parts)
            norm = self.clip(program)
            self.update(program, parts)
        return torch.stack(losses).sum(), norm

    def unscale(self, program: Trainable, parts: Parts) -> None:
        """Divides the gradients by the scaler's scale, if there is a scaler."""
        if program.scaler is not None:
            program.scaler.unscale_(parts.optimizer)

    def update(self, program: Trainable, parts: Parts) -> None:
        """Steps the optimizer (with a scaler, unless gradients are infinite), then updates scaler and schedule."""
        if program.scaler is None:
            parts.optimizer.step()
        else:
            program.scaler.step(parts.optimizer)
            program.scaler.update()
        parts.schedule.step()

    def loss(self, program: Trainable, parts: Parts) -> Tensor:
        """Loss of the next mini-batch, 0-D, unscaled."""
        call = program.module if program.call is None else program.call
        inputs, target = self.batch(program, parts.loader)
        with program.around():
            loss: Tensor = program.loss(call(*inputs), target)  # type: ignore[misc]  # `train` checked it
        return loss

    def batch(self, program: Trainable, loader: Loader) -> tuple[Inputs, Tensor]:
        """Augmented inputs and target of the next mini-batch. Inputs other than tensors are passed on unchanged."""
        rows = loader.draw()
        inputs = tuple(_rows(value, rows) for value in program.inputs)
        return self.recipe.augment(inputs), pytree.tree_map(partial(_rows, rows=rows), program.target)

    def share(self, loss: Tensor) -> Tensor:
        """Contribution of a mini-batch's loss to the loss of its step."""
        return loss / self.recipe.accumulation

    def clip(self, program: Trainable) -> Tensor:
        """Clips the norm of the gradient; returns the norm before clipping, 0-D."""
        return torch.nn.utils.clip_grad_norm_(program.module.parameters(), self.recipe.clip).detach()

    def state(self, program: Trainable, parts: Parts) -> dict[str, Any]:
        """State that decides the next step: tensors, numbers, text, and containers of them."""
        return {
            "module": program.module.state_dict(),
            "optimizer": parts.optimizer.state_dict(),
            "schedule": parts.schedule.state_dict(),
            "loader": parts.loader.state_dict(),
            "scaler": None if program.scaler is None else program.scaler.state_dict(),
            "generator": parts.generator,
            "step": self.step,
        }

    def load(self, program: Trainable, parts: Parts, state: Mapping[str, Any]) -> None:
        """Restores a `state`. Parameters keep their storage, so that code compiled for them stays valid."""
        program.module.load_state_dict(state["module"])
        parts.optimizer.load_state_dict(state["optimizer"])
        parts.schedule.load_state_dict(state["schedule"])
        parts.loader.load_state_dict(state["loader"])
        if program.scaler is not None:
            program.scaler.load_state_dict(state["scaler"])
        torch.random.set_rng_state(state["generator"])
        self.step = state["step"]

    def save(self, program: Trainable) -> bytes:
        """State after the last run, as bytes written by ``torch.save``, with all tensors on the CPU.

        Call it before the program changes: runs do not copy their state.

        Raises:
            ValueError: There was no run.
        """
        if self._parts is None:
            raise ValueError("there is nothing to save: train first")
        return pack(self.state(program, self._parts))

    def restore(self, program: Trainable, parts: Parts, saved: bytes) -> None:
        """Loads bytes that `save` returned."""
        self.load(program, parts, unpack(saved))
        program.synchronize()


def _rows(value: Any, rows: Tensor) -> Any:
    return value.index_select(0, rows.to(value.device)) if isinstance(value, Tensor) else value
