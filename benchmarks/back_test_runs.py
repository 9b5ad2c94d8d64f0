"""Runs one program of `back_test_programs.py` in this process and writes its result as JSON, for `back_test.py`.

python benchmarks/back_test_runs.py PROGRAM plainly|judged ANSWER.json
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from back_test_programs import programs
from torch import Tensor, nn

from accelcheck.checks.execute import Bench
from accelcheck.core.capability import SUPPORTED
from accelcheck.core.case import Mode, Verdict
from accelcheck.core.selection import Selection
from accelcheck.devices.base import Status
from accelcheck.devices.cpu import Cpu
from accelcheck.devices.torch_names import pytree
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify.cache import clean_process
from accelcheck.verify.oracle import Store
from accelcheck.workloads.nested import OwnModelError
from accelcheck.workloads.own_model import workload_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from back_test_programs import Bug

    from accelcheck.core.journal import Record

RELATIVE: Mapping[torch.dtype, float] = {torch.bfloat16: 4e-2, torch.float16: 1e-2, torch.float64: 1e-6}
"""Part of a number by which two results may differ, by dtype, and `ELSE` in others: bugs are larger."""
ELSE = 1e-4
LOOSE = 4e-2
"""The same part for quantized results."""
ABSOLUTE = 1e-6
"""Part of the largest number by which any may differ."""
STEP = 1e-6
"""Half the distance of the points of central differences, in float64."""
NOT_APPLICABLE = "not applicable"
JUDGED_AS = {"func-jvp": "func-jacfwd"}
"""The technique of accelcheck where it has another name."""
REASON = 400
"""Characters of a reason that are kept."""


# Without accelcheck: the result, and what it should be.


class Wrapped(nn.Module):
    """A function as a module, which exporters ask for. It casts its inputs first, where dtypes are given."""

    def __init__(self, function: Callable[..., Any], dtypes: Sequence[torch.dtype] = ()) -> None:
        super().__init__()
        self.function = function
        self.dtypes = tuple(dtypes)

    def forward(self, *inputs: Tensor) -> Any:
        cast = [x.to(dtype) for x, dtype in zip(inputs, self.dtypes, strict=True)] if self.dtypes else inputs
        return self.function(*cast)


def module_of(function: Callable[..., Any]) -> nn.Module:
    return function if isinstance(function, nn.Module) else Wrapped(function).eval()


def copies(bug: Bug) -> tuple[Tensor, ...]:
    return tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in bug.inputs)


def tensors(value: Any) -> list[Tensor]:
    return [torch.as_tensor(leaf).detach() for leaf in pytree.tree_leaves(value) if leaf is not None]


def called(bug: Bug, function: Callable[..., Any]) -> list[Tensor]:
    """The results of a function, and then its inputs, to which it may have written; or its gradients."""
    inputs = copies(bug)
    if not bug.backward:
        with torch.no_grad():
            return tensors([function(*inputs), *inputs])
    leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()]
    outs = [out for out in pytree.tree_leaves(function(*inputs)) if out.requires_grad]
    # Other weights for each element: those of a sum would hide gradients that change places.
    weights = [torch.linspace(1, 2, out.numel(), dtype=out.dtype).reshape(out.shape) for out in outs]
    return tensors(torch.autograd.grad(outs, leaves, weights))


def compiled(bug: Bug, **options: Any) -> list[Tensor]:
    return called(bug, torch.compile(bug.function, **options))


def onnx(bug: Bug) -> list[Tensor]:
    onnxruntime: Any = importlib.import_module("onnxruntime")
    exported: Any = torch.onnx.export(module_of(bug.function), copies(bug), dynamo=True, verbose=False)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    model = exported.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    values = dict(zip(names, (x.numpy() for x in copies(bug)), strict=True))
    return [torch.from_numpy(out.copy()) for out in session.run(None, values)]


def openvino(bug: Bug) -> list[Tensor]:
    ov: Any = importlib.import_module("openvino")
    exported = torch.export.export(module_of(bug.function), copies(bug))
    model = ov.Core().compile_model(ov.convert_model(exported), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    out = model([x.numpy() for x in copies(bug)])
    return [torch.from_numpy(out[place].copy()) for place in range(len(model.outputs))]


def quantized(bug: Bug) -> list[Tensor]:
    torchao: Any = importlib.import_module("torchao.quantization")
    module = copy.deepcopy(module_of(bug.function))
    torchao.quantize_(module, torchao.Int8WeightOnlyConfig())
    return called(bug, module)


def derivative(bug: Bug, transform: str) -> list[Tensor]:
    """The derivative in float64, like that of `differences`."""
    (x,) = (x.double() for x in bug.inputs)
    if transform == "jvp":
        return tensors(torch.func.jvp(bug.function, (x,), (torch.ones_like(x),))[1])
    return tensors(getattr(torch.func, transform)(bug.function)(x))


def differences(bug: Bug) -> list[Tensor]:
    """The Jacobian for the only input, by central differences in float64."""
    (x,) = (x.double() for x in bug.inputs)
    columns = []
    for place in range(x.numel()):
        step = torch.zeros(x.numel(), dtype=x.dtype)
        step[place] = STEP
        up, down = (bug.function(x + sign * step.reshape(x.shape)).detach() for sign in (1, -1))
        columns.append((up - down) / (2 * STEP))
    return [torch.stack(columns, -1).reshape(columns[0].shape + x.shape)]


def mapped(bug: Bug) -> list[Tensor]:
    return tensors(torch.func.vmap(bug.function)(*copies(bug)))


def one_by_one(bug: Bug) -> list[Tensor]:
    rows = [bug.function(*row) for row in zip(*copies(bug), strict=True)]
    return tensors(pytree.tree_map(lambda *parts: torch.stack(parts), *rows))


def eager(bug: Bug) -> list[Tensor]:
    if bug.right is not None:
        return tensors(bug.right())
    if bug.technique == "func-vmap":
        return one_by_one(bug)
    if bug.technique.startswith("func-"):
        return differences(bug)
    return called(bug, bug.function)


CANDIDATES: Mapping[str, Callable[[Bug], list[Tensor]]] = {
    "eager": lambda bug: called(bug, bug.function),
    "compile-static": lambda bug: compiled(bug, dynamic=False),
    "compile-dynamic": lambda bug: compiled(bug, dynamic=True),
    "compile-aot-eager": lambda bug: compiled(bug, backend="aot_eager"),
    "onnxruntime": onnx,
    "openvino": openvino,
    "jit-script": lambda bug: called(bug, torch.jit.script(bug.function)),
    "func-vmap": mapped,
    "func-jvp": lambda bug: derivative(bug, "jvp"),
    "func-jacfwd": lambda bug: derivative(bug, "jacfwd"),
    "func-jacrev": lambda bug: derivative(bug, "jacrev"),
    "int8-torchao-weight-only": quantized,
}
"""Results of a program under its technique."""


def difference(right: Tensor, got: Tensor, *, strides: bool, loose: bool) -> str:
    """Words for a difference of two tensors beyond rounding errors; empty where there is none."""
    for what, expected, actual in (
        ("dtype", right.dtype, got.dtype),
        ("shape", tuple(right.shape), tuple(got.shape)),
        *((("strides", right.stride(), got.stride()),) if strides else ()),
    ):
        if expected != actual:
            return f"{what}: expected {expected}, got {actual}"
    allowed = LOOSE if loose else RELATIVE.get(right.dtype, ELSE)
    first, other = (x if x.dtype == torch.int64 else x.double() for x in (right, got))
    wrong = ~((first == other) | (first.isnan() & other.isnan()))
    if right.is_floating_point():
        scale = first[first.isfinite()].abs().max() if first.isfinite().any() else torch.tensor(0.0)
        least = (LOOSE if loose else ABSOLUTE) * scale
        bound = allowed * torch.maximum(first.abs(), other.abs()) + least
        wrong &= ~(first.isfinite() & other.isfinite() & ((first - other).abs() <= bound))
    if not wrong.any():
        return ""
    place = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{int(wrong.sum())} of {wrong.numel()} numbers, first at {list(place)}: expected {right[place].item():.9g}, "
        f"got {got[place].item():.9g}"
    )


def plainly(name: str) -> dict[str, Any]:
    """Returns True where the installed packages have a bug."""
    bug = programs()[name]()
    try:
        right, got = eager(bug), CANDIDATES[bug.technique](bug)
    except Exception as error:  # noqa: BLE001 - a package that is absent, or refuses the program now, is an answer
        return {"present": None, "said": f"{type(error).__name__}: {error}"[:REASON]}
    # Eager's result ends with the inputs, which most techniques leave out.
    right = right[: len(got)]
    got = got[: len(right)]
    strides, loose = bug.technique.startswith("compile"), bug.technique.startswith("int8")
    lines = [
        f"out[{place}]: {text}"
        for place, pair in enumerate(zip(right, got, strict=True))
        if (text := difference(*pair, strides=strides, loose=loose))
    ]
    return {"present": bool(lines), "said": "; ".join(lines)[:REASON]}


# With accelcheck: the program as somebody's own model.


def own_model(bug: Bug) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """The program and float32 inputs, which it casts to the dtypes that it is about.

    Raises:
        OwnModelError: Float32 does not hold its inputs.
    """
    dtypes = [x.dtype for x in bug.inputs]
    if all(not x.is_floating_point() or x.dtype == torch.float32 for x in bug.inputs):
        return bug.function, copies(bug)
    inputs = tuple(x.float() if x.is_floating_point() else x for x in copies(bug))
    if any(not torch.equal(x.to(dtype), given) for x, dtype, given in zip(inputs, dtypes, bug.inputs, strict=True)):
        raise OwnModelError("float32 does not hold its inputs, and accelcheck takes no others")
    return Wrapped(bug.function, dtypes), inputs


def judged(name: str) -> dict[str, Any]:
    """The verdict of a program as a user's own model, with eager's beside it."""
    bug = programs()[name]()
    technique = JUDGED_AS.get(bug.technique, bug.technique)
    mode = Mode.BACKWARD if bug.backward or technique.startswith("func-jac") else Mode.FORWARD
    try:
        function, inputs = own_model(bug)
        inputs = tuple(x.detach() for x in inputs)
        workload = workload_of(function, inputs, name=name.replace("_", "-"))
    except OwnModelError as error:
        return {"verdict": NOT_APPLICABLE, "why": str(error)[:REASON]}
    matrix = Matrix.load().extended([], [workload])
    names = dict.fromkeys(["eager", technique])
    selection = Selection(("cpu",), tuple(names), (workload.name,), ("float32",), level=4)
    cases = {case.technique: case for case in matrix.cases(selection, (mode,))}
    if technique not in cases:
        refusal = matrix.refusals(workload).get(technique, f"no case in mode {mode}")
        return {"verdict": NOT_APPLICABLE, "why": f"{technique} {refusal}"}
    clean = clean_process(matrix.parts())
    try:
        with tempfile.TemporaryDirectory(prefix="back-test-") as folder:
            bench = Bench(matrix, {"cpu": Cpu()}, {"cpu": Status("cpu", SUPPORTED)}, Store(Path(folder), clean))
            records = {key: bench.run(case) for key, case in cases.items()}
    finally:
        clean.close()
    return answer(records[technique], records["eager"])


def answer(record: Record, beside: Record) -> dict[str, Any]:
    """A verdict as JSON. Where eager does not pass either, it says nothing of a technique."""
    own = record.verdict is Verdict.FAIL and bool(record.faults)
    same = record.case.technique == beside.case.technique
    caught = own and (same or beside.verdict is Verdict.PASS)
    why = record.headline[:REASON]
    if own and not caught:
        why = f"eager {beside.verdict}: {beside.headline}"[:REASON]
    return {
        "verdict": str(record.verdict),
        "caught": caught,
        "why": why,
        "faults": [str(fault)[:REASON] for fault in record.faults[:5]],
    }


QUESTIONS: Mapping[str, Callable[[str], dict[str, Any]]] = {"plainly": plainly, "judged": judged}


def main(words: Sequence[str]) -> None:
    """Answer a question about a program."""
    name, question, path = words
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):  # exporters print
        outcome = QUESTIONS[question](name)
    Path(path).write_text(json.dumps(outcome), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
