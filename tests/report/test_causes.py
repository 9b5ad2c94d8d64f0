"""Failures by cause: what real runs say of it, grouped so that a cause is one, and two are two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accelcheck.core.case import Case, Mode, Verdict
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.core.journal import ErrorCode, Known, Record
from accelcheck.devices.base import Fingerprint
from accelcheck.report.causes import Cause, causes, counted, expected
from accelcheck.report.run import DeviceRun, load
from accelcheck.report.signatures import HIDDEN, Kind, signatures

FOLDER = Path(__file__).parents[1]
TOY, XLA = (FOLDER / "journals" / f"{name}.jsonl" for name in ("toy", "xla"))
"""Level 1 without a ledger: of tests/toy_backend.py, a PrivateUse1 device in Python, and of torch_xla 2.9."""
STORED = FOLDER.parent / "baselines"


def run(*records: Record, device: str = "cpu") -> DeviceRun:
    return DeviceRun(
        device, Fingerprint(device, "EPYC", 2), "ok", "0.1.0", "3.11.7", ("Linux",), 1, "", ({},), {}, records, ("j",)
    )


def record(
    technique: str = "eager",
    workload: str = "mlp",
    verdict: Verdict = Verdict.ERROR,
    reason: str = "",
    *,
    dtype: str = "float32",
    mode: Mode = Mode.FORWARD,
    level: int = 1,
    **more: Any,
) -> Record:
    return Record(Case(technique, workload, "cpu", dtype, mode, level), verdict, reason=reason, **more)


def titles(*records: Record) -> dict[str, int]:
    return {cause.title: len(cause.cases) for cause in causes([run(*records)])}


def sized(found: tuple[Cause, ...]) -> dict[str, tuple[str, int]]:
    return {cause.title: (str(cause.kind), len(cause.cases)) for cause in found}


def one(reason: str, verdict: Verdict = Verdict.ERROR, **more: Any) -> tuple[Kind, str]:
    (signature,) = signatures(record(verdict=verdict, reason=reason, **more))
    return signature.kind, signature.title


def test_the_failures_of_a_foreign_device_are_few_causes() -> None:
    runs = load([TOY])
    grouped = causes(runs)
    assert counted(grouped) == TOY_COUNTED
    known = sized(grouped)
    assert {title: known[title] for title in TOY_CAUSES} == TOY_CAUSES
    named = {record.case.id for cause in grouped for _, record in cause.cases}
    assert named == {record.case.id for record in runs[0].records if not record.verdict.green}


def test_the_failures_of_xla_are_those_that_its_ledger_has_reasons_for() -> None:
    grouped = causes(load([XLA]))
    assert sized(grouped) == XLA_CAUSES


def test_causes_do_not_depend_on_the_order_of_the_journals() -> None:
    one_way, other = causes(load([TOY, XLA])), causes(load([XLA, TOY]))
    assert one_way == other
    assert list(one_way) == sorted(one_way, key=lambda cause: (-len(cause.cases), cause.title))


def test_expected_failures_are_grouped_by_the_reasons_of_the_ledger() -> None:
    gelu, norm = (Known(Verdict.FAIL, 1.0, reason, link) for reason, link in (("gelu; (exact)", "a"), ("norm", "b")))
    explained_by = expected(
        [
            run(
                record("eager", verdict=Verdict.XFAIL, reason="gelu; (exact) (a); norm (b)", known=(gelu, norm)),
                record("export", verdict=Verdict.XFAIL, reason="gelu; (exact) (a)", known=(gelu,)),
            )
        ]
    )
    assert [(cause.title, cause.link, len(cause.cases)) for cause in explained_by] == [
        ("gelu; (exact)", "a", 2),
        ("norm", "b", 1),
    ]


def test_expected_failures_of_older_journals_are_grouped_by_all_their_reasons() -> None:
    explained_by = expected(load([STORED / "cpu" / "level1.jsonl", STORED / "xla" / "level1.jsonl"]))
    cases = [record.case.id for cause in explained_by for _, record in cause.cases]
    assert len(cases) == len(set(cases)) == 28
    assert any(c.title.startswith("batch norm stores the biased variance in running_var: ") for c in explained_by)


def test_a_green_run_has_no_causes() -> None:
    assert causes(load([STORED / "cpu" / "level1.jsonl"])) == ()
    assert counted(()) == "0 cases, 0 causes"


@pytest.mark.parametrize(
    ("reason", "found"),
    [
        (
            (
                "NotImplementedError: Could not run 'aten::add.out' with arguments from the 'PrivateUse1' backend. "
                "This could be because"
            ),
            (Kind.OPERATOR, "aten::add.out: no kernel"),
        ),
        (
            "NotImplementedError: Could not run 'aten::mul.Tensor' with arguments from the 'SparseCUDA' backend.",
            (Kind.OPERATOR, "aten::mul.Tensor: no sparse kernel"),
        ),
        (
            "RuntimeError: Could not run 'aten::conv2d' with arguments from the 'AutocastMAIA' backend.",
            (Kind.FEATURE, "autocast is not registered"),
        ),
        (
            (
                "NotImplementedError: The operator 'aten::linalg_qr.out' is not currently implemented for the MPS "
                "device. If you want"
            ),
            (Kind.OPERATOR, "aten::linalg_qr.out: no kernel"),
        ),
        (
            "RuntimeError: \"addmm_impl_cpu_\" not implemented for 'Half'",
            (Kind.OPERATOR, "addmm_impl_cpu_: no kernel for float16"),
        ),
        (
            "RuntimeError: \"cos\" not implemented for 'Float8_e4m3fn'",
            (Kind.OPERATOR, "cos: no kernel for Float8_e4m3fn"),
        ),
        (
            "RuntimeError: User specified an unsupported autocast device_type 'toy'",
            (Kind.FEATURE, "autocast is not registered"),
        ),
        (
            "RuntimeError: don't know how to determine data location of torch.storage.UntypedStorage",
            (Kind.FEATURE, "storages cannot be saved"),
        ),
        (
            (
                "BackendCompilerFailed: backend='inductor' raised:\nNotImplementedError: "
                "convolution_backward_overrideable not implemented. You"
            ),
            (Kind.OPERATOR, "aten::convolution_backward: no kernel"),
        ),
        (
            (
                "RuntimeError: CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be "
                "asynchronously reported"
            ),
            (Kind.EXCEPTION, "CUDA error: an illegal memory access was encountered"),
        ),
        (
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of",
            (Kind.ENVIRONMENT, "out of memory"),
        ),
        ("ModuleNotFoundError: No module named 'triton.ops'", (Kind.ENVIRONMENT, "the module triton.ops is missing")),
        (
            "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory",
            (Kind.ENVIRONMENT, "the library libcudnn.so.9 is missing"),
        ),
        ("", (Kind.EXCEPTION, "an error without a reason")),
    ],
)
def test_well_known_errors_name_what_is_missing(reason: str, found: tuple[Kind, str]) -> None:
    assert one(reason) == found


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (ErrorCode.NO_EVIDENCE, (Kind.EVIDENCE, "gives no evidence that it ran")),
        (ErrorCode.NOTHING_COMPARED, (Kind.EVIDENCE, "no element was compared")),
        (ErrorCode.IMPLAUSIBLE, (Kind.EVIDENCE, "what was timed cannot have done the work")),
        (ErrorCode.NO_BASELINE, (Kind.REGRESSION, "why")),
        (ErrorCode.NOT_COLLECTED, (Kind.UNCOLLECTED, "a case of the must-pass list is not collected")),
    ],
)
def test_an_error_that_no_exception_is_is_told_by_its_code(code: ErrorCode, found: tuple[Kind, str]) -> None:
    assert one("why", code=code) == found


def test_the_operator_is_found_where_another_error_hides_it() -> None:
    trace = (
        "NotImplementedError: Could not run 'aten::exp2' with arguments from the 'NPU' backend.\n"
        "which led to\nTraceback (most recent call last):\n"
    )
    assert one("InternalTorchDynamoError: something else", traceback=trace) == (Kind.OPERATOR, "aten::exp2: no kernel")


def test_source_lines_of_a_traceback_are_no_errors() -> None:
    trace = (
        'Traceback (most recent call last):\n  File "x.py", line 1, in f\n'
        '    raise MemoryError("out of memory")\nKeyError: 3\n'
    )
    assert one("KeyError: 3", traceback=trace) == (Kind.EXCEPTION, f"KeyError: {HIDDEN}")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ValueError: got torch.Size([3, 4]) at 0x7f00dead", "ValueError: got torch.Size([5]) at 0x7f00beef"),
        ("ValueError: tensor of 3 at dim -1, 1.5e-07", "ValueError: tensor of 44 at dim 2, 9.0"),
        ("OSError: /tmp/a/b.so of mlp", "OSError: /home/x/y/b.so of mlp"),
        ("TypeError: torch.float32 and torch.int8", "TypeError: torch.bfloat16 and torch.uint8"),
    ],
)
def test_what_differs_from_case_to_case_is_left_out(first: str, second: str) -> None:
    assert one(first) == one(second)


def test_names_of_the_case_are_left_out() -> None:
    grouped = titles(
        record("amp-bf16", "mlp", reason="KeyError: 'mlp' under amp-bf16"),
        record("eager", "cnn", reason="KeyError: 'cnn' under eager"),
        record("eager", "moe", reason="KeyError: 'other' under eager"),
    )
    assert grouped == {f"KeyError: '{HIDDEN}' under {HIDDEN}": 2, f"KeyError: 'other' under {HIDDEN}": 1}


def test_errors_that_differ_in_a_word_are_two_causes() -> None:
    assert len(titles(record(reason="ValueError: no rows"), record("inplace", reason="ValueError: no columns"))) == 2


STACK = """Fatal Python error: Segmentation fault

Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/copy.py", line 153 in deepcopy
  File "/venv/lib/python3.11/site-packages/torch/storage.py", line 255 in clone
  File "/repository/accelcheck/checks/execute.py", line 125 in found
"""


def test_a_crash_is_its_signal_and_the_innermost_frame_outside_of_pythons_library() -> None:
    segmentation: dict[str, Any] = {"reason": "the process died", "verdict": Verdict.CRASH, "code": "SIGSEGV"}
    assert one(**segmentation, traceback=STACK) == (Kind.CRASH, "SIGSEGV in clone (torch/storage.py)")
    assert one(**segmentation) == (Kind.CRASH, "SIGSEGV, without a stack")
    other = STACK.replace(
        "Current thread 0x00007f02",
        "Current thread 0x00007f03 (most recent call first):\n  <no Python frame>\n\nThread 0x00007f02",
    )
    assert one(**segmentation, traceback=other) == (Kind.CRASH, "SIGSEGV in clone (torch/storage.py)")
    assert one("", Verdict.CRASH, code="status 3")[1] == "status 3, without a stack"
    assert one("of an older journal", Verdict.CRASH)[1] == "ended, without a stack"


def test_a_hang_is_where_it_hangs() -> None:
    reason = "the process that ran it ran for longer than 300 s and was killed"
    assert one(reason, Verdict.HANG, traceback=STACK) == (Kind.HANG, "hangs in clone (torch/storage.py)")


def test_a_lost_device_is_the_error_that_it_answered_with() -> None:
    reason = "cuda does not answer any more: RuntimeError: CUDA error: unspecified launch failure\nRuntimeError: x"
    assert one(reason, Verdict.DEVICE_LOST) == (Kind.LOST, "the device is lost: CUDA error: unspecified launch failure")


def test_flaky_cases_stand_apart_from_those_that_always_fail() -> None:
    reason = "RuntimeError: CUDA error: misaligned address"
    runs = (Verdict.ERROR, Verdict.PASS, Verdict.PASS)
    grouped = titles(
        record(verdict=Verdict.FLAKY, reason=reason, runs=runs),
        record("inplace", reason=reason),
        record("export", verdict=Verdict.FLAKY, runs=(Verdict.FAIL, Verdict.PASS), faults=(view("out"),)),
    )
    assert grouped == {
        "CUDA error: misaligned address": 1,
        "not in each run: CUDA error: misaligned address": 1,
        "export: not in each run: wrong values in outputs": 1,
    }


def test_a_case_that_passes_and_is_expected_to_fail_names_the_ledgers_reason() -> None:
    known = tuple(Known(Verdict.FAIL, 1.0, reason, "a link") for reason in ("GELU gives NaN", "no exp2"))
    grouped = causes([run(record(verdict=Verdict.XPASS, known=known))])
    assert {(cause.kind, cause.title) for cause in grouped} == {
        (Kind.LEDGER, "passes, and the ledger expects: GELU gives NaN"),
        (Kind.LEDGER, "passes, and the ledger expects: no exp2"),
    }


def view(path: str, name: str = "row") -> Fault:
    return Fault(FaultKind.VIEW, path, name, "tiny", measured=2e-3, allowed=1e-6, place="[3, :]")


def failing(*faults: Fault, technique: str = "eager", workload: str = "mlp", **more: Any) -> Record:
    return record(technique, workload, Verdict.FAIL, faults=faults, **more)


def passing(technique: str = "eager", workload: str = "mlp", **more: Any) -> Record:
    return record(technique, workload, Verdict.PASS, **more)


@pytest.mark.parametrize(
    ("path", "wrong", "expected"),
    [
        ("out", [("fused", "mlp"), ("fused", "cnn"), ("fused", "norm")], {"fused: wrong values in outputs": 3}),
        (
            "grad:fc.weight",
            [("fused", "norm"), ("eager", "norm"), ("static", "norm")],
            {"norm: wrong values in gradients": 3},
        ),
        (
            "out",
            [(technique, workload) for technique in ("fused", "static") for workload in ("mlp", "cnn", "norm")],
            {"fused: wrong values in outputs": 3, "static: wrong values in outputs": 3},
        ),
    ],
    ids=["a technique everywhere", "a workload under all techniques", "two techniques"],
)
def test_wrong_values_belong_to_what_all_wrong_cases_share(
    path: str, wrong: list[tuple[str, str]], expected: dict[str, int]
) -> None:
    techniques = ["fused", "eager", "static", *(f"t{i}" for i in range(9 if len(wrong) > 3 else 0))]
    pairs = [(technique, workload) for technique in techniques for workload in ("mlp", "cnn", "norm")]
    records = [failing(view(path), technique=p[0], workload=p[1]) if p in wrong else passing(*p) for p in pairs]
    assert titles(*records) == expected


def test_wrong_values_belong_to_the_dtype_that_is_wrong_in_most_cases() -> None:
    pairs = [(technique, workload) for technique in ("fused", "eager") for workload in ("mlp", "cnn", "norm")]
    wrong = [
        failing(view("out"), technique=technique, workload=workload, dtype="bfloat16") for technique, workload in pairs
    ]
    assert titles(*wrong, *(passing(*pair) for pair in pairs)) == {"bfloat16: wrong values in outputs": 6}


def test_a_buffer_names_its_cause_unless_outputs_are_wrong_too() -> None:
    buffer = view("buffer:stem.bn.running_var")
    assert titles(failing(buffer), failing(buffer, workload="cnn")) == {"running_var: wrong values": 2}
    both = titles(failing(buffer, view("grad:head.weight")))
    assert both == {"running_var: wrong values": 1, "mlp: wrong values in gradients": 1}
    assert titles(failing(buffer, view("out"))) == {"mlp: wrong values in outputs, running_var": 1}


@pytest.mark.parametrize(
    ("fault", "kind", "title"),
    [
        (Fault(FaultKind.PATTERN, "out", "NaN", "nan[0]", "3 of them", "0", 3.0), "wrong values",
            "mlp: wrong NaN or infinity in outputs"),
        (Fault(FaultKind.PATTERN, "loss[1]", "not finite", measured=1.0), "wrong values",
            "mlp: wrong NaN or infinity in losses"),
        (Fault(FaultKind.VIEW, "out", "scale gain", measured=8.0, allowed=1e-7), "wrong values",
            "mlp: random numbers are wrong in outputs"),
        (Fault(FaultKind.VALUE, "buffer:bn.num_batches_tracked", expected="1", got="2"), "wrong values",
            "num_batches_tracked: wrong values"),
        (Fault(FaultKind.VIEW, "loss[0:4]", "mean loss of the training", measured=2.0, allowed=1e-3), "wrong values",
            "mlp: wrong values in losses"),
        (Fault(FaultKind.VIEW, "out['a: b']", "row", "draw 1", measured=2.0, allowed=1.0), "wrong values",
            "mlp: wrong values in outputs"),
        (Fault(FaultKind.METADATA, "out", "dtype", expected="float32", got="float64"), "wrong metadata",
            "wrong dtype of outputs"),
        (Fault(FaultKind.METADATA, "grad:fc1.weight", "missing"), "wrong metadata", "missing: gradients"),
        (Fault(FaultKind.MUTATED, "input[0]"), "changed state", "an input is overwritten"),
        (Fault(FaultKind.MUTATED, "parameter:fc.weight"), "changed state", "a parameter is overwritten"),
        (Fault(FaultKind.STATE, "default dtype", expected="float32", got="float64"), "changed state",
            "global state is left changed: default dtype"),
        (Fault(FaultKind.RERUN, "out", measured=1e-7), "not reproducible", "a second run gives other bits"),
        (Fault(FaultKind.REGRESSION, "regression", "time", measured=1.5, allowed=1.1), "regression",
            "slower than the baseline"),
        (Fault(FaultKind.REGRESSION, "regression", "memory", measured=20.0, allowed=10.0), "regression",
            "more memory than the baseline"),
        (Fault(FaultKind.LIMIT, "limit", "memory", expected="the budget (of the board)", measured=1.8, allowed=1.5),
            "limit", "beyond a limit: the budget (of the board)"),
        (Fault(FaultKind.EVIDENCE, "no operator left xla for the CPU", "aten::exp2", "draw 2", got="aten::exp2 x3"),
            "missing operator", "aten::exp2: no kernel, runs on the CPU"),
        (Fault(FaultKind.EVIDENCE, "compiled regions entered >= 1", got="0"), "no evidence",
            "not seen: compiled regions entered >= 1"),
        (Fault(FaultKind.RAISED, "run", "RuntimeError", "draw 3", got="CUDA error: misaligned address"), "exception",
            "CUDA error: misaligned address"),
        (Fault(FaultKind.RULE, "scaler", "scale after step 5", expected="131072", got="65536"), "wrong values",
            f"scaler: scale after step {HIDDEN}: expected {HIDDEN}, got {HIDDEN}"),
        (Fault(FaultKind.OTHER, "out: view row at [3, :]: expected at most 1, got 9"), "wrong values",
            f"out: view row at [{HIDDEN}, :]: expected at most {HIDDEN}, got {HIDDEN}"),
    ],
)  # fmt: skip
def test_each_kind_of_fault_has_its_cause(fault: Fault, kind: str, title: str) -> None:
    assert sized(causes([run(failing(fault))])) == {title: (kind, 1)}


def test_a_fault_that_outgrew_its_entry_is_the_ledgers_cause_alone() -> None:
    known = Known(Verdict.FAIL, 5.0, "batch norm (in training) is biased", "a link", view("out"))
    grouped = causes([run(failing(view("out"), known=(known,)))])
    assert sized(grouped) == {"more than the ledger expects: batch norm (in training) is biased": ("ledger", 1)}
    assert len(causes([run(failing(view("out"), view("out", "gain"), known=(known,)))])) == 2


def test_a_case_that_shows_two_causes_stands_under_both_and_counts_once() -> None:
    strayed = Fault(FaultKind.EVIDENCE, "no operator left xla for the CPU", "aten::exp2", got="aten::exp2 x3")
    grouped = causes([run(failing(strayed, view("out")))])
    assert {cause.kind for cause in grouped} == {Kind.OPERATOR, Kind.VALUES}
    assert counted(grouped) == "1 case, 2 causes"


def test_observations_that_are_missing_together_are_one_cause() -> None:
    graphs, size = (
        Fault(FaultKind.EVIDENCE, claim, got="0") for claim in ("graphs made = 1", "bytes of the saved program > 31784")
    )
    assert titles(failing(graphs, size), failing(graphs, technique="fused")) == {"not seen: graphs made = 1": 2}


def test_the_example_is_the_simplest_case_and_its_command_runs_it() -> None:
    reason = "RuntimeError: CUDA error: misaligned address"
    grouped = causes(
        [
            run(
                record("a", reason=reason, mode=Mode.TRAIN),
                record("b", reason=reason, level=2),
                record("c", reason=f"{reason}\n(3 more lines)"),
                record("d", reason=reason),
            )
        ]
    )
    assert grouped[0].example.case.technique == "d"
    assert (
        grouped[0].reproduction
        == "pytest --pyargs accelcheck.suite --accel-device=cpu --accel-case=d/mlp/cpu/float32/forward"
    )


def test_the_same_cause_on_two_devices_is_one() -> None:
    reason = "NotImplementedError: Could not run 'aten::exp2' with arguments from the '{}' backend."
    (grouped,) = causes(
        [
            run(record(reason=reason.format(key)), device=device)
            for device, key in (("npu", "PrivateUse1"), ("xla", "XLA"))
        ]
    )
    assert [label for label, _ in grouped.cases] == ["npu", "xla"]


def test_a_hostile_reason_is_read_within_bounds() -> None:
    for text in (
        "a" * 100_000,
        "\n" * 99_999,
        "a::" * 33_000,
        "[1, " * 25_000,
        "(" * 50_000,
        "1_" * 50_000,
        " (http" * 16_000,
        "/a" * 50_000,
    ):
        for verdict in Verdict:
            words = Fault(FaultKind.OTHER, text), Fault(FaultKind.RAISED, text, text, text, text, text)
            grouped = signatures(record(verdict=verdict, reason=text, traceback=text, faults=words))
            assert grouped
            assert all(len(signature.title) <= 200 for signature in grouped)
    assert expected([run(record(verdict=Verdict.XFAIL, reason=" (http" * 16_000))])


TOY_COUNTED = "127 cases, 22 causes"
TOY_CAUSES = {
    "storages cannot be copied or shared": ("missing feature", 16),
    "autocast is not registered": ("missing feature", 14),
    "aten::convolution: no kernel": ("missing operator", 12),
    "mlp-blocks: wrong values in gradients": ("wrong values", 7),
    "NotImplementedError in _conv_forward (torch/nn/modules/conv.py), in TorchScript": ("missing feature", 4),
    "SIGABRT in _engine_run_backward (torch/autograd/graph.py)": ("crash", 5),
    "SIGSEGV in clone (torch/storage.py)": ("crash", 2),
    "hangs in __call__ (torch/_ops.py)": ("hang", 17),
}
"""The largest, and one of each kind. The device has views that are copies, no convolution and no autocast."""
XLA_CAUSES = {
    "cnn: wrong values in gradients, outputs": ("wrong values", 9),
    "running_var: wrong values": ("wrong values", 8),
    "AttributeError: module 'torch' has no attribute 'xla'": ("missing feature", 4),
    "not seen: weights read back with other bits = 0": ("no evidence", 4),
    "RuntimeError: Cannot insert a Tensor that requires grad as a constant. Consider making it a parameter or input, "
    "or detaching the gradient": ("exception", 2),
    "aten::native_layer_norm_backward: no kernel, runs on the CPU": ("missing operator", 2),
    "dropout: random numbers are wrong in gradients, outputs": ("wrong values", 2),
    "reductions: wrong values in outputs": ("wrong values", 2),
    "aten::exp2: no kernel, runs on the CPU": ("missing operator", 1),
    "policy-fp16: wrong values in gradients": ("wrong values", 1),
}  # fmt: skip
