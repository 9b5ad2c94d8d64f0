"""States of the random number generators in this process: read, compared and restored."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Generators:
    """States of generators at one moment, by the generator's name; equal states draw the same numbers."""

    states: Mapping[str, Any]

    @classmethod
    def now(cls, device: torch.device | None = None) -> Generators:
        """Reads the present states, with that of a device's own generator where torch can."""
        states = {name: read() for name, (read, _) in _GENERATORS.items()}
        own = None if device is None else _own(device)
        return cls(states if own is None or device is None else {**states, f"generator of {device.type}": own})

    def moved(self, after: Generators) -> list[str]:
        """Names of the generators with another state in `after`."""
        return [name for name, state in self.states.items() if after.states.get(name, state) != state]

    def restore(self) -> None:
        """Restores the states, except a device's own."""
        now = Generators.now()
        for name in now.moved(self):
            _GENERATORS[name][1](self.states[name])


def _own(device: torch.device) -> bytes | None:
    try:
        state: bytes = torch.get_device_module(device).get_rng_state().cpu().numpy().tobytes()
    except Exception:  # noqa: BLE001 - a backend without such a function may raise anything: its generator is left out
        return None
    return state


def _torch() -> bytes:
    return bytes(torch.get_rng_state().numpy().data)


def _set_torch(state: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _numpy() -> tuple[Any, ...]:
    kind, words, *rest = np.random.get_state()
    return kind, bytes(np.asarray(words).data), *rest


def _set_numpy(state: tuple[Any, ...]) -> None:
    kind, words, *rest = state
    np.random.set_state((kind, np.frombuffer(words, dtype=np.uint32), *rest))


_GENERATORS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], object]]] = MappingProxyType(
    {
        "generator of torch": (_torch, _set_torch),
        "generator of NumPy": (_numpy, _set_numpy),
        "generator of Python": (random.getstate, random.setstate),
    }
)
