"""Check of C++ extensions: torch.utils.cpp_extension compiles an operator that computes on the device by ATen."""

import os
import shutil
import tempfile
from fractions import Fraction

import torch
from torch.utils import cpp_extension

from accelcheck.checks.platform.tries import Tries
from accelcheck.checks.trial import Finding, Trial
from accelcheck.core.capability import Code, unavailable
from accelcheck.core.case import Evidence
from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.observe import OperatorLog

LIBRARY = "accelcheck_platform"
SOURCE = f"""
#include <torch/library.h>
#include <ATen/ops/add.h>
#include <ATen/ops/mul.h>

at::Tensor multiply_add(const at::Tensor& one, const at::Tensor& two) {{
  return at::add(at::mul(one, two), one);
}}

TORCH_LIBRARY({LIBRARY}, library) {{
  library.def("multiply_add(Tensor one, Tensor two) -> Tensor", &multiply_add);
}}
"""
"""Source without torch/extension.h, which is for Python modules and compiles several times as long."""


def verify(trial: Trial) -> Finding:
    """Compiles, loads and calls the operator.

    Raises:
        Unsupported: There is no compiler, or no ninja: `unavailable`.
    """
    compiler = os.environ.get("CXX", "c++")
    needed = {compiler: "install a C++ compiler, or set CXX to its name", "ninja": "pip install ninja"}
    for program, advice in needed.items():
        if shutil.which(program) is None:
            reason = f"torch.utils.cpp_extension needs {program}, which is not on PATH"
            raise Unsupported(unavailable(Code.NO_PACKAGE, reason, advice))
    if not hasattr(torch.ops, LIBRARY) or not hasattr(getattr(torch.ops, LIBRARY), "multiply_add"):
        with trial.clock("prepare"), tempfile.TemporaryDirectory(prefix="accelcheck-extension-") as folder:
            cpp_extension.load_inline(  # type: ignore[no-untyped-call]  # untyped in torch
                LIBRARY,
                SOURCE,
                extra_cflags=["-O0"],
                build_directory=folder,
                is_python_module=False,
                no_implicit_headers=True,
            )
    tries = Tries(trial.device, "C++ operator")
    left, right = (vector.to(trial.device.torch_device()) for vector in trial.problem(trial.case.seed).inputs)
    pairs = zip(left.tolist(), right.tolist(), strict=True)
    expected = [(Fraction(x) * Fraction(y) + Fraction(x),) for x, y in pairs]
    with OperatorLog(trial.device.type) as log:
        operator = getattr(torch.ops, LIBRARY).multiply_add
        tries.attempt("multiply_add", lambda: operator(left, right), "float32", expected)
    inner = log.count(r"aten::(mul|add)")
    tries.evidence.append(Evidence("ATen operators that it dispatched >= 2", inner, engaged=inner >= 2))
    return tries.finding()
