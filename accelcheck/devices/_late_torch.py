"""Stands for torch in the modules of this package, and imports it when one of its names is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["torch"]

if TYPE_CHECKING:
    import torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__") and name != "__version__":  # Python and tools look for such names in any module
                raise AttributeError(name)
            return getattr(importlib.import_module("torch"), name)

    torch = _Torch()
