"""Replaces calls of ``scaled_dot_product_attention`` by another implementation of attention."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from accelcheck.core.case import Evidence
from accelcheck.techniques.observe import Log, at_least, exactly
from accelcheck.workloads.base import Program

_CALLS = "attention calls"
_SDPA = r"aten::_?scaled_dot_product_\w+"
"""Pattern of all operators of torch's own attention."""


@dataclass(frozen=True)
class Call:
    """Arguments of ``scaled_dot_product_attention``: query ``(B, H, Sq, D)``, key and value ``(B, H, Sk, D)``."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Sizes of batch, heads, queries and keys."""
        return self.query.size(0), self.query.size(1), self.query.size(2), self.key.size(2)

    def mask(self) -> Tensor | None:
        """Expands the mask to ``(B, H, Sq, Sk)``; None if there is none."""
        return None if self.attn_mask is None else self.attn_mask.expand(self.sizes)


class _Intercept(TorchFunctionMode):
    """Replaces attention wherever the program calls it, and counts the calls."""

    def __init__(self, attend: Callable[[Call], Tensor], program: Program) -> None:
        super().__init__()
        self._attend, self._program = attend, program

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # torch disables the mode while this runs, so that calls from here are not intercepted again.
        if func is functional.multi_head_attention_forward:  # nor does it see what this one calls
            with mock.patch.object(functional, "scaled_dot_product_attention", self._attended):
                return func(*args, **(kwargs or {}))
        call = self._attended if func is functional.scaled_dot_product_attention else func
        return call(*args, **(kwargs or {}))

    def _attended(self, *args: Any, **kwargs: Any) -> Tensor:
        count(self._program)
        return self._attend(Call(*args, **kwargs))


def intercept(program: Program, attend: Callable[[Call], Tensor]) -> None:
    """Replaces the attention of every forward pass by `attend`."""
    count_from_zero(program)
    program.around = lambda: _Intercept(attend, program)


def count_from_zero(program: Program) -> None:
    """Resets the count of calls, now and before each judged run."""
    program.extras[_CALLS] = 0
    program.resets.append(lambda: program.extras.update({_CALLS: 0}))


def count(program: Program) -> None:
    """Counts one call of another implementation."""
    program.extras[_CALLS] = int(program.extras.get(_CALLS, 0)) + 1


def taken(program: Program, log: Log, what: str) -> Iterable[Evidence]:
    """Yields evidence that `what` was called, and torch's own attention was not."""
    yield at_least(f"calls of {what}", int(program.extras.get(_CALLS, 0)))
    yield exactly("torch's own attention dispatched", log.count(_SDPA), 0)
