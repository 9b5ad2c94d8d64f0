"""Counts floating-point operations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode


def flop_counter() -> FlopCounterMode:
    """Makes torch's counter, without its hooks of modules: they refuse a module that asks for derivatives."""
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    counter.mod_tracker = SimpleNamespace(  # type: ignore[assignment]  # all that it uses of a tracker
        parents={"Global"}, __enter__=lambda: None, __exit__=lambda: None
    )
    return counter
