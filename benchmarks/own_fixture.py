"""Measures the cost of the fixture `accel` beside running reference and candidate by hand.

    $ python benchmarks/own_fixture.py

By hand, for the same draws of parameters and inputs: the FP64 oracle with its rounding samples and eager, which give
the budgets; the technique's result; and `torch.testing.assert_close` of each tensor with the oracle's. The fixture also
inspects the model, runs in its own process, checks for mutation and leaked state, runs again, and judges every view.
Both are timed in turns; the median ratio may be 1.05. The fixture's fixed cost, some 0.4 s, weighs more in a smaller
check: ``--length=64``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelcheck.core.case import Case, Mode
from accelcheck.devices.cpu import Cpu
from accelcheck.techniques.precision.amp import TECHNIQUES
from accelcheck.verify.oracle import compute
from accelcheck.verify.oracle_runs import Arithmetic, Source
from accelcheck.workloads.base import Program
from accelcheck.workloads.own_model import workload_of
from accelcheck.workloads.probes import DRAWS, Draw

LIMIT = 1.05
"""The most that the fixture may take, as a multiple of the time by hand."""
TOLERANCE = 0.1
"""Tolerance of `assert_close`, relative to the largest element: errors of single gradients in bfloat16."""
WIDTH, SEQUENCES, LENGTH = 384, 4, 256

TEST = """
import json, pathlib, sys, time
sys.path.insert(0, {folder!r})
import own_fixture

def test_it(accel):
    model, inputs = own_fixture.made({length})
    turns = []
    for _ in range({turns}):
        start = time.perf_counter()
        own_fixture.by_hand(model, inputs)
        middle = time.perf_counter()
        accel.check(model, inputs, techniques=["amp-bf16"])
        turns.append((middle - start, time.perf_counter() - middle))
    pathlib.Path(__file__).with_name("turns.json").write_text(json.dumps(turns))
"""


def made(length: int = LENGTH) -> tuple[nn.Module, tuple[Any, ...]]:
    """A transformer encoder with some two million parameters, and inputs ``(SEQUENCES, length, WIDTH)``."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 6, 2 * WIDTH, dropout=0.0, activation="gelu", batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return model, (torch.randn(SEQUENCES, length, WIDTH),)


def by_hand(model: nn.Module, inputs: tuple[Any, ...]) -> int:
    """References and candidates of all draws, forward and backward; the number of tensors that were compared."""
    workload = workload_of(model, inputs, name="hand")
    technique = next(candidate for candidate in TECHNIQUES if candidate.name == "amp-bf16")
    device, compared = Cpu(), 0
    for mode in (Mode.FORWARD, Mode.BACKWARD):
        case = Case("amp-bf16", "hand", "cpu", "float32", mode, 1)
        for number in range(DRAWS):
            draw = Draw(number)
            reference = compute(Source(workload, Arithmetic.of(technique, "float32"), case.seed, "float32", mode, draw))
            program = Program.of(draw.problem(workload, case.seed, "float32"), seed=draw.seed(case.seed))
            technique.prepare(program, mode, device)
            result = program.run(mode)
            technique.finish()
            for path, tensor in result.items():
                truth = reference.truth[path].double()
                torch.testing.assert_close(tensor.double(), truth, rtol=0.0, atol=TOLERANCE * float(truth.abs().max()))
                compared += 1
    return compared


def main() -> int:
    """Time both in turns, print the figures, and exit with 1 beyond `LIMIT`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="number of pairs (default: 3)")
    parser.add_argument("--length", type=int, default=LENGTH, help=f"positions of a sequence (default: {LENGTH})")
    given = parser.parse_args()
    import pytest

    with tempfile.TemporaryDirectory(prefix="own-fixture-") as name:
        path = Path(name) / "test_cost.py"
        path.write_text(
            TEST.format(folder=str(Path(__file__).parent), turns=given.turns + 1, length=given.length), encoding="utf-8"
        )
        words = [
            "-q",
            "--accel-effort=full",
            "-p",
            "no:randomly",
            "-p",
            "no:cacheprovider",
            f"--rootdir={name}",
            str(path),
        ]
        if code := pytest.main(words):
            return int(code)
        _, *turns = json.loads(path.with_name("turns.json").read_text(encoding="utf-8"))  # the first one imports
    for hand, fixture in turns:
        print(f"by hand {hand:.2f} s, fixture {fixture:.2f} s: {fixture / hand:.3f}")
    ratios = [fixture / hand for hand, fixture in turns]
    ratio = statistics.median(ratios)
    print(f"median {ratio:.3f}, limit {LIMIT:g}")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
