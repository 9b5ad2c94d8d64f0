"""Failures by cause: what real runs say of it, grouped so that a cause is one, and two are two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accelcheck.core.case import Case, Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.devices.base import Fingerprint
from accelcheck.report.causes import Cause, causes, counted, expected
from accelcheck.report.run import DeviceRun, load
from accelcheck.report.signatures import HIDDEN, Kind, signatures

FOLDER = Path(__file__).parents[1]
TOY, XLA = (FOLDER / "journals" / f"{name}.jsonl" for name in ("toy", "xla"))
"""Level 1 without a ledger: of tests/toy_backend.py, a PrivateUse1 device in Python, with 60 s a case on a busy machine; and of torch_xla 2.9."""
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
    (found,) = signatures(record(verdict=verdict, reason=reason, **more))
    return found.kind, found.title


# Real runs


def test_the_failures_of_a_foreign_device_are_few_causes() -> None:
    runs = load([TOY])
    found = causes(runs)
    assert counted(found) == TOY_COUNTED
    known = sized(found)
    assert {title: known[title] for title in TOY_CAUSES} == TOY_CAUSES
    named = {record.case.id for cause in found for _, record in cause.cases}
    assert named == {record.case.id for record in runs[0].records if not record.verdict.green}


def test_the_failures_of_xla_are_those_that_its_ledger_has_reasons_for() -> None:
    found = causes(load([XLA]))
    assert sized(found) == XLA_CAUSES


def test_causes_do_not_depend_on_the_order_of_the_journals() -> None:
    one_way, other = causes(load([TOY, XLA])), causes(load([XLA, TOY]))
    assert one_way == other
    assert list(one_way) == sorted(one_way, key=lambda cause: (-len(cause.cases), cause.title))


def test_expected_failures_are_grouped_by_the_reasons_of_the_ledger() -> None:
    found = expected(load([STORED / "cpu" / "level1.jsonl", STORED / "xla" / "level1.jsonl"]))
    assert counted(found) == "28 cases, 13 causes"
    assert (found[1].title.partition(":")[0], len(found[1].cases)) == (
        "batch norm stores the biased variance in running_var", 7
    )  # fmt: skip
    assert found[1].link == "https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm2d.html"
    # Some cases have two reasons, in which "; " and brackets stand too.
    assert sum(len(cause.cases) for cause in found) == 36
    assert "torch.utils.checkpoint looks for torch.<device type>, and torch_xla registers no torch.xla module; torch_xla.utils.checkpoint works" in {
        cause.title for cause in found
    }  # fmt: skip


def test_a_green_run_has_no_causes() -> None:
    assert causes(load([STORED / "cpu" / "level1.jsonl"])) == ()
    assert counted(()) == "0 cases, 0 causes"


# Words of torch and the system


@pytest.mark.parametrize(
    ("reason", "found"),
    [
        (
            "NotImplementedError: Could not run 'aten::add.out' with arguments from the 'PrivateUse1' backend. This could be because",
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
            "NotImplementedError: The operator 'aten::linalg_qr.out' is not currently implemented for the MPS device. If you want",
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
            "BackendCompilerFailed: backend='inductor' raised:\nNotImplementedError: convolution_backward_overrideable not implemented. You",
            (Kind.OPERATOR, "aten::convolution_backward: no kernel"),
        ),
        (
            "RuntimeError: CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported",
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
        (
            "eager gave no evidence that it ran: a verdict needs some",
            (Kind.EVIDENCE, "gives no evidence that it ran"),
        ),
        (
            "expected a case of version 1 of the must-pass list cpu, which was not collected: its technique or workload is not registered here",
            (Kind.UNCOLLECTED, "a case of the must-pass list is not collected"),
        ),
        ("", (Kind.EXCEPTION, "an error without a reason")),
    ],
)
def test_well_known_errors_name_what_is_missing(reason: str, found: tuple[Kind, str]) -> None:
    assert one(reason) == found


def test_the_operator_is_found_where_another_error_hides_it() -> None:
    trace = "NotImplementedError: Could not run 'aten::exp2' with arguments from the 'NPU' backend.\nwhich led to\nTraceback (most recent call last):\n"
    assert one("InternalTorchDynamoError: something else", traceback=trace) == (Kind.OPERATOR, "aten::exp2: no kernel")


def test_source_lines_of_a_traceback_are_no_errors() -> None:
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    raise MemoryError("out of memory")\nKeyError: 3\n'
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
    found = titles(
        record("amp-bf16", "mlp", reason="KeyError: 'mlp' under amp-bf16"),
        record("eager", "cnn", reason="KeyError: 'cnn' under eager"),
        record("eager", "moe", reason="KeyError: 'other' under eager"),
    )
    assert found == {f"KeyError: '{HIDDEN}' under {HIDDEN}": 2, f"KeyError: 'other' under {HIDDEN}": 1}


def test_errors_that_differ_in_a_word_are_two_causes() -> None:
    assert len(titles(record(reason="ValueError: no rows"), record("inplace", reason="ValueError: no columns"))) == 2


# Processes that ended


STACK = """Fatal Python error: Segmentation fault

Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/copy.py", line 153 in deepcopy
  File "/venv/lib/python3.11/site-packages/torch/storage.py", line 255 in clone
  File "/repository/accelcheck/checks/execute.py", line 125 in found
"""


def test_a_crash_is_its_signal_and_the_innermost_frame_outside_of_pythons_library() -> None:
    reason = "the process that ran it died of SIGSEGV"
    assert one(reason, Verdict.CRASH, traceback=STACK) == (Kind.CRASH, "SIGSEGV in clone (torch/storage.py)")
    assert one(reason, Verdict.CRASH) == (Kind.CRASH, "SIGSEGV, without a stack")
    other = STACK.replace(
        "Current thread 0x00007f02",
        "Current thread 0x00007f03 (most recent call first):\n  <no Python frame>\n\nThread 0x00007f02",
    )
    assert one(reason, Verdict.CRASH, traceback=other) == (Kind.CRASH, "SIGSEGV in clone (torch/storage.py)")
    assert one("the process that ran it ended with status 3", Verdict.CRASH)[1] == "status 3, without a stack"


def test_a_hang_is_where_it_hangs() -> None:
    reason = "the process that ran it ran for longer than 300 s and was killed"
    assert one(reason, Verdict.HANG, traceback=STACK) == (Kind.HANG, "hangs in clone (torch/storage.py)")


def test_a_lost_device_is_the_error_that_it_answered_with() -> None:
    reason = "cuda does not answer any more: RuntimeError: CUDA error: unspecified launch failure\nRuntimeError: x"
    assert one(reason, Verdict.DEVICE_LOST) == (Kind.LOST, "the device is lost: CUDA error: unspecified launch failure")


def test_flaky_cases_stand_apart_from_those_that_always_fail() -> None:
    flaky = "1 of 3 runs were not right; the first one: error\nRuntimeError: CUDA error: misaligned address"
    found = titles(
        record(verdict=Verdict.FLAKY, reason=flaky),
        record("inplace", reason="RuntimeError: CUDA error: misaligned address"),
    )
    assert found == {"CUDA error: misaligned address": 1, "not in each run: CUDA error: misaligned address": 1}


def test_a_case_that_passes_and_is_expected_to_fail_names_the_ledgers_reason() -> None:
    reason = "passes: remove the entry from the ledger\nthe ledger expects fail: GELU gives NaN\nthe ledger expects error: no exp2"
    found = causes([run(record(verdict=Verdict.XPASS, reason=reason))])
    assert {(cause.kind, cause.title) for cause in found} == {
        (Kind.LEDGER, "passes, and the ledger expects: GELU gives NaN"),
        (Kind.LEDGER, "passes, and the ledger expects: no exp2"),
    }


# Faults of a result


def view(path: str, name: str = "row") -> str:
    return f"{path}: view {name} at [3, :] [tiny]: expected at most 1.000e-06, got 2.000e-03"


def failing(reason: str, technique: str = "eager", workload: str = "mlp", **more: Any) -> Record:
    return record(technique, workload, Verdict.FAIL, reason, **more)


def passing(technique: str = "eager", workload: str = "mlp", **more: Any) -> Record:
    return record(technique, workload, Verdict.PASS, **more)


def test_wrong_values_belong_to_the_technique_that_is_wrong_everywhere() -> None:
    wrong = [failing(view("out"), "fused", workload) for workload in ("mlp", "cnn", "norm")]
    right = [passing(technique, workload) for technique in ("eager", "static") for workload in ("mlp", "cnn", "norm")]
    assert titles(*wrong, *right) == {"fused: wrong values in outputs": 3}


def test_wrong_values_belong_to_the_workload_that_is_wrong_under_all_techniques() -> None:
    wrong = [failing(view("grad:fc.weight"), technique, "norm") for technique in ("fused", "eager", "static")]
    right = [passing(technique, workload) for technique in ("fused", "eager", "static") for workload in ("mlp", "cnn")]
    assert titles(*wrong, *right) == {"norm: wrong values in gradients": 3}


def test_wrong_values_belong_to_the_dtype_that_is_wrong_in_most_cases() -> None:
    pairs = [(technique, workload) for technique in ("fused", "eager") for workload in ("mlp", "cnn", "norm")]
    wrong = [failing(view("out"), *pair, dtype="bfloat16") for pair in pairs]
    assert titles(*wrong, *(passing(*pair) for pair in pairs)) == {"bfloat16: wrong values in outputs": 6}


def test_two_techniques_that_are_wrong_are_two_causes() -> None:
    names = ("mlp", "cnn", "norm")
    wrong = [failing(view("out"), technique, workload) for technique in ("fused", "static") for workload in names]
    right = [passing(f"t{i}", workload) for i in range(9) for workload in names]
    assert titles(*wrong, *right) == {"fused: wrong values in outputs": 3, "static: wrong values in outputs": 3}


def test_a_buffer_names_its_cause_unless_outputs_are_wrong_too() -> None:
    buffer = view("buffer:stem.bn.running_var")
    assert titles(failing(buffer), failing(buffer, workload="cnn")) == {"running_var: wrong values": 2}
    both = titles(failing(f"{buffer}\n{view('grad:head.weight')}"))
    assert both == {"running_var: wrong values": 1, "mlp: wrong values in gradients": 1}
    assert titles(failing(f"{buffer}\n{view('out')}")) == {"mlp: wrong values in outputs, running_var": 1}


@pytest.mark.parametrize(
    ("line", "kind", "title"),
    [
        ("out: NaN pattern, 3 elements differ, first at [0, 1] [nan[0]]: expected 3 of them, got 0", "wrong values", "mlp: wrong NaN or infinity in outputs"),
        ("out: view scale gain: expected at most 1.788e-07, got 8.000e+00", "wrong values", "mlp: random numbers are wrong in outputs"),
        ("buffer:bn.num_batches_tracked: value: expected 1, got 2", "wrong values", "num_batches_tracked: wrong values"),
        ("loss[0:4]: mean loss of the training: expected at most 1e-3, got 2", "wrong values", "mlp: wrong values in losses"),
        ("out: dtype: expected float32, got float64", "wrong metadata", "wrong dtype of outputs"),
        ("grad:fc1.weight: missing: expected a tensor, got nothing", "wrong metadata", "missing: gradients"),
        ("input[0]: mutated: expected it bitwise unchanged", "changed state", "an input is overwritten"),
        ("default dtype: left changed: expected float32, got float64", "changed state", "global state is left changed: default dtype"),
        ("out: rerun: expected the same bits, got 1e-07 relative difference", "not reproducible", "a second run gives other bits"),
        ("regression: expected at most 1.1 times the baseline's time beside FP32 eager, got 1.5", "regression", "slower than the baseline"),
        ("regression: expected a peak of at most 10 bytes, got 20", "regression", "more memory than the baseline"),
        ("limit: expected memory at most 1.5, got 1.8 (the budget of the board)", "limit", "beyond a limit: the budget of the board"),
        ("not engaged: no operator left xla for the CPU [draw 2]: observed aten::exp2 x3", "missing operator", "aten::exp2: no kernel, runs on the CPU"),
        ("not engaged: compiled regions entered >= 1: observed 0", "no evidence", "not seen: compiled regions entered >= 1"),
        ("run: raised [draw 3]: expected a result, got RuntimeError: CUDA error: misaligned address", "exception", "CUDA error: misaligned address"),
        ("ledger: expected at most 5 times the budget, got 9 (batch norm (in training) is biased): out: view row: expected at most 1, got 9", "ledger", "more than the ledger expects: batch norm (in training) is biased"),
    ],
)  # fmt: skip
def test_each_kind_of_fault_has_its_cause(line: str, kind: str, title: str) -> None:
    grown = line.startswith("ledger")
    reason = f"{line.partition('): ')[2]}\n{line}" if grown else line
    assert sized(causes([run(failing(reason))])) == {title: (kind, 1)}


def test_a_case_that_shows_two_causes_stands_under_both_and_counts_once() -> None:
    reason = f"not engaged: no operator left xla for the CPU: observed aten::exp2 x3\n{view('out')}"
    found = causes([run(failing(reason))])
    assert {cause.kind for cause in found} == {Kind.OPERATOR, Kind.VALUES}
    assert counted(found) == "1 case, 2 causes"


def test_observations_that_are_missing_together_are_one_cause() -> None:
    both = "not engaged: graphs made = 1: observed 0\nnot engaged: bytes of the saved program > 31784: observed 2"
    assert titles(failing(both), failing(both.partition("\n")[0], "fused")) == {"not seen: graphs made = 1": 2}


# What a cause says


def test_the_example_is_the_simplest_case_and_its_command_runs_it() -> None:
    reason = "RuntimeError: CUDA error: misaligned address"
    found = causes(
        [
            run(
                record("a", reason=reason, mode=Mode.TRAIN),
                record("b", reason=reason, level=2),
                record("c", reason=f"{reason}\n(3 more lines)"),
                record("d", reason=reason),
            )
        ]
    )
    assert found[0].example.case.technique == "d"
    assert (
        found[0].reproduction
        == "pytest --pyargs accelcheck.suite --accel-device=cpu --accel-case=d/mlp/cpu/float32/forward"
    )


def test_the_same_cause_on_two_devices_is_one() -> None:
    reason = "NotImplementedError: Could not run 'aten::exp2' with arguments from the '{}' backend."
    (found,) = causes(
        [
            run(record(reason=reason.format(key)), device=device)
            for device, key in (("npu", "PrivateUse1"), ("xla", "XLA"))
        ]
    )
    assert [label for label, _ in found.cases] == ["npu", "xla"]


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
            found = signatures(record(verdict=verdict, reason=text, traceback=text))
            assert found
            assert all(len(signature.title) <= 200 for signature in found)
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
    "RuntimeError: Cannot insert a Tensor that requires grad as a constant. Consider making it a parameter or input, or detaching the gradient": ("exception", 2),
    "aten::native_layer_norm_backward: no kernel, runs on the CPU": ("missing operator", 2),
    "dropout: random numbers are wrong in gradients, outputs": ("wrong values", 2),
    "reductions: wrong values in outputs": ("wrong values", 2),
    "aten::exp2: no kernel, runs on the CPU": ("missing operator", 1),
    "policy-fp16: wrong values in gradients": ("wrong values", 1),
}  # fmt: skip
