"""Values that are computed once for all processes of a run, and stored in the run's own folder."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock

from accelcheck.core.files import replacing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def once(folder: Path, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The value of `make`, read from the folder if it was made before under this key.

    Args:
        folder: Private to the run, and removed with it.
        key: Names everything that the value depends on.
        make: Returns tensors, numbers, text, and lists and dicts of them. If it raises, nothing is stored.
    """
    path = folder / f"{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.pt"
    # A slow maker holds the lock: another worker waits for it rather than computing the same.
    with FileLock(f"{path}.lock"):
        if not path.exists():
            made = make()
            with replacing(path, durable=False) as file:  # the folder does not outlive the run
                torch.save(made, file)
        loaded: dict[str, Any] = torch.load(path, weights_only=True)
        return loaded
