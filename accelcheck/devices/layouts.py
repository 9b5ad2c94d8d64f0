"""Layouts of tensors: the parts of sparse ones, whose memory is not one piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def sparse(tensor: Tensor) -> bool:
    """Returns True for a tensor that stores some of its elements, with their places."""
    return str(tensor.layout).startswith("torch.sparse")  # by name: this module imports no torch


def parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns the entries of a sparse tensor and then their places, in its own memory, or another tensor alone."""
    if not sparse(tensor):
        return (tensor,)
    if str(tensor.layout) == "torch.sparse_coo":
        return tensor._values(), tensor._indices()  # noqa: SLF001 - `values` needs them to be sorted
    if str(tensor.layout) in {"torch.sparse_csr", "torch.sparse_bsr"}:
        return tensor.values(), tensor.crow_indices(), tensor.col_indices()
    return tensor.values(), tensor.ccol_indices(), tensor.row_indices()


def entries(tensor: Tensor) -> Tensor:
    """Returns the entries of a sparse tensor in its own memory, or another tensor itself."""
    return parts(tensor)[0]


def dense(tensor: Tensor) -> Tensor:
    """Returns a sparse tensor with its zeros, or another tensor itself."""
    return tensor.to_dense() if sparse(tensor) else tensor


def contiguous(tensor: Tensor) -> bool:
    """Returns True for a strided tensor whose elements lie one after the other."""
    return not sparse(tensor) and tensor.is_contiguous()
