"""The traits of workloads: what techniques ask for in `requires`, `works_on` and `excludes`. No torch."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

TRAITS: Mapping[str, str] = MappingProxyType(
    {
        "activations": "memory that is mostly activations",
        "attention": "calls of scaled_dot_product_attention",
        "batches": "several batches, one for each training step",
        "batchnorm": "batch normalisation",
        "blocks": "an nn.ModuleList named `blocks`, or the longest list of modules of one class, whose members take a tensor first and can be called again",
        "branching": "Python control flow that depends on data",
        "constants": "expressions that depend on no input",
        "conv": "NCHW convolutions",
        "custom-function": "an autograd function of its own, whose gradients are then checked by finite differences",
        "exact": "no rounding at all, as in indexing and copies",
        "index-operators": "calls of torch.index_select or torch.gather",
        "index-tensors": "indexing with tensors in brackets",
        "inplace": "submodules with an attribute `inplace`, which is False",
        "linear": "nn.Linear",
        "matmul": "matrix products",
        "packed": "a module that is an `accelcheck.workloads.packed.Packed`",
        "resizable": "a maker that follows its argument `extent`",
        "samplewise": "samples, along the first dimension of every input, that do not depend on each other",
        "scriptable": "a module that torch.jit.script can compile",
        "stream": "a submodule `net` that is called once for each input",
        "training": "a target, a loss and an optimizer",
        "twice-differentiable": "gradients that can be differentiated again, and are in backward mode",
        "variable-length": "sequences that differ in length",
        "views": "outputs that are all views of the first input",
    }
)
"""What a workload with the trait has, by trait. Techniques of other packages may ask for further ones."""

CONTRACTING = frozenset({"attention", "conv", "linear", "matmul"})
"""Traits of workloads with contractions: what reduced precision and tuned kernels are about."""


def described(name: str) -> str:
    """A trait with what it means, for a sentence."""
    return f"{name} ({TRAITS[name]})" if name in TRAITS else name
