"""Faults of ``torch.func``: of its maps over samples, its products with cotangents and its Jacobians."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcheck.core.case import Mode
from accelcheck.devices.torch_names import pytree
from accelcheck.selftest.faults.base import fault, single
from accelcheck.selftest.faults.sowing import swapped

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


def last_sample_repeated(strength: float) -> AbstractContextManager[None]:
    """A map over samples computes the last but one in place of the last."""

    def wrong(plain: Callable[..., Any], function: Callable[..., Any], in_dims: Any) -> Callable[..., Any]:
        mapped = plain(function, in_dims=in_dims)

        def call(*values: Any) -> Any:
            given = (
                value if dim is None else torch.cat([value[:-1], value[-2:-1]])
                for value, dim in zip(values, in_dims, strict=True)
            )
            return mapped(*given)

        return call

    return swapped(torch.func, "vmap", wrong)


def cotangent_short(strength: float) -> AbstractContextManager[None]:
    """A product with a cotangent leaves out its last row."""

    def short(cotangent: Tensor) -> Tensor:
        return torch.cat([cotangent[:-1], torch.zeros_like(cotangent[-1:])])

    def wrong(plain: Callable[..., Any], *args: Any, **options: Any) -> Any:
        out, pull, *rest = plain(*args, **options)
        return out, lambda given: pull(pytree.tree_map(short, given)), *rest

    return swapped(torch.func, "vjp", wrong)


def row_transposed(by: str) -> Callable[[float], AbstractContextManager[None]]:
    """The last row of the first output's Jacobian is that of the output before it."""

    def wrong(plain: Callable[..., Any], function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        jacobian = plain(function, **options)

        def call(*args: Any) -> Any:
            found, *rest = jacobian(*args)
            return pytree.tree_map(lambda rows: torch.cat([rows[:-1], rows[-2:-1]]), found), *rest

        return call

    return lambda _: swapped(torch.func, by, wrong)


FAULTS = (
    fault("vmap-last-sample-repeated", "A map over samples computes the last but one in place of the last.")(
        (single("attention-ragged"), single("elementwise-scalar"), single("gather", Mode.BACKWARD)),
        around=last_sample_repeated,
        technique="func-vmap",
        seeds=10,
    ),
    fault("vjp-cotangent-short", "A product with a cotangent leaves out its last row.")(
        (single("custom-function", Mode.BACKWARD), single("embedding-norm-gelu", Mode.BACKWARD)),
        around=cotangent_short,
        technique="func-grad",
        seeds=10,
    ),
    fault("jacrev-row-repeated", "A Jacobian by reverse mode has its last row but one twice.")(
        (single("max-pool", Mode.BACKWARD),), around=row_transposed("jacrev"), technique="func-jacrev", seeds=10
    ),
    fault("jacfwd-row-repeated", "A Jacobian by forward mode has its last row but one twice.")(
        (single("elementwise-overlap", Mode.BACKWARD), single("layer-norm-narrow", Mode.BACKWARD)),
        around=row_transposed("jacfwd"),
        technique="func-jacfwd",
        seeds=10,
    ),
)
