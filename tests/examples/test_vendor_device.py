"""examples/vendor-device: builds, is a device, passes without a fault, is caught with each on its page."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest
from filelock import FileLock
from process_harness import completed, script

from accelcheck.core.journal_reading import read
from accelcheck.expectations.ledger import Ledger

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "vendor-device"
PAGE = ROOT / "docs" / "vendor_faults.md"
BUILD = 1200.0
"""Seconds that the compiler may take on a busy machine."""

built = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler: apt-get install g++")


@pytest.fixture(scope="session")
def acme() -> Path:
    """The folder into which the package is installed, once for a state of its sources and for all processes."""
    sources = sorted(path for path in EXAMPLE.rglob("*") if path.suffix in {".cpp", ".h", ".py", ".toml", ".txt"})
    sources = [path for path in sources if "build" not in path.relative_to(EXAMPLE).parts]
    facts = [sys.version, *(path.read_text("utf-8") for path in sources), importlib.metadata.version("torch")]
    folder = (
        Path(tempfile.gettempdir()) / f"acme-npu-{os.getuid()}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"
    )
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory() as copy:
                tree = Path(copy) / "tree"
                shutil.copytree(EXAMPLE, tree, ignore=shutil.ignore_patterns("build", "*.egg-info", "*.so"))
                words = ["install", "-q", "--no-build-isolation", "--no-deps", "--target", f"{copy}/made", str(tree)]
                done = completed(
                    [sys.executable, "-m", "pip", *words], env={**os.environ, "MAX_JOBS": "2"}, timeout=BUILD
                )
                assert done.returncode == 0, done.stdout + done.stderr
                shutil.move(f"{copy}/made", folder)
    return folder


def python(acme: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TORCH_DEVICE"))}
    where = os.pathsep.join((str(ROOT), str(acme)))
    return completed(
        [sys.executable, *words], env={**known, "PYTHONPATH": where, "OMP_NUM_THREADS": "1", **environ}, timeout=BUILD
    )


PROGRAM = """
import torch

x = torch.randn(37, 19)
there = x.to("acme")
assert torch.allclose((there @ there.t()).cpu(), x @ x.t())

assert torch.isnan(torch.empty(5, device="acme")).all(), "fresh memory is poisoned"

before = torch.accelerator.memory_allocated()
held = torch.zeros(1 << 20, device="acme")
assert torch.accelerator.memory_allocated() - before == held.nbytes
del held
assert torch.accelerator.memory_allocated() == before
assert torch.accelerator.max_memory_allocated() >= before + 4 * (1 << 20)

writer, event = torch.Stream("acme"), torch.Event("acme")
value = torch.zeros(4, device="acme")
torch.acme.synchronize()
with writer:
    torch.acme.sleep(100)
    value.add_(1)
    event.record()
assert not event.query(), "a stream runs while the host goes on"
assert value.cpu().tolist() == [0] * 4, "another stream does not wait"
torch.accelerator.current_stream().wait_event(event)
assert value.cpu().tolist() == [1] * 4, "it waits for an event"

torch.manual_seed(3)
first = torch.randn(6, device="acme").cpu()
torch.manual_seed(3)
assert torch.equal(first, torch.randn(6, device="acme").cpu())

norm = torch.nn.BatchNorm1d(19).to("acme")
norm(there)
assert torch.allclose(norm.running_mean.cpu(), 0.1 * x.mean(0), atol=1e-6), "statistics are written in place"
with torch.autocast("acme", torch.bfloat16):
    assert (there @ there.t()).dtype is torch.bfloat16
assert x.pin_memory().is_pinned()
print("done")
"""


@pytest.mark.slow
@built
def test_it_is_a_device_of_torch(acme: Path) -> None:
    done = python(acme, "-c", PROGRAM)
    assert done.stdout == "done\n", done.stderr


@pytest.mark.slow
@built
def test_a_fork_of_a_process_that_uses_it_is_told_so(acme: Path) -> None:
    program = """
import os, torch
(torch.ones(2, device="acme") + 1).cpu()
if os.fork() == 0:
    try:
        torch.ones(2, device="acme")
    except RuntimeError as error:
        print(str(error).splitlines()[0], flush=True)
    os._exit(0)
os.wait()
"""
    done = python(acme, "-c", program)
    assert done.stdout.startswith("acme: cannot be used in a fork of a process that uses it"), done.stderr


def suite(acme: Path, folder: Path, *words: str, **environ: str) -> dict[str, tuple[str, str]]:
    """Verdict and reason of each case of a run."""
    journal = folder / "journal.jsonl"
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(folder), f"--accel-journal={journal}"]
    done = python(
        acme, "-m", "pytest", "--pyargs", "accelcheck.suite", "--accel-device=acme", *options, *words, **environ
    )
    assert journal.is_file(), done.stdout + done.stderr
    return {record.case.id: (str(record.verdict), record.why) for record in read(journal)[1]}


@pytest.mark.slow
@built
def test_operators_without_a_kernel_are_failures_where_they_are_counted(acme: Path, tmp_path: Path) -> None:
    words = ("--accel-technique=eager", "--accel-workload=mlp")
    case = "eager/mlp/acme/float32/forward"
    assert suite(acme, tmp_path, *words)[case] == ("pass", "")
    verdict, reason = suite(acme, tmp_path, *words, ACME_COUNT_FALLBACKS="1")[case]
    assert verdict == "fail"
    assert "no operator left acme for the CPU: observed operators without a kernel x" in reason


@pytest.mark.slow
@built
@pytest.mark.parametrize("fault", ["wrong-tail", "stream-race", "crash:40"])
def test_a_fault_is_caught_and_nothing_fails_without_it(acme: Path, fault: str) -> None:
    done = python(acme, str(ROOT / "benchmarks" / "vendor_faults.py"), fault.partition(":")[0])
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = (line for line in done.stdout.splitlines() if line.startswith(f"| `{fault}` |"))
    expected = {"wrong-tail": "fail", "stream-race": "fail", "crash:40": "crash"}[fault]
    assert f"| {expected} |" in row


LIAR = """
from acme_npu.accelcheck.device import Acme

class Liar(Acme):
    name = "liar"
    features = Acme.features | {"inductor"}

def pytest_accel_devices():
    return [Liar()]
"""


@pytest.mark.slow
@built
def test_a_device_that_declares_what_it_cannot_do_fails(acme: Path, tmp_path: Path) -> None:
    (tmp_path / "liar.py").write_text(LIAR)
    case = "compile-static/mlp/liar/float32/forward"
    journal = tmp_path / "journal.jsonl"
    words = ["-q", "-p", "liar", "--accel-device=liar", f"--accel-case={case}", f"--accel-journal={journal}"]
    path = os.pathsep.join((str(ROOT), str(acme), str(tmp_path)))
    done = python(acme, "-m", "pytest", "--pyargs", "accelcheck.suite", *words, PYTHONPATH=path)
    assert done.returncode == 1, done.stdout + done.stderr
    (record,) = read(journal)[1]
    assert str(record.verdict) in {"fail", "error"}


def faults() -> ModuleType:
    return script(ROOT / "benchmarks" / "vendor_faults.py")


def test_the_page_has_every_fault_and_each_was_seen() -> None:
    page = PAGE.read_text("utf-8")
    rows = dict(re.findall(r"^\| `([^`]+)` \|.*\| (\d+) of \d+ \|", page, re.MULTILINE))
    assert list(rows) == [planted.name for planted in faults().FAULTS]
    assert min(map(int, rows.values())) >= 1
    for planted in faults().FAULTS:
        (row,) = re.findall(rf"^\| `{planted.name}` \|.*\| ([^|]+) \|$", page, re.MULTILINE)
        named = set(re.findall("`([^`]+)`", row))
        assert named & set(planted.operators) or not planted.operators, row


def test_every_fault_of_the_source_is_in_the_table() -> None:
    source = "".join(path.read_text("utf-8") for path in (EXAMPLE / "csrc").glob("*.cpp"))
    assert set(re.findall(r'faulty\("([^"]+)"\)', source)) == {planted.kind for planted in faults().FAULTS}


def test_its_ledger_can_be_read() -> None:
    assert Ledger.load((EXAMPLE / "acme_npu" / "accelcheck" / "ledgers" / "acme.toml",)).entries
