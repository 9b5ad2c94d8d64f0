"""Long trainings whose mini-batches come out of worker processes: in the training's own order, and to be resumed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from accelcheck.techniques.data.dataloader import Delivery
from accelcheck.workloads.trainer import Loader, Trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from accelcheck.techniques.data.dataloader import Feed
    from accelcheck.workloads.trainer import Inputs, Parts, Recipe, Trainable

    Feeder = Callable[[Sequence[Tensor], Iterable[list[int]]], Feed]


class Ahead:
    """Row numbers of the mini-batches to come, without end, from where a loader stands when it is asked."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.loader: Loader | None = None

    def __iter__(self) -> Iterator[list[int]]:
        if self.loader is None:
            raise RuntimeError("expected a loader to run ahead of: set `loader` first")
        ahead = Loader(self.loader.rows, self.batches, 0)
        ahead.load_state_dict(self.loader.state_dict())
        while True:
            yield ahead.draw().tolist()


class FedLoader(Loader):
    """A loader whose mini-batches are brought to it.

    It stands where the training stands, however far ahead workers are: its state is what the training goes on from.

    Attributes:
        seen: What was brought.
        astray: Mini-batches of other rows than it names.
    """

    def __init__(self, rows: int, batches: int, seed: int, feed: Feed, ahead: Ahead) -> None:
        super().__init__(rows, batches, seed)
        self.feed, self.ahead = feed, ahead
        self.seen = Delivery()
        self.astray = 0
        self._pass: Iterator[Sequence[Tensor]] | None = None

    def batch(self) -> list[Tensor]:
        """The next mini-batch, on the CPU."""
        if self._pass is None:
            self.ahead.loader = self
            self._pass = iter(self.feed)
        rows, tensors = self.seen.take(next(self._pass))
        self.astray += rows != self.draw().tolist()
        return tensors

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._pass = None  # what workers prefetched belongs elsewhere


class FedTrainer(Trainer):
    """A trainer with a `FedLoader`.

    Args:
        recipe: As of `Trainer`.
        feeder: Makes a feed of tensors on the CPU and a sampler.
        place: Where mini-batches go.
    """

    def __init__(self, recipe: Recipe, feeder: Feeder, place: torch.device) -> None:
        super().__init__(recipe)
        self.feeder, self.place = feeder, place
        self.ahead = Ahead(recipe.batches)
        self.feed: Feed | None = None
        self.loader: FedLoader | None = None

    def parts(self, program: Trainable) -> Parts:
        made = super().parts(program)
        with _disable_current_modes():  # the data set is read here as from a disk: nothing that the run is watched for
            tensors = [value.detach().cpu() for value in (*program.inputs, program.target) if isinstance(value, Tensor)]
        if self.feed is None:
            self.feed = self.feeder(tensors, self.ahead)
        else:
            self.feed.rows.fill(tensors)
        self.loader = FedLoader(made.loader.rows, self.recipe.batches, program.seed, self.feed, self.ahead)
        made.loader = self.loader
        return made

    def batch(self, program: Trainable, loader: Loader) -> tuple[Inputs, Tensor]:
        if not isinstance(loader, FedLoader):
            raise TypeError(f"expected the FedLoader that `parts` made, got {type(loader).__name__}")
        # Unwatched: else a lazy device would compile another graph for the run that is watched than for all others.
        with _disable_current_modes():
            *inputs, target = (tensor.to(self.place, non_blocking=True) for tensor in loader.batch())
        came = iter(inputs)
        given = (next(came) if isinstance(value, Tensor) else value for value in program.inputs)
        return self.recipe.augment(tuple(given)), target
