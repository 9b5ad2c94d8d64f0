"""The table of operators and techniques says of each operator what journals say."""

from __future__ import annotations

import json
from typing import Any

import operator_table as table
import pytest

from accelcheck.core.case import Case, Evidence, Mode, Verdict
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.core.journal import Record
from accelcheck.techniques.matrix import Matrix
from accelcheck.workloads.torch_operators import FILE

NAME = "ops-pooling-1"
AVERAGE, LARGEST = "nn.functional.adaptive_avg_pool1d", "nn.functional.max_pool1d"


@pytest.fixture(scope="module")
def workloads() -> Any:
    return Matrix.load().workloads


def record(verdict: Verdict, mode: Mode = Mode.FORWARD, **fields: Any) -> Record:
    return Record(Case("export", NAME, "cpu", "float32", mode, 3), verdict, **fields)


def fault(path: str) -> Fault:
    return Fault(FaultKind.VALUE, path, "", expected="1", got="2")


def cells(workloads: Any, *records: Record) -> Any:
    return table.cells(records, workloads)["export"]


def test_operators_of_a_case_that_passes_are_right(workloads: Any) -> None:
    tried, wrong, refused, _ = cells(workloads, record(Verdict.PASS))
    assert {AVERAGE, LARGEST} <= tried
    assert not wrong
    assert not refused


def test_a_wrong_result_and_a_wrong_gradient_name_their_operator(workloads: Any) -> None:
    (first, *_) = workloads[NAME].problem(1).module.calls
    faults = (fault(f"out['{LARGEST} float32 3'][0]"),)
    gradients = (fault("grad:input[1]"),)
    _, wrong, *_ = cells(
        workloads, record(Verdict.XFAIL, faults=faults), record(Verdict.FAIL, Mode.BACKWARD, faults=gradients)
    )
    assert wrong.keys() == {LARGEST, first.label.split()[0]}
    assert wrong[LARGEST].startswith(f"forward: out['{LARGEST}")


def test_refused_parts_and_cases_that_do_not_run_have_their_reasons(workloads: Any) -> None:
    refused = cells(workloads, record(Verdict.PASS, refused={f"{LARGEST} float32 3": "no kernel"})).refused
    assert refused == {LARGEST: "no kernel"}
    tried, _, refused, _ = cells(workloads, record(Verdict.ERROR, reason="no graph"))
    assert refused == dict.fromkeys(tried, "no graph")


def test_an_operator_that_raised_is_refused_and_not_wrong(workloads: Any) -> None:
    raised = Fault(FaultKind.RAISED, f"out['{LARGEST} float32 3']", "RuntimeError", got="no kernel")
    column = cells(workloads, record(Verdict.FAIL, faults=(raised,), refused={f"{LARGEST} float32 3": "no kernel"}))
    assert column.refused == {LARGEST: "no kernel"}
    assert not column.wrong


def test_an_operator_whose_kernel_ran_on_the_cpu_is_elsewhere(workloads: Any) -> None:
    claim, strays = "no operator left acme for the CPU", (("aten::_adaptive_avg_pool2d", 2),)
    gone = Evidence(claim, "aten::_adaptive_avg_pool2d x2", engaged=False, strays=strays)
    column = cells(workloads, record(Verdict.FAIL, evidence=(gone,)))
    assert column.elsewhere[AVERAGE] == "aten::_adaptive_avg_pool2d"
    assert LARGEST not in column.elsewhere
    (counts,) = table.stored({"eager": column}, {})["techniques"].values()
    assert counts["right"] == counts["tried"] - len(counts["elsewhere"])


def test_every_operator_is_accounted_for(workloads: Any) -> None:
    operators = json.loads(FILE.read_text(encoding="utf-8"))
    stored = table.stored(table.cells([record(Verdict.PASS)], workloads), operators)
    (column,) = stored["techniques"].values()
    assert column["tried"] + len(stored["not tried"]) == stored["operators"] == len(operators)
    assert all(stored["not tried"].values())
