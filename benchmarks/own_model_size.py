"""Measures time and memory to check a vision model of 25 million parameters, five techniques, forward and training.

    pip install transformers                                # the model's source; no weights are downloaded
    python benchmarks/own_model_size.py                     # on an otherwise idle machine; 3 min with 2 cores
    python benchmarks/own_model_size.py --effort=full       # without regard to size: more than half an hour
    python benchmarks/own_model_size.py --technique=eager --mode=forward

Cases run as in the suite: oracle in a clean process, technique in this one. Memory is the sum of the proportional set
sizes (PSS, /proc/PID/smaps_rollup) of this process and its descendants, sampled every 0.25 s: shared pages count once.
Wall time stands beside the CPU time of these processes, which other load does not change. The exit status is 1 where a
case does not pass, or the time of all cases or the peak is above its limit.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil  # type: ignore[import-untyped]  # it comes without annotations
import torch
from torch.nn import functional

from accelcheck.checks.execute import Bench
from accelcheck.checks.remarks import REDUCED
from accelcheck.core.capability import SUPPORTED
from accelcheck.core.case import EFFORTS, Mode
from accelcheck.core.selection import Selection
from accelcheck.devices.base import Status
from accelcheck.devices.cpu import Cpu
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify.cache import clean_process
from accelcheck.verify.oracle import Store
from accelcheck.workloads.own_model import workload_of

if TYPE_CHECKING:
    from accelcheck.core.journal import Record
    from accelcheck.workloads.base import Workload

TECHNIQUES = ("eager", "channels-last", "jit-trace", "inplace", "amp-bf16")
MODES = (Mode.FORWARD, Mode.TRAIN)
SECONDS, BYTES = 180.0, 3e9
"""Limits for all cases together."""
EVERY = 0.25
"""Seconds between two samples: each takes some milliseconds of a processor for a gigabyte."""


@dataclass
class Watch:
    """Samples the memory and the processors' time of this process and of those that it started."""

    peak: int = 0
    busy: float = 0.0
    _ended: bool = False

    def __post_init__(self) -> None:
        self._before: dict[int, float] = {}
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._before = self._times()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join()
        self.busy = sum(seconds - self._before.get(pid, 0.0) for pid, seconds in self._times().items())

    def _processes(self) -> list[psutil.Process]:
        own = psutil.Process()
        return [own, *own.children(recursive=True)]

    def _times(self) -> dict[int, float]:
        sizes = {}
        for process in self._processes():
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            sizes[process.pid] = times.user + times.system
        return sizes

    def _sample(self) -> None:
        while not self._ended:
            self.peak = max(self.peak, sum(_pss(process.pid) for process in self._processes()))
            time.sleep(EVERY)


def _pss(pid: int) -> int:
    """Proportional set size in bytes; 0 of a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def workload() -> Workload:
    """A ResNet-50 of transformers with random parameters, two images of 224 x 224 pixels, and a training with momentum.

    Raises:
        SystemExit: transformers is not installed.
    """
    try:
        from transformers import ResNetConfig, ResNetForImageClassification
    except ImportError:
        raise SystemExit("transformers is not installed, which makes the model: pip install transformers") from None
    torch.manual_seed(0)
    config = ResNetConfig()
    config.num_labels = 1000
    model = ResNetForImageClassification(config)
    images = (torch.randn(2, 3, 224, 224),)
    return workload_of(model, images, name="resnet50", loss=of_logits, target=torch.tensor([3, 7]), optimizer=momentum)


def of_logits(output: Any, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.logits, target)


def run(bench: Bench, selection: Selection, modes: tuple[Mode, ...]) -> list[tuple[Record, float, Watch]]:
    collected = []
    for case in bench.matrix.cases(selection, modes):
        start = time.monotonic()
        with Watch() as watch:
            record = bench.run(case)
        collected.append((record, time.monotonic() - start, watch))
        seconds = record.seconds.get("oracle", 0.0)
        print(
            f"{case.technique:15s} {case.mode!s:8s} {record.verdict!s:6s} {collected[-1][1]:8.1f} {seconds:8.1f} "
            f"{watch.busy:8.1f} {watch.peak / 1e9:8.2f}",
            flush=True,
        )
        if why := record.why:
            print("\n".join(f"    {line}" for line in why.splitlines()[:5]), flush=True)
    return collected


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--effort", default=EFFORTS[0], choices=EFFORTS, help="same as --accel-effort (default: auto)")
    parser.add_argument("--technique", action="append", help=f"repeatable (default: {', '.join(TECHNIQUES)})")
    parser.add_argument("--mode", action="append", choices=[str(mode) for mode in MODES], help="repeatable")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit for all cases together (default: 180)")
    parser.add_argument("--bytes", type=float, default=BYTES, help="limit of the peak (default: 3e9)")
    given = parser.parse_args()
    own = workload()
    names = given.technique or TECHNIQUES
    known = Matrix.load().techniques
    matrix = Matrix({name: known[name] for name in names}, {own.name: own})
    modes = tuple(Mode(word) for word in given.mode or MODES)
    start = time.monotonic()
    print(
        f"{own.name}: {own.summary} {torch.get_num_threads()} threads, {os.cpu_count()} processors, "
        f"torch {torch.__version__}"
    )
    print(f"{'technique':15s} {'mode':8s} {'':6s} {'seconds':>8s} {'oracle':>8s} {'busy':>8s} {'peak GB':>8s}")
    with tempfile.TemporaryDirectory(prefix="accelcheck-size-") as folder:
        clean = clean_process(matrix.parts())
        try:
            store = Store(Path(folder), clean, given.effort)
            bench = Bench(matrix, {"cpu": Cpu()}, {"cpu": Status("cpu", SUPPORTED)}, store)
            result = run(bench, Selection(("cpu",), dtypes=("float32",), level=4), modes)
        finally:
            clean.close()
    seconds, peak = time.monotonic() - start, max((watch.peak for *_, watch in result), default=0)
    busy = sum(watch.busy for *_, watch in result)
    for line in dict.fromkeys(str(e.observed) for record, *_ in result for e in record.evidence if e.claim == REDUCED):
        print(line)
    wrong = [record.case.id for record, *_ in result if not record.verdict.green]
    print(
        f"{len(result)} cases, {len(wrong)} wrong, {seconds:.0f} s (limit {given.seconds:.0f} s), "
        f"processors busy for {busy:.0f} s, peak {peak / 1e9:.2f} GB (limit {given.bytes / 1e9:.2f} GB)"
    )
    return int(bool(wrong) or not result or seconds > given.seconds or peak > given.bytes)


if __name__ == "__main__":
    sys.exit(main())
