"""Branches and loops that depend on data, in Python or by torch's operators of control flow."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accelcheck.devices import torch_names
from accelcheck.workloads.base import Workload
from accelcheck.workloads.draw import of_normal


class Controlled(nn.Module):
    """Control flow by Python; with the attribute `operator` by torch's own, such as ``torch.cond``."""

    operator = False

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))


class Branch(Controlled):
    """One of two branches, by the sign of the sum of the input."""

    def forward(self, x: Tensor) -> Tensor:
        sides = (lambda x: torch.tanh(x @ self.weight), lambda x: torch.sin(x @ self.weight.t()) - x)
        if self.operator:
            out: Tensor = torch.cond(x.sum() > 0, *sides, (x,))
            return out
        return sides[0](x) if bool(x.sum() > 0) else sides[1](x)


class Loop(Controlled):
    """Doublings until the input is larger than 100, then a product."""

    def forward(self, x: Tensor) -> Tensor:
        if self.operator:
            loop: Any = torch_names.while_loop
            (y,) = loop(lambda x: x.abs().max() < 100, lambda x: (2 * x,), (x,))
        else:
            y = x
            while bool(y.abs().max() < 100):
                y = 2 * y
        out: Tensor = y @ self.weight
        return out


class Scan(Controlled):
    """Recurrent layer over the rows of the input; returns the last state and all of them."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:

        def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            new = torch.tanh(state @ self.weight + row)
            return new, new.clone()

        state = x[0]
        if self.operator:
            last, states = torch_names.scan(step, state, x[1:])
            return last, states
        states = []
        for row in x[1:]:
            state, out = step(state, row)
            states.append(out)
        return state, torch.stack(states)


WORKLOADS = tuple(
    Workload(f"control-{name}", summary,
        partial(of_normal, make=make, shape=(6, 12)), level, traits=frozenset({"matmul", "branching", "resizable"}),
        dtypes=frozenset({"float32"}), techniques=frozenset({"eager", f"torch-{name}"}))
    for name, level, summary, make in (
        ("cond", 2, "A branch on the sign of a sum, with a product on either side.", Branch),
        ("while-loop", 2, "A loop that ends when its value is large, and a product.", Loop),
        ("scan", 3, "A recurrent layer of five steps.", Scan),
    )
)  # fmt: skip
