"""Classes of operators that level 1 judges with no other class in front, and operators that compute nothing."""

from __future__ import annotations

from accelcheck.core.case import Mode

CLASSES: dict[str, tuple[str, str, Mode]] = {
    "contractions": ("product-alone", r"mm|bmm", Mode.BACKWARD),
    "reductions": ("reductions", r"sum|mean|amax|amin|argmax|cumsum|any|all", Mode.FORWARD),
    "normalisation": ("batch-norm", r"_?native_batch_norm\w*", Mode.BACKWARD),
    "scatter and gather": (
        "scatter-gather",
        r"gather|scatter|scatter_add_?|index_select|index_add_?|value_selecting_reduction_backward",
        Mode.BACKWARD,
    ),
    "casts": ("casts", r"_to_copy", Mode.FORWARD),
    "roots and exponentials": (
        "roots-exponentials",
        r"r?sqrt|log|log1p|exp|exp2|expm1|sin|cos|tanh|erf|sigmoid",
        Mode.FORWARD,
    ),
    # The product with the target is a product with 1 of its gradient, and exact.
    "optimizer steps": (
        "optimizer-steps",
        r"mul_?|sum|add_?|addcmul_?|addcdiv_?|lerp_?|sqrt|div_?|_foreach_\w+",
        Mode.TRAIN,
    ),
    "random numbers": ("random-numbers", r"rand_like|randn_like|ge|mul|normal_|uniform_", Mode.RANDOM),
    "copies": ("copies", r"clone|copy_|flip|roll|repeat|cat|stack", Mode.FORWARD),
}
"""By class of operators: the workload that has no other class in front, a pattern of the names of its operators, and
the mode in which level 1 judges it."""
NEUTRAL = (
    r"view|_unsafe_view|as_strided|t|transpose|permute|expand|slice|select|detach|alias|unsqueeze|squeeze|empty\w*"
    r"|new_empty\w*|zeros\w*|new_zeros|ones\w*|fill_|zero_|unbind|slice_backward"
    r"|select_backward|_local_scalar_dense|lift_fresh|add_"
)
"""Pattern of the names of operators that compute nothing: views, allocations, fills, and counts of batches or steps."""
