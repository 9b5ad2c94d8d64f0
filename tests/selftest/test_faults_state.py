"""Faults of state, time, training, collectives, quantization, and cheats that the self-test does not show."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from technique_harness import mlp

from accelcheck.core.case import Mode
from accelcheck.devices import devices
from accelcheck.selftest.faults import asynchrony, cheats, parallel, quantized, random, ranks, staleness, training
from accelcheck.selftest.faults.base import PlantedFault, Variant
from accelcheck.selftest.faults.quantized import Int8Linear, PairSaturation
from accelcheck.techniques.base import Technique
from accelcheck.techniques.matrix import Matrix
from accelcheck.workloads.base import Program

MODULES = (asynchrony, cheats, parallel, quantized, random, ranks, staleness, training)
FAULTS: tuple[PlantedFault, ...] = tuple(fault for module in MODULES for fault in module.FAULTS)
VARIANTS: tuple[Variant, ...] = tuple(variant for module in MODULES for variant in getattr(module, "VARIANTS", ()))


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return Matrix.load()


def test_every_number_of_state_and_time_is_there() -> None:
    expected = {23, 24, 25, 26, 27, 28, 29, 30, 32, 33, 34, 35, 36, 37, 39, 40, 41}
    assert {fault.number for fault in FAULTS} - {0} == expected


def test_every_plant_has_a_cell_that_its_technique_accepts(matrix: Matrix) -> None:
    plants: list[PlantedFault | Variant] = [*FAULTS, *VARIANTS]
    for plant in plants:
        technique = plant.technique if isinstance(plant.technique, Technique) else matrix.techniques[plant.technique]
        for cell in plant.cells:
            workload = matrix.workloads[cell.workload]
            assert technique.accepts(workload), (plant.name, cell)
            assert cell.mode in technique.modes & workload.modes, (plant.name, cell)
            assert set(cell.dtypes) <= workload.dtypes, (plant.name, cell)


def test_nothing_falls_back_on_the_cpu_and_streams_are_cudas() -> None:
    exists = {fault.name: fault.exists for fault in asynchrony.FAULTS}
    known = devices()
    result = {name: {place: exists[name](known[place]).ok for place in ("cpu", "cuda", "xla")} for name in exists}
    assert result["operator-on-the-cpu"] == {"cpu": False, "cuda": True, "xla": True}
    assert result["stream-race"] == {"cpu": False, "cuda": True, "xla": False}
    assert result["race-at-border"] == {"cpu": True, "cuda": True, "xla": True}


def test_the_border_is_read_before_the_last_share_is_written() -> None:
    program = Program.of(mlp())
    expected = program.run(Mode.FORWARD)["out"]
    asynchrony.raced(0.25)(program)
    first, second = (program.run(Mode.FORWARD)["out"].flatten() for _ in range(2))
    assert torch.equal(first[:24], expected.flatten()[:24])
    assert not first[24:].any()
    assert torch.equal(second, expected.flatten())  # the buffer holds the same numbers from the run before


def test_two_products_of_127_by_255_saturate_and_of_7_bits_do_not() -> None:
    linear = torch.nn.Linear(2, 1, bias=False)
    layers = [kind(linear, None, 0, 255, None) for kind in (Int8Linear, PairSaturation)]
    weight = torch.full((1, 2), 127.0)
    zero = torch.zeros(())
    full, narrow = torch.full((1, 2), 255.0), torch.full((1, 2), 127.0)
    assert [float(layer.product(full, zero, weight).detach()) for layer in layers] == [64770.0, 32767.0]
    assert [float(layer.product(narrow, zero, weight).detach()) for layer in layers] == [32258.0, 32258.0]


def test_the_counter_based_generator_is_splitmix64_and_uniform() -> None:
    # First outputs for seed 1234567, of the reference implementation (prng.di.unimi.it/splitmix64.c), 24 bits of each.
    expected = [6457827717110365317 >> 40, 3203168211198807973 >> 40]
    assert (random.splitmix(2, 1234567) * 2**24).long().tolist() == expected
    drawn = random.splitmix(100_000, 7)
    assert abs(float(drawn.mean()) - 0.5) < 4 / (12 * 100_000) ** 0.5
    counts = Counter((drawn * 10).long().tolist())
    assert max(abs(count - 10_000) for count in counts.values()) < 4 * 9_000**0.5


def test_a_frozen_parameter_has_the_old_value_and_its_own_gradient() -> None:
    parameter = torch.nn.Parameter(torch.tensor([2.0]))
    old = torch.tensor([3.0])
    out = staleness.StaleParameter.apply(parameter, old) * 5  # type: ignore[no-untyped-call]  # untyped in torch
    out.backward()
    assert (float(out.detach()), float(parameter.grad)) == (15.0, 5.0)  # type: ignore[arg-type]  # it has one


def test_a_column_reader_with_the_right_length_reads_the_matrix() -> None:
    x = torch.arange(12.0).view(4, 3)
    assert torch.equal(staleness.read_with(x, 4), x)
    assert not torch.equal(staleness.read_with(x, 5), x)
