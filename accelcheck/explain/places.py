"""Call sites of operators in the model: module path and source line, in the backward pass those of the forward."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import accelcheck

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(accelcheck.__file__).parent)
_MODELS = str(Path(_OWN) / "workloads")
_ENGINE = str(Path(_MODELS) / "base.py")


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """A place in the model.

    Attributes:
        module: Path of the innermost module, such as ``layers.0``; empty for the model itself.
        line: File and line, such as ``model.py:12``; empty where no code of the model calls the operator.
        backward: Running autograd node, such as ``MmBackward0``; empty in the forward pass.
    """

    module: str = ""
    line: str = ""
    backward: str = ""

    def __str__(self) -> str:
        words = [f"module {self.module!r}" if self.module else "the model itself"]
        words += [f"{self.backward} of {self.line or 'it'}" if self.backward else self.line]
        return ", ".join(filter(None, words))


class Places:
    """Follows the running module, and remembers the origin of each autograd node."""

    def __init__(self) -> None:
        self._modules: list[str] = []
        self._nodes: dict[int, ModelPlace] = {}

    @contextlib.contextmanager
    def followed(self, module: nn.Module) -> Iterator[None]:
        """Follow calls of the module's parts."""
        handles: list[Any] = []
        for name, part in module.named_modules():
            if isinstance(part, torch.jit.ScriptModule):
                continue
            handles.append(part.register_forward_pre_hook(lambda *_, name=name: self._modules.append(name)))
            handles.append(part.register_forward_hook(lambda *_: self._left(), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def here(self) -> ModelPlace:
        """Place of the operator that is being dispatched."""
        from accelcheck.devices.torch_names import autograd_sequence, current_autograd_node

        node: Any = current_autograd_node()
        if node is None:
            frame = sys._getframe(1)  # noqa: SLF001 - cheaper than `inspect`, for every operator
            place = ModelPlace(self._modules[-1] if self._modules else "", _line(frame))
            # A node is made just before its operator is dispatched; later operators have none of their own, or another.
            self._nodes.setdefault(autograd_sequence() - 1, place)
            return place
        known = self._nodes.get(node._sequence_nr(), ModelPlace())  # noqa: SLF001 - torch has no public name for it
        return ModelPlace(known.module, known.line, str(node.name()).rpartition("::")[2])

    def _left(self) -> None:
        if self._modules:
            self._modules.pop()


def _line(frame: FrameType | None) -> str:
    """Find the innermost line of the model; where it has none, of torch's own module."""
    within = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_TORCH):
            if not within and f"{_TORCH}/nn/modules/" in file and not file.endswith(("/module.py", "/container.py")):
                within = f"torch{file.removeprefix(_TORCH)}:{frame.f_lineno}"
        elif file == _ENGINE:
            return within
        elif not file.startswith(_OWN) or file.startswith(_MODELS):
            whole = file.startswith("/") or "\\" in file
            return f"{Path(file).name if whole else file}:{frame.f_lineno}"
        frame = frame.f_back
    return within
