"""2:4 sparsity: two of four neighbours of a weight are zero, and matrix units of GPUs skip them. FP64 of the rest."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from accelcheck.core.case import Mode
from accelcheck.techniques.base import Technique
from accelcheck.techniques.observe import Log, ProfilerLog
from accelcheck.techniques.quantization.deployed import Deployed
from accelcheck.techniques.quantization.emulation import RoundedSides

TILE = {"CUTLASS": (32, 64), "CUSPARSELT": (16, 16)}
"""Rows and columns of which a 16-bit weight must have a multiple, by backend; others are padded with zeros."""


def pruned(weight: Tensor, _: RoundedSides | None = None) -> Tensor:
    """Keeps the two largest magnitudes of each four neighbours of a row, the first of equal ones; returns FP64."""
    groups = pad(weight.double(), (0, -weight.shape[1] % 4)).reshape(len(weight), -1, 4)
    # A choice by `topk` among equal magnitudes would differ between devices.
    rank = groups.abs().sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
    return groups.where(rank < 2, 0.0).flatten(1)[:, : weight.shape[1]]


class SparseLinear(nn.Module):
    """Linear layer with a weight that torch compresses for one of its `TILE` backends."""

    bias: Tensor | None

    def __init__(self, original: nn.Linear, *, backend: str) -> None:
        super().__init__()
        weight, (rows, columns) = original.weight.detach(), TILE[backend]
        self.shape = weight.shape
        self.padding = (0, -weight.shape[1] % columns)
        below = -len(weight) % rows
        held = pad(pruned(weight.cpu()).to(weight), (*self.padding, 0, below))
        tensor: Any = getattr(torch.sparse, f"SparseSemiStructuredTensor{backend}")
        self.weight = tensor.from_dense(held)
        self.register_buffer("bias", None if original.bias is None else pad(original.bias.detach(), (0, below)))
        for number, part in enumerate(self.held()):
            self.register_buffer(f"part{number}", part)

    def forward(self, x: Tensor) -> Tensor:
        rows = pad(x.reshape(-1, self.shape[1]), self.padding)
        product = linear(rows, self.weight, self.bias)
        return product[:, : self.shape[0]].reshape(*x.shape[:-1], self.shape[0]).contiguous()

    def held(self) -> list[Tensor]:
        """Lists the elements that are kept, and their places where they are a tensor of their own."""
        return [part for part in (self.weight.packed, self.weight.meta) if part is not None]


class SemiStructured(Deployed):
    """Replaces every linear layer by one with a 2:4 sparse weight, whose class hides its operators from other logs."""

    watch = ProfilerLog

    def runs(self, log: Log) -> int:
        return sum(log.names()[name] for name in self.operators)


_ROWS = {
    "CUSPARSELT": ("sparse-2-4", "cuSPARSELt", {"aten::_cslt_sparse_mm"}),
    "CUTLASS": ("sparse-2-4-cutlass", "CUTLASS",
        {"aten::_sparse_semi_structured_mm", "aten::_sparse_semi_structured_addmm"}),
}  # fmt: skip

TECHNIQUES: tuple[Technique, ...] = tuple(
    SemiStructured(
        name=name, words={"backend": backend}, operators=frozenset(operators), layer=SparseLinear, rule=pruned,
        family="sparsity", dtypes=("bfloat16",), stored=torch.bfloat16, modes=frozenset({Mode.FORWARD}),
        action="products with a 2:4 sparse weight",
        source="https://docs.pytorch.org/docs/stable/sparse.html#sparse-semi-structured-tensors",
        promise=f"Linear layers keep two of four neighbours of a weight, and multiply by {told} as by the dense one.")
    for backend, (name, told, operators) in _ROWS.items()
)  # fmt: skip
