"""Operators of sparse tensors, with entries named twice, empty rows, blocks and dense dimensions."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from accelcheck.workloads.draw import normal
from accelcheck.workloads.function_parts import BOTH, Collected, Function, family

ROWS, COLUMNS, WIDTH = 6, 8, 3
PLACES = (0, 9, 3, 41, 12, 9, 30, 47, 12, 12, 5)
"""Entries of a matrix, ``(ROWS, COLUMNS)``, in no order, two of them named again; two rows are empty."""
LAYOUTS: Mapping[str, Function] = {"coo": Tensor.to_sparse, "csr": Tensor.to_sparse_csr, "csc": Tensor.to_sparse_csc}


def _thin(x: Tensor) -> Tensor:
    """Keeps the entries of `PLACES`, and sets others to 0."""
    kept = torch.isin(torch.arange(ROWS * COLUMNS), torch.tensor(PLACES)).reshape(ROWS, COLUMNS)
    return x * kept.to(x.device)


def _named(x: Tensor, width: tuple[int, ...] = ()) -> Tensor:
    """Makes a COO tensor that is not coalesced, with dense dimensions of `width`."""
    places = torch.tensor(PLACES, device=x.device)
    values = x.reshape(-1)[: len(PLACES)].reshape(-1, *(1 for _ in width)).expand(-1, *width)
    return torch.sparse_coo_tensor(torch.stack((places // COLUMNS, places % COLUMNS)), values, (ROWS, COLUMNS, *width))


FUNCTIONS: Mapping[str, Function] = {
    "coalesced": lambda x, _: _named(x).coalesce().to_dense(),
    "not coalesced, dense": lambda x, _: _named(x).to_dense(),
    "not coalesced, added": lambda x, _: (_named(x) + _named(x.flip(0))).to_dense(),
    "not coalesced, times a number": lambda x, _: (_named(x) * 0.7).to_dense(),
    "not coalesced, product": lambda x, y: torch.sparse.mm(_named(x), y),
    "not coalesced, transposed": lambda x, _: _named(x).t().to_dense(),
    "added to dense": lambda x, _: torch.add(x, _named(x), alpha=-0.5),
    "dense dimensions": lambda x, _: _named(x, (2, 3)).coalesce().to_dense(),
    "dense dimensions, sum": lambda x, _: torch.sparse.sum(_named(x, (2, 3)), (0, 2)).to_dense(),
    "multiplied": lambda x, _: (_thin(x).to_sparse() * _thin(x).roll(1, 0).to_sparse()).to_dense(),
    "multiplied by dense": lambda x, _: (_thin(x).to_sparse() * x.exp()).to_dense(),
    "subtracted": lambda x, _: (_thin(x).to_sparse() - _thin(x).flip(0).to_sparse()).to_dense(),
    "sum": lambda x, _: torch.sparse.sum(_thin(x).to_sparse()),
    "sum of rows": lambda x, _: torch.sparse.sum(_thin(x).to_sparse(), -1).to_dense(),
    "sum of columns": lambda x, _: torch.sparse.sum(_thin(x).to_sparse(), 0).to_dense(),
    "softmax": lambda x, _: torch.sparse.softmax(_thin(x).to_sparse(), 1).to_dense(),
    "softmax of columns": lambda x, _: torch.sparse.softmax(_thin(x).to_sparse(), 0).to_dense(),
    "logarithm of softmax": lambda x, _: torch.sparse.log_softmax(_thin(x).to_sparse(), -1).to_dense(),
    "stacked": lambda x, _: torch.stack([_thin(x).to_sparse(), _named(x)], 1).to_dense(),
    "mask": lambda x, _: x.sparse_mask(_named(x).coalesce()).to_dense(),
    "sampled product": lambda x, y: torch.sparse.sampled_addmm(
        _thin(x).to_sparse_csr(), x[:, :WIDTH].contiguous(), y.t().contiguous(), beta=0.5, alpha=2.0).to_dense(),
    "product of two": lambda x, y: torch.sparse.mm(_thin(x).to_sparse(), y.relu().to_sparse()).to_dense(),
    "product of two, csr": lambda x, y: (_thin(x).to_sparse_csr() @ y.relu().to_sparse_csr()).to_dense(),
    "products of a batch": lambda x, y: torch.bmm(
        torch.stack([_thin(x), _thin(x.flip(1)), torch.zeros_like(x)]).to_sparse(), y.expand(3, -1, -1)),
    "dense product": lambda x, y: y.t() @ _thin(x).t().to_sparse_csc(),
    **{
        f"{name}, {label}": function
        for name, layout in LAYOUTS.items()
        for label, function in {
            "product": lambda x, y, of=layout: of(_thin(x)) @ y,
            "product with a vector": lambda x, y, of=layout: of(_thin(x)) @ y[:, 0],
            "product added": lambda x, y, of=layout: torch.addmm(
                x[:, :WIDTH], of(_thin(x)), y, beta=0.5, alpha=2.0),
        }.items()
    },
    "blocks": lambda x, _: _thin(x).to_sparse_bsr((2, 4)).to_dense(),
    "blocks, columns first": lambda x, _: _thin(x).to_sparse_bsc((3, 2)).to_dense(),
    **{
        f"{old} to {new}": lambda x, _, old=old, new=new: LAYOUTS[old](_thin(x)).to_sparse(
            layout=getattr(torch, f"sparse_{new}")).to_dense()
        for old in ("coo", "csr", "csc")
        for new in ("coo", "csr", "csc")
    },
}  # fmt: skip
"""Functions of matrices ``x (ROWS, COLUMNS)`` and ``y (COLUMNS, WIDTH)`` by name; results are dense."""

ENTRIES: Mapping[str, Function] = {
    "functions of entries": lambda x, _: torch.tanh(_thin(x).to_sparse().neg().sin().abs().expm1()).to_dense(),
    "functions of entries, csr": lambda x, _: torch.tanh(_thin(x).to_sparse_csr().neg().sin()).to_dense(),
    "rows": lambda x, _: _thin(x).to_sparse().index_select(0, torch.tensor((4, 0, 0, 2), device=x.device)).to_dense(),
    "columns": lambda x, _: _thin(x).to_sparse().index_select(
        1, torch.tensor((7, 1, 1, 3), device=x.device)).to_dense(),
    "narrowed": lambda x, _: _thin(x).to_sparse().narrow_copy(1, 1, 4).to_dense(),
    "joined": lambda x, _: torch.cat([_thin(x).to_sparse(), _named(x), _thin(x.neg()).to_sparse()], 1).to_dense(),
    **{
        f"blocks of {rows} rows, {label}": function
        for rows in (1, 2)
        for label, function in {
            "product": lambda x, y, of=rows: _thin(x).to_sparse_bsr((of, of)) @ y,
            "product with a vector": lambda x, y, of=rows: _thin(x).to_sparse_bsr((of, of)) @ y[:, 0],
            "product added": lambda x, y, of=rows: torch.addmm(
                x[:, :WIDTH], _thin(x).to_sparse_bsr((of, of)), y, beta=0.5, alpha=2.0),
        }.items()
    },
}  # fmt: skip
"""Functions of the same matrices that have no gradients on the CPU."""


def _collect(functions: Mapping[str, Function], parts: Collected) -> None:
    x, y = normal(parts.generator, ROWS, COLUMNS), normal(parts.generator, COLUMNS, WIDTH)
    for label, function in functions.items():
        parts.add(label, function, x, y)


WORKLOADS = (
    family("sparse", "Products, sums and conversions of sparse tensors.", partial(_collect, FUNCTIONS), BOTH,
        techniques=frozenset({"eager"})),
    family("sparse-entries", "Functions, choices and joins of the entries of sparse tensors.",
        partial(_collect, ENTRIES),
        techniques=frozenset({"eager"})),
)  # fmt: skip
