"""examples/models: each owner's model gets a full answer; cheap techniques are right."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_harness import BACKWARD, FORWARD, TRAIN, verdict_of

from accelcheck.core.case import Mode, Verdict
from accelcheck.core.journal import ErrorCode
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify.oracle import Store
from accelcheck.workloads.own_file import workloads_of

FOLDER = Path(__file__).parents[2] / "examples" / "models"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
FAST = ("graph", "recommender")
NO_AUTOCAST = "graph"
"""Model whose own code adds numbers of two dtypes under autocast."""
MOST_LINES = 80


def judged(name: str, technique: str, mode: Mode, store: Store) -> None:
    if "transformers" in (FOLDER / f"{name}.py").read_text(encoding="utf-8"):
        pytest.importorskip("transformers")
    (own,) = workloads_of(f"{name}.py", FOLDER)
    if mode not in own.modes:
        assert (name, mode) == ("detector", TRAIN)
        return
    chosen = Matrix.load().techniques[technique]
    if refusal := chosen.refusal(own):
        assert "needs blocks" in refusal
        return
    record = verdict_of(store, chosen, own, mode)
    if technique == "amp-bf16" and name == NO_AUTOCAST:
        assert f"(in forward, {name}.py, line" in record.headline
    elif record.code == ErrorCode.UNDECIDED:
        assert (name, technique) == ("detector", "amp-bf16")
        assert "rounding decides how large a result is" in record.why
    else:
        assert record.verdict is Verdict.PASS, f"{record.why}\n{record.traceback}"


@pytest.mark.parametrize("name", FAST)
def test_a_small_model_is_judged(name: str, store: Store) -> None:
    judged(name, "eager", FORWARD, store)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("technique", ["eager", "amp-bf16", "checkpoint-non-reentrant"])
def test_every_model_is_judged(name: str, technique: str, store: Store) -> None:
    modes = (BACKWARD,) if technique.startswith("checkpoint") else (FORWARD, BACKWARD, TRAIN)
    for mode in modes:
        judged(name, technique, mode, store)


def test_models_are_short_and_complete() -> None:
    assert len(NAMES) == 12
    for name in NAMES:
        text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
        assert len(text.splitlines()) <= MOST_LINES, name
        assert "def make(" in text
        assert "accelcheck" not in text.partition('"""\n')[2], f"{name}: an owner's model knows nothing of accelcheck"
