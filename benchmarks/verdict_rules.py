"""Measures how often decision rules, accelcheck's and other projects', catch a fault and fail a correct kernel.

    python benchmarks/verdict_rules.py --json baselines/cpu/verdict_rules.json
    python benchmarks/verdict_rules.py --faults all --seeds 3

Plants faults and correct kernels of `accelcheck.selftest.faults` in eager and int8 programs on the CPU and prints a
Markdown table. A trial is one plant in one workload and storage dtype with the parameters and inputs of one seed. Every
rule of other projects judges the output of the case's own random inputs, by the reference that its authors use:

- eager in the storage dtype for `assert_close`, KernelBench, BackendBench, aiter and dynamo;
- a wider computation from the same rounded parameters and inputs (FP32 for half precision, FP64 for FP32) for
  FlashAttention's rule, rows and columns, SQNR and cosine.

dynamo's `same` is that of the installed torch, with the options of its benchmarks: a tolerance of 1e-4 for FP32 and
bfloat16 and 1e-3 for float16 (torchbench), of 1e-3 (huggingface and timm, inference), and `--cosine`, which replaces
both the tolerance and the comparison with FP64.

accelcheck's verdict is that of a suite run: further random inputs, structured inputs (probes), a rerun, mutations and
evidence included. The line "first draw alone" judges exactly the tensors that the other rules get. The int8 kernel is
correct by its own scheme, which only accelcheck's oracle emulates; so the last column leaves it out. Cells that the
catalogue declares hidden have their own column: no rule that passes correct kernels can tell these faults from
rounding.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.utils import same

from accelcheck.checks.trial import State, Trial, warm_up
from accelcheck.core.case import Case, Mode, Verdict
from accelcheck.devices import devices
from accelcheck.selftest import runner
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify.judge import Contract, check_metadata, judge
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Program, to

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from accelcheck.checks.execute import Bench
    from accelcheck.selftest.runner import PlantedRow
    from accelcheck.workloads.base import Result

FAULTS = frozenset(
    {
        ("causal-leak", 1.0, "attention-65"),
        ("mask-off-by-one", 1.0, "attention-causal"),
        ("length-off-by-one", 1.0, "attention-ragged"),
        ("causal-from-bottom-right", 1.0, "attention-cross-causal"),
        ("masked-row-mean", 1.0, "attention-empty-row"),
        ("softmax-scale", 0.01, "attention-causal"),
        ("stale-last-row", 1.0, "matmul-129"),
        ("last-k-dropped", 1.0, "matmul"),
        ("float16-accumulation", 1.0, "matmul-long"),
        ("bfloat16-accumulation", 1.0, "matmul-long"),
        ("tf32-for-float32", 1.0, "matmul"),
        ("tf32-convolution", 1.0, "conv-strided"),
        ("truncated-products", 1.0, "matmul"),
        ("truncated-elementwise", 1.0, "elementwise-product"),
        ("norm-over-n-minus-1", 1.0, "layer-norm-narrow"),
        ("tanh-gelu", 1.0, "gelu"),
        ("conv-bias-dropped", 1.0, "conv-strided"),
        ("padding-of-zeros", 1.0, "conv-replicated"),
        ("gain", 0.01, "mlp"),
    }
)
"""19 faults by name, strength and workload, in every dtype of the catalogue. All but the cells declared hidden, which
have their own column, change the output of random inputs, so that rules are compared and not inputs."""
INT8 = "correct-int8-anywhere-7"
CORRECT = frozenset(
    {
        (INT8, 1.0, "mlp"),
        ("sum-backwards", 1.0, "matmul"),
        ("sum-matrix-unit", 1.0, "matmul"),
        ("attention-online-16", 1.0, "attention-65"),
        ("sum-split-k", 1.0, "matmul"),
    }
)
"""Five correct kernels: int8, other order of summation, half precision accumulated in FP32, online softmax, split K."""
OURS, FIRST_DRAW = "**accelcheck**", "accelcheck, first draw alone"


@dataclass(frozen=True)
class Output:
    """One tensor of an output, and what rules compare it with.

    Attributes:
        got: Candidate's tensor.
        eager: Eager's, in the storage dtype.
        wide: Eager's in FP32 for half precision, in FP64 for FP32.
        exact: Eager's in FP64.
    """

    got: Tensor
    eager: Tensor
    wide: Tensor
    exact: Tensor


@dataclass(frozen=True)
class Trialled:
    """Outcome of one trial: the rules that failed it, and the engine's verdict."""

    row: PlantedRow
    seed: int
    failing: frozenset[str]
    verdict: Verdict
    reason: str
    unchanged: bool


def close(x: Output, fp32: float, half: float, *, equal_nan: bool = False) -> bool:
    """`torch.allclose` to eager, with equal rtol and atol."""
    limit = fp32 if x.eager.dtype == torch.float32 else half
    return torch.allclose(x.got.float(), x.eager.float(), rtol=limit, atol=limit, equal_nan=equal_nan)


def assert_close(x: Output) -> bool:
    """Defaults of `torch.testing`."""
    try:
        torch.testing.assert_close(x.got, x.eager)
    except AssertionError:
        return False
    return True


def flash_attention(x: Output) -> bool:
    """``max|out - ref| <= 2 max|eager - ref|``."""
    return bool(_far(x.got, x.wide).max() <= 2 * _far(x.eager, x.wide).max())


def rows_and_columns(x: Output) -> bool:
    """Worst row and worst column by relative Frobenius norm, each at most twice eager's."""
    reference = x.wide.double().reshape(-1, x.wide.shape[-1] if x.wide.dim() else 1)

    def worst(tensor: Tensor, dim: int) -> Tensor:
        error = (tensor.double().reshape(reference.shape) - reference).norm(dim=dim)
        return torch.where(error == 0, error, error / reference.norm(dim=dim)).max()

    return all(bool(worst(x.got, dim) <= 2 * worst(x.eager, dim)) for dim in (0, 1))


def few_mismatches(x: Output) -> bool:
    """At most 5 % of the elements beyond rtol 1e-2 and atol 1e-2."""
    near = torch.isclose(x.got.float(), x.eager.float(), rtol=1e-2, atol=1e-2)
    return float((~near).float().mean()) <= 0.05


def sqnr(x: Output) -> bool:
    """``20 log10(|ref| / |ref - out|) >= 25 dB``."""
    noise, signal = _far(x.got, x.wide).norm(), x.wide.double().norm()
    return bool(20 * torch.log10(signal / noise) >= 25)


def cosine(x: Output) -> bool:
    """Cosine of the angle to the reference at least 0.99."""
    return bool(torch.cosine_similarity(x.got.double().flatten(), x.wide.double().flatten(), dim=0) >= 0.99)


def dynamo(x: Output, fp32: float, half: float, *, angle: bool = False) -> bool:
    """`same` as `benchmarks/dynamo` calls it: NaN equals NaN unless the run is in FP32."""
    tolerance = half if x.eager.dtype == torch.float16 else fp32
    return bool(
        same(
            x.eager,
            x.got,
            x.exact,
            cos_similarity=angle,
            tol=tolerance,
            equal_nan=x.eager.dtype != torch.float32,
            log_error=lambda *_: None,
        )
    )


def _far(tensor: Tensor, reference: Tensor) -> Tensor:
    return (tensor.double() - reference.double()).abs()


RULES: Mapping[str, Callable[[Output], bool]] = {
    "`torch.testing.assert_close` defaults": assert_close,
    "FlashAttention: max-abs at most 2 x eager's": flash_attention,
    "KernelBench: allclose, 1e-4 FP32, 1e-2 half": lambda x: close(x, 1e-4, 1e-2),
    "BackendBench: allclose, 1e-2, NaN equal": lambda x: close(x, 1e-2, 1e-2, equal_nan=True),
    "worst row or column at most 2 x eager's": rows_and_columns,
    "dynamo `same()`, tolerance 1e-4, float16 1e-3": lambda x: dynamo(x, 1e-4, 1e-3),
    "dynamo `same()`, tolerance 1e-3": lambda x: dynamo(x, 1e-3, 1e-3),
    "dynamo `same()`, cosine": lambda x: dynamo(x, 1e-4, 1e-3, angle=True),
    "aiter: 5 % of the elements may mismatch": few_mismatches,
    "SQNR at least 25 dB": sqnr,
    "cosine at least 0.99": cosine,
}


def passes(rule: Callable[[Output], bool], outputs: list[Output]) -> bool:
    """Returns True where a rule passes all tensors; it fails those whose shape or device it cannot compare."""
    try:
        return all(rule(output) for output in outputs)
    except (AssertionError, NotImplementedError, RuntimeError):
        return False


def candidate(trial: Trial) -> Result:
    """The result of the case's own draw, warmed up as the engine does."""
    program = trial.program(trial.case.seed)
    state = State(program)
    trial.technique.prepare(program, trial.case.mode, trial.device)
    try:
        warm_up(trial, program)
        state.restore()
        trial.device.seed(trial.case.seed)
        return program.run(trial.case.mode)
    finally:
        trial.technique.finish()


def reference(trial: Trial, wider: torch.dtype | None = None) -> Result:
    """Eager's result: in the storage dtype, or in a wider one from what the storage dtype holds."""
    program: Program = trial.program(trial.case.seed)
    if wider is not None:
        program.module.to(wider)
        program.inputs = tuple(to(value, "cpu", wider) for value in program.inputs)
    trial.device.seed(trial.case.seed)
    return program.run(trial.case.mode)


def attempt(row: PlantedRow, seed: int, bench: Bench) -> Trialled | None:
    """Judge one trial by all rules; None where the plant does not exist on the CPU."""
    outcome = runner.attempt(row, seed, bench)
    if not outcome.ran:
        return None
    matrix, device = bench.matrix, bench.devices["cpu"]
    technique, workload = runner.planted(row, matrix), runner.seeded(matrix.workloads[row.workload], seed)
    case = Case(technique.name, workload.name, device.name, row.dtype, row.mode, 1)
    trial = Trial(case, technique, workload, device, bench.store)
    with device.strict_float32():
        got = candidate(trial)
        eager = reference(trial)
        exact = reference(trial, torch.float64)
        wide = exact if row.dtype == "float32" else reference(trial, torch.float32)
    failing = set()
    if got.keys() == eager.keys() and all(got[path].shape == eager[path].shape for path in eager):
        outputs = [Output(got[path], eager[path], wide[path], exact[path]) for path in eager]
        failing |= {name for name, rule in RULES.items() if not passes(rule, outputs)}
    else:
        failing |= set(RULES)
    if outcome.caught or (row.correct and not outcome.good):
        failing.add(OURS)
    if ours_alone(trial, got):
        failing.add(FIRST_DRAW)
    unchanged = got.keys() == eager.keys() and all(torch.equal(got[path], eager[path]) for path in eager)
    return Trialled(row, seed, frozenset(failing), outcome.verdict, outcome.reason, unchanged)


def ours_alone(trial: Trial, got: Result) -> bool:
    """Returns True where accelcheck judges from these tensors alone that they are wrong."""
    case, technique, device = trial.case, trial.technique, trial.device
    expected = trial.store.get(case, technique, trial.workload)
    dtypes = frozenset({technique.precision(case.dtype)} - {case.dtype})
    contract = Contract(device.type, technique.keeps_strides and "strided" in device.features, dtypes)
    return any(check_metadata(got, expected, contract)) or bool(judge(got, expected).faults)


def group(rows: list[PlantedRow], seed: int, folder: str) -> list[Trialled]:
    """Rows of one workload and dtype with one seed: they share oracles."""
    torch.set_num_threads(1)
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # warns of every small cosine
    bench = runner.bench(devices()["cpu"], Matrix.load(), Store(Path(folder)))
    return [done for row in rows if (done := attempt(row, seed, bench)) is not None]


def chosen(which: str) -> list[PlantedRow]:
    """Rows of the kill table, with hidden ones: the 24 of this page, or all of forward mode in this process."""
    forward = [row for row in runner.rows() if row.mode is Mode.FORWARD and not row.seeds]
    if which == "all":
        return forward
    result = [row for row in forward if (row.plant, row.strength, row.workload) in FAULTS | CORRECT]
    if missing := (FAULTS | CORRECT) - {(row.plant, row.strength, row.workload) for row in result}:
        raise SystemExit(f"the catalogue of faults no longer has {sorted(missing)}: choose others")
    return result


def shares(trials: list[Trialled]) -> list[dict[str, Any]]:
    """Shares of trials that each rule fails: most faults caught first, then fewest correct kernels failed."""
    faulty = [trial for trial in trials if not trial.row.correct]
    faults = [trial for trial in faulty if not trial.row.hidden]
    correct = [trial for trial in trials if trial.row.correct]
    no_int8 = [trial for trial in correct if "int8" not in trial.row.plant]

    def share(name: str, among: list[Trialled]) -> float:
        return sum(name in trial.failing for trial in among) / max(1, len(among))

    rates = [
        {
            "rule": name,
            "caught": share(name, faults),
            "caught-with-hidden": share(name, faulty),
            "failed": share(name, correct),
            "failed-without-int8": share(name, no_int8),
        }
        for name in (OURS, FIRST_DRAW, *RULES)
    ]
    return sorted(rates, key=lambda rule: (-rule["caught"], rule["failed"]))


def table(rules: list[dict[str, Any]]) -> str:
    """The shares as a Markdown table."""
    lines = [
        "| rule | faults caught | with hidden cells | correct kernels failed | the same without int8 |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {rule['rule']} | {rule['caught']:.1%} | {rule['caught-with-hidden']:.1%} | {rule['failed']:.1%} "
        f"| {rule['failed-without-int8']:.1%} |"
        for rule in rules
    ]
    return "\n".join(lines)


def wrong(trials: list[Trialled], name: str) -> list[str]:
    """Every row that a rule misses, or fails although it is correct, with the seeds."""
    seeds: dict[str, list[int]] = {}
    for trial in trials:
        if trial.row.correct == (name in trial.failing) and not trial.row.hidden:
            kind = "fails" if trial.row.correct else "misses"
            seeds.setdefault(f"{kind} {trial.row}", []).append(trial.seed)
    return [f"{line}: seeds {', '.join(map(str, sorted(seed)))}" for line, seed in sorted(seeds.items())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", choices=("page", "all"), default="page", help="the 19 and 5 of the page, or all")
    parser.add_argument("--seeds", type=int, default=12, help="seeds of parameters and inputs (default 12)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a processor)")
    parser.add_argument("--missed", action="store_true", help="list what every rule misses or fails, not ours alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table, as docs/verdicts.md takes it")
    options = parser.parse_args()
    start = time.perf_counter()
    groups: dict[tuple[str, str], list[PlantedRow]] = {}
    for row in chosen(options.faults):
        groups.setdefault((row.workload, row.dtype), []).append(row)
    trials: list[Trialled] = []
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        ordered = sorted(groups.values(), key=len, reverse=True)  # so that no process ends long after the others
        waiting = [pool.submit(group, rows, seed, folder) for rows in ordered for seed in range(options.seeds)]
        for done in as_completed(waiting):
            trials += done.result()
    plants = Counter(correct for _, correct in {(trial.row.plant, trial.row.correct) for trial in trials})
    of_faults = sum(not trial.row.correct and not trial.row.hidden for trial in trials)
    hidden = sum(bool(trial.row.hidden) for trial in trials)
    print(
        f"{plants[False]} faults and {plants[True]} correct kernels, {options.seeds} seeds, each in its dtypes: "
        f"{of_faults} and {len(trials) - of_faults - hidden} trials, and {hidden} of hidden cells; "
        f"torch {torch.__version__} on the CPU, "
        f"{time.perf_counter() - start:.0f} s with {options.jobs} processes\n"
    )
    rules = shares(trials)
    print(table(rules))
    if options.json:
        stored = {
            "torch": torch.__version__,
            "seeds": options.seeds,
            "faults": plants[False],
            "correct kernels": plants[True],
            "trials of faults": of_faults,
            "trials of hidden cells": hidden,
            "trials of correct kernels": len(trials) - of_faults - hidden,
            "rules": rules,
        }
        options.json.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
    same_bits = Counter(str(trial.row) for trial in trials if trial.unchanged and not trial.row.correct)
    if same_bits:
        print("\nThe first draw has eager's own bits, so no rule can see anything in it:")
        print("\n".join(f"- {row}: {count} of {options.seeds} seeds" for row, count in sorted(same_bits.items())))
    for name in [OURS, FIRST_DRAW, *RULES] if options.missed else [OURS]:
        wrong_names = wrong(trials, name)
        print(f"\n{name}: {'nothing missed, nothing failed that is correct' if not wrong_names else ''}")
        print("\n".join(f"- {line}" for line in wrong_names))
    return int(bool(wrong(trials, OURS)))


if __name__ == "__main__":
    sys.exit(main())
