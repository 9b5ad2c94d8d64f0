"""Long trainings with mini-batches from worker processes, in the training's own order and resumable."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accelcheck.devices.torch_names import disable_current_modes
from accelcheck.techniques.data.dataloader import Delivery, Feed
from accelcheck.workloads.signatures import tensors_in
from accelcheck.workloads.trainer import Inputs, Loader, Parts, Recipe, Trainable, Trainer

Feeder = Callable[[Sequence[Tensor], Iterable[list[int]]], Feed]


class Ahead:
    """Sampler of the row numbers of all future mini-batches, from the position of `loader` when it is iterated."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.loader: Loader | None = None

    def __iter__(self) -> Iterator[list[int]]:
        if self.loader is None:
            raise RuntimeError("no loader to read ahead of: set `loader` first")
        ahead = Loader(self.loader.rows, self.batches, 0)
        ahead.load_state_dict(self.loader.state_dict())
        while True:
            yield ahead.draw().tolist()


class FedLoader(Loader):
    """Loader whose mini-batches come from a `Feed`.

    Its position, and so its saved state, is that of the training, however far ahead the workers read. `seen` records
    the feed's deliveries; `astray` counts the mini-batches whose rows are not those that this loader draws.
    """

    def __init__(self, rows: int, batches: int, seed: int, feed: Feed, ahead: Ahead) -> None:
        super().__init__(rows, batches, seed)
        self.feed, self.ahead = feed, ahead
        self.seen = Delivery()
        self.astray = 0
        self._pass: Iterator[Sequence[Tensor]] | None = None

    def batch(self) -> list[Tensor]:
        """Takes the next mini-batch, on the CPU."""
        if self._pass is None:
            self.ahead.loader = self
            self._pass = iter(self.feed)
        rows, tensors = self.seen.take(next(self._pass))
        self.astray += rows != self.draw().tolist()
        return tensors

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._pass = None  # what workers have prefetched belongs to the old position


class FedTrainer(Trainer):
    """Trainer with a `FedLoader`, whose feed of CPU tensors is `feeder(tensors, sampler)`, for batches on a device."""

    def __init__(self, recipe: Recipe, feeder: Feeder, place: torch.device) -> None:
        super().__init__(recipe)
        self.feeder, self.place = feeder, place
        self.ahead = Ahead(recipe.batches)
        self.feed: Feed | None = None
        self.loader: FedLoader | None = None

    def parts(self, program: Trainable) -> Parts:
        made = super().parts(program)
        with disable_current_modes():  # reading the data set is no part of the watched run
            tensors = [
                value.detach().cpu()
                for value in (*program.inputs, *tensors_in(program.target))
                if isinstance(value, Tensor)
            ]
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
        # Not watched: otherwise a lazy device would compile another graph for the watched run than for the others.
        with disable_current_modes():
            *inputs, target = (tensor.to(self.place, non_blocking=True) for tensor in loader.batch())
        came = iter(inputs)
        given = (next(came) if isinstance(value, Tensor) else value for value in program.inputs)
        return self.recipe.augment(tuple(given)), target
