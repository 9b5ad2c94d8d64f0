"""What is computed once for all processes of a run, and kept in the run's own folder."""

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
    """What `make` gives, from the folder if it was made before under this key.

    Args:
        folder: Private to the run, and removed with it.
        key: Names all that the value depends on.
        make: Gives tensors, numbers, text, and lists and dicts of them. What it raises is raised; nothing is kept then.
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
