"""Errors are held against those of correct results at the same place."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from fault_harness import BACKWARD, FORWARD, Planted, case, seeded, verdict_of
from torch import Tensor

from accelcheck.core.case import Mode, Verdict
from accelcheck.selftest.faults import partial
from accelcheck.selftest.faults.base import Cell, PlantedFault
from accelcheck.selftest.faults.plant import nothing
from accelcheck.verify import own
from accelcheck.verify.oracle import Store
from accelcheck.verify.precision import UNIT_ROUNDOFF
from accelcheck.verify.reference import Reference
from accelcheck.verify.views import VIEWS, Yardstick

FAULTS = [(fault, cell) for fault in partial.FAULTS if fault.name.startswith("small-") for cell in fault.cells]


@pytest.mark.parametrize(("fault", "cell"), FAULTS, ids=lambda value: getattr(value, "name", ""))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_small_and_wrong_values_fail_in_every_dtype(fault: PlantedFault, cell: Cell, dtype: str, store: Store) -> None:
    workload = seeded(cell.workload)
    assert verdict_of(store, Planted(nothing), workload, cell.mode, dtype=dtype).verdict is Verdict.PASS
    for strength in fault.strengths:
        record = verdict_of(store, Planted(fault.plant(strength)), workload, cell.mode, dtype=dtype)
        assert record.verdict is Verdict.FAIL, strength


def errors(*rows: float, count: int = 64) -> own.Errors:
    """Errors of a matrix of so many columns, each row of a constant size."""
    sizes = torch.tensor(rows, dtype=torch.float64)[:, None].expand(-1, count)
    stick = Yardstick(torch.ones(len(rows), count, dtype=torch.float64), UNIT_ROUNDOFF["bfloat16"])
    deviations = stick.read(1.0 + sizes).errors
    assert deviations is not None
    return deviations


def noise(*samples: own.Errors, rows: int) -> own.Noise | None:
    sizes = Yardstick(torch.ones(rows, 64, dtype=torch.float64), UNIT_ROUNDOFF["bfloat16"]).sizes
    return own.noise(samples, sizes, UNIT_ROUNDOFF["bfloat16"], 0.0)


def test_a_row_is_held_against_its_own_errors() -> None:
    samples = [errors(1e-2, 1e-4) for _ in range(6)]
    known = noise(*samples, rows=2)
    assert known is not None
    assert own.figures(errors(1e-2, 1e-4), known)["channel"][0] < 1.1
    measured, allowed = own.figures(errors(1e-2, 1e-2), known)["channel"]
    assert measured > 1.5 * own.figures(errors(1e-2, 1e-4), known)["channel"][0]
    assert allowed == pytest.approx(2.0, rel=0.1)


def test_too_few_samples_say_nothing() -> None:
    assert noise(*(errors(1e-2, 1e-2) for _ in range(own.PEERS - 1)), rows=2) is None


def test_a_sample_is_read_at_a_lower_rank_than_a_result() -> None:
    known = noise(*(errors(1e-2, 1e-2) for _ in range(6)), rows=2)
    assert known is not None
    spread = errors(1e-2, 1e-2)
    few = own.Errors(spread.rows, spread.columns, spread.elements.copy())
    few.elements[: own.SAMPLES_FAINT] = 1.0
    assert known.read(few)["faint"] < 2.0 < known.read(few, own.SAMPLES_FAINT)["faint"]


@pytest.mark.parametrize("mode", [FORWARD, BACKWARD])
def test_noise_is_kept_with_its_reference(mode: Mode, store: Store) -> None:
    workload = seeded("mlp")
    reference = store.get(case(workload, mode), Planted(nothing), workload)
    again = Reference.from_plain(reference.plain())
    assert reference.noise.keys() == again.noise.keys() != set()
    for path, known in reference.noise.items():
        assert again.noise[path].budgets == known.budgets
    assert not set(own.OWN) & set(VIEWS)


def test_subnormal_errors_are_no_zeros() -> None:
    tiny: Tensor = torch.full((16, 16), 1e-40, dtype=torch.float64)
    stick = Yardstick(tiny, UNIT_ROUNDOFF["float32"], 2.0**-149)
    deviations = stick.read(tiny + 1e-42).errors
    assert deviations is not None
    assert all(float(norms.min()) > 0.0 for norms in itertools.chain(deviations.places()))


def test_sizes_beyond_fp32_make_no_nan() -> None:
    size = np.full(16, 1e80)
    errors = own.Errors.of(size, size, np.full(80, 1e40))
    assert all(np.isfinite(norms).all() for norms in errors.places())
