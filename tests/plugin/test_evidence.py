"""Evidence of any type, even one that raises when it is shown, ends no case and no run."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from plugin_harness import CONFTEST, Suite, only

from accelcheck.core.case import Case, Evidence, Figure, Measurement, Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.core.plain import MOST_TEXT

TALKERS = """
import torch
from accelcheck.api import Code, Evidence, Unsupported, unsupported

class Mute:
    def __str__(self):
        raise RuntimeError("no words")
    __repr__ = __str__

class Wordless(Exception):
    __str__ = Mute.__str__

SAID = {
    "dtype": torch.bfloat16, "tensor": torch.ones(2, 3), "scalar": torch.tensor(3), "mute": Mute(), "none": None,
    "huge-text": "x" * 10_000_000, "huge-number": 10**9999, "not-finite": float("nan"), "mapping": {1: {2}},
    "surrogate": chr(0xD800), "lines": chr(10) * 10_000, "complex": 1j,
}

def pytest_accel_techniques(told=SAID):
    import plugin_harness as harness

    class Talker(harness.Toy):
        def evidence(self, program, log, mode, device):
            yield from super().evidence(program, log, mode, device)
            word = self.name.removeprefix("says-")
            if word == "unsupported":
                raise Unsupported(unsupported(Code.NO_FEATURE, Mute()))
            if word == "wordless":
                raise Wordless
            if word == "surrogate-error":
                raise ValueError(chr(0xDCFF))
            if word == "undecided":
                yield Evidence("something", 1, engaged=torch.ones(2))
            yield Evidence(told.get(word, 1), told.get(word, 1), engaged=torch.tensor(True))

    return [Talker(f"says-{word}") for word in (*told, "unsupported", "wordless", "surrogate-error", "undecided")] + [
        harness.Toy("toy-last")
    ]

def pytest_accel_workloads():
    import plugin_harness
    return plugin_harness.workloads()
"""


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_evidence_of_any_type_ends_no_run(workers: str, suite: Suite) -> None:
    imports = "\n".join(CONFTEST.splitlines()[:3])
    suite.pytester.makeconftest(imports + TALKERS)
    ran = suite.run_apart(*only("says-*", "toy-last"), "-n", workers, "-rs", "--junit-xml=junit.xml")
    assert "INTERNALERROR" not in ran.out + ran.err, ran.out
    verdicts = {name.split("/")[0].removeprefix("says-"): verdict for name, verdict in ran.verdicts.items()}
    errors = {word: verdicts.pop(word) for word in ("wordless", "surrogate-error", "undecided")}
    assert errors == dict.fromkeys(errors, "error")
    assert verdicts.pop("unsupported") == "unsupported"
    assert verdicts == dict.fromkeys(verdicts, "pass")
    assert len(verdicts) == 13
    assert ran.record("says-wordless").reason == "Wordless: (no text: RuntimeError)"
    assert ran.record("says-surrogate-error").reason == "ValueError: \\udcff"
    assert "engaged: expected True or False, got Tensor" in ran.record("says-undecided").reason
    assert "(no text: RuntimeError)" in ran.record("says-unsupported").reason
    observed = {word: ran.record(f"says-{word}").evidence[1].observed for word in verdicts if word != "toy-last"}
    assert (observed["dtype"], observed["scalar"], observed["none"]) == ("torch.bfloat16", 3, "None")
    assert observed["mute"] == "(no text: RuntimeError)"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (3, 3),
        (True, True),
        (2.5, 2.5),
        (math.inf, math.inf),
        ("text", "text"),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (torch.tensor(3), 3),
        (torch.tensor([2.0]), "tensor([2.])"),
        (Mode.FORWARD, "forward"),
        (Verdict, "<enum 'Verdict'>"),
        (2**63, "9223372036854775808"),
        (10**9999, "(no text: ValueError)"),
        ("\ud800", "\\ud800"),
        (b"\xff", "b'\\xff'"),
        ("a\x00b\x1b[31m", "a\\x00b\\x1b[31m"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_observation_becomes_a_number_or_a_text(given: Any, kept: Any) -> None:
    result = Evidence("claim", given, engaged=True)
    assert (type(result.observed), result.observed) == (type(kept), kept)
    case = Case("a", "b", "cpu", "float32", Mode.FORWARD, 1)
    record = Record(case, Verdict.PASS, evidence=(result,))
    assert Record.from_json(json.loads(json.dumps(record.as_json()))) == record


def test_a_long_text_is_cut() -> None:
    result = Evidence("x" * 10**6, "y" * 10**6, engaged=True)
    assert len(result.claim) < MOST_TEXT + 50
    assert str(result.observed).endswith(f"({10**6 - MOST_TEXT} more characters)")


@pytest.mark.parametrize("engaged", ["no", torch.ones(2), object.__new__(type("Odd", (), {"__bool__": lambda _: 3}))])
def test_what_is_neither_true_nor_false_is_refused(engaged: Any) -> None:
    with pytest.raises(TypeError, match=r"Evidence\.engaged: expected True or False"):
        Evidence("claim", 1, engaged=engaged)


@pytest.mark.parametrize("engaged", [np.bool_(True), torch.tensor(True), 2, [0]])
def test_what_python_calls_true_is_true(engaged: Any) -> None:
    assert Evidence("claim", 1, engaged=engaged).engaged is True


def test_figures_and_measurements_hold_plain_numbers() -> None:
    case = Case("a", "b", "cpu", "float32", Mode.FORWARD, 1)
    figure = Figure("out", "row", torch.tensor(0.5), np.float64(1.0), "", gates=np.True_)  # type: ignore[arg-type]
    measurement = Measurement("latency", torch.tensor(0.5), "s", low=np.float32(0.25))  # type: ignore[arg-type]
    record = Record(case, Verdict.PASS, figures=(figure,), measurements=(measurement,))
    assert Record.from_json(json.loads(json.dumps(record.as_json()))) == record
    assert figure.within
