"""``--accel-import``: a backend that no entry point loads is imported in every process that uses a device."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from marks import needs_python_backends
from plugin_harness import CONFTEST, Suite, only
from process_harness import python

from accelcheck.core import imports
from accelcheck.core.registry import UnknownNameError
from accelcheck.devices.packages import installed
from accelcheck.devices.probe import builtin

pytestmark = needs_python_backends

OK = int(pytest.ExitCode.OK)
VENDOR = """
import toy_backend
toy_backend.load()
"""
RANKS = """
import os
from dataclasses import dataclass

import torch
from torch import distributed

from accelcheck.core import imports
from accelcheck.devices.generic import Generic
from accelcheck.techniques.distributed.pool import RankPool


@dataclass
class Sum:
    def run(self, device):
        there = torch.full((2,), distributed.get_rank() + 1.0, device=device.torch_device())
        total = (there * 2).cpu()
        distributed.all_reduce(total)
        return os.getpid(), there.device.type, total.tolist()


def main():
    imports.load()
    device = Generic("toy")
    device.open()
    pool = RankPool(device, 2)
    try:
        answers = pool.train(Sum())
    finally:
        pool.close()
    assert len({pid for pid, _, _ in answers} - {os.getpid()}) == 2
    print([answer[1:] for answer in answers])
"""
OTHER = """
import tempfile
from pathlib import Path
from accelcheck.core import imports
from accelcheck.core.case import Mode
from accelcheck.core.processes import ChildError
from accelcheck.devices.generic import Generic
from accelcheck.techniques.snapshots.handover import ContinuationProcess, ContinuationTask


def main():
    imports.load()
    device = Generic("toy")
    device.open()
    other = ContinuationProcess(device)
    # Without a snapshot: how far the process comes shows that it has the device.
    with tempfile.TemporaryDirectory() as folder:
        where, none = Path(folder), frozenset[str]()
        errand = ContinuationTask(
            None, device, None, 0, Mode.TRAIN, scaled=False, threads=1, folder=where, records=none
        )
        try:
            other.go_on(errand)
        except ChildError as error:
            print(str(error).splitlines()[0].partition("FileNotFoundError")[1])
    other.close()
"""


@pytest.fixture
def vendor(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    suite = Suite(pytester, monkeypatch)
    (suite.path / "vendor_toy.py").write_text(VENDOR)
    monkeypatch.delenv(imports.VARIABLE, raising=False)
    return suite


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_backend_without_an_entry_point_runs_cases_in_every_process(vendor: Suite, workers: str) -> None:
    words = [*only("toy", "toy-too", device="toy"), "--accel-device=cpu", "--accel-import=vendor_toy"]
    ran = vendor.run_apart(*words, "-n", workers)
    assert ran.ret == OK, ran.out
    places = [f"{name}/tiny/{device}/float32/forward" for name in ("toy", "toy-too") for device in ("toy", "cpu")]
    assert ran.verdicts == dict.fromkeys(places, "pass")
    assert ran.lines("  toy: 1 x Toy 0; .*")


@pytest.mark.slow
def test_a_backend_that_registers_the_least_runs_and_says_what_it_lacks(vendor: Suite) -> None:
    (vendor.path / "vendor_bare.py").write_text("import toy_backend\ntoy_backend.load(toy_backend.Bare())\n")
    ran = vendor.run_apart(*only("toy", device="toy"), "--accel-import=vendor_bare")
    assert ran.verdicts == {"toy/tiny/toy/float32/forward": "pass"}, ran.out
    words = ["amp-bf16", "checkpoint-non-reentrant", "checkpoint-segments"]
    ran = vendor.run_apart(
        *only(*words, workload="mlp-blocks", device="toy"), "--accel-import=vendor_bare", "--accel-level=2"
    )
    assert set(ran.verdicts.values()) == {"unsupported"}, ran.out
    assert ran.lines(
        ".* torch.utils.checkpoint recomputes under torch.autocast, which needs torch.toy.get_amp_supported_dtype"
    )


@pytest.mark.slow
def test_the_ini_file_names_modules_too(vendor: Suite) -> None:
    vendor.ini(accel_import="vendor_toy")
    ran = vendor.run_apart(*only("toy", device="toy"))
    assert ran.verdicts == {"toy/tiny/toy/float32/forward": "pass"}, ran.out


@pytest.mark.slow
def test_timing_processes_import_the_backend(vendor: Suite) -> None:
    words = ["--accel-import=vendor_toy", "--accel-baseline=update", "--accel-processes=2", "-p", "no:benchmark"]
    ran = vendor.run_apart(*only("toy", workload="timed", device="toy"), *words)
    assert ran.ret == OK, ran.out
    assert "stored from 2 processes" in {m.reason for m in ran.record("toy", "timed").measurements}


@pytest.mark.slow
@pytest.mark.skipif(not installed("torchao"), reason="torchao is not installed")
def test_a_backend_without_torch_save_is_judged_and_the_case_says_what_could_not_be_seen(vendor: Suite) -> None:
    words = ["--accel-import=vendor_toy", "-p", "no:benchmark"]
    ran = vendor.run_apart(*only("int8-torchao-weight-only", workload="mlp", device="toy"), *words)
    record = ran.record("int8-torchao-weight-only", "mlp")
    assert record.verdict == "pass", ran.out
    assert record.compared > 0
    assert record.remark.startswith("could not be seen: bytes of elements in a file fall from FP32's by ")
    assert "torch.save: RuntimeError: " in record.remark
    assert ran.lines("evidence that could not be had:")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "answer"),
    [(RANKS, "[('toy', [6.0, 6.0]), ('toy', [6.0, 6.0])]"), (OTHER, "FileNotFoundError")],
    ids=["two ranks", "hand-over"],
)
def test_processes_of_techniques_import_the_backend(vendor: Suite, program: str, answer: str) -> None:
    (vendor.path / "program.py").write_text(program)
    done = python(
        vendor.path,
        "-c",
        "import program\nif __name__ == '__main__': program.main()",
        **{imports.VARIABLE: "vendor_toy"},
    )
    assert done.stdout.splitlines()[-1:] == [answer], done.stderr


@pytest.mark.slow
def test_a_module_that_cannot_be_imported_leaves_other_devices_alone(vendor: Suite) -> None:
    ran = vendor.run_apart(*only("toy"), "--accel-import=vendor_nonsuch", "--accel-import=vendor_toy")
    assert ran.verdicts == {"toy/tiny/cpu/float32/forward": "pass"}, ran.out
    assert ran.lines(
        r"  --accel-import=vendor_nonsuch: unavailable \[import-failed\] ModuleNotFoundError: "
        r"No module named 'vendor_nonsuch'; .*"
    )
    assert ran.lines("  toy: 1 x Toy 0; .*")


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*only("toy"), "--accel-import=vendor_nonsuch", "--accel-require"], "No module named 'vendor_nonsuch'"),
        (
            [*only("toy", device="toy"), "--accel-import=vendor_broken"],
            "--accel-import=vendor_broken: unavailable [import-failed] OSError: libtoy.so",
        ),
        (
            [*only("toy"), "--accel-import=vendor/toy.py"],
            "module 'vendor/toy.py': expected a name such as torch_vendor",
        ),
    ],
    ids=["required", "its device", "no name"],
)
def test_a_run_that_needs_a_module_that_cannot_be_imported_ends(vendor: Suite, words: list[str], message: str) -> None:
    (vendor.path / "vendor_broken.py").write_text("raise OSError('libtoy.so: cannot open shared object file')")
    ran = vendor.run_apart(*words)
    assert ran.ret == pytest.ExitCode.USAGE_ERROR
    assert message in ran.err


@pytest.mark.slow
def test_an_unknown_device_is_answered_with_how_a_backend_is_found(vendor: Suite) -> None:
    vendor.pytester.makeconftest(CONFTEST + VENDOR)  # here alone it is not enough
    ran = vendor.run_apart(*only("toy", device="toy"))
    assert ran.ret == pytest.ExitCode.USAGE_ERROR
    assert "unknown device 'toy'." in ran.err
    assert f"Legal values: auto, all, {', '.join(sorted(builtin()))}." in ran.err
    assert "A backend that only conftest.py imports is not found" in ran.err
    assert "give --accel-import=MODULE, or install it as a package with a torch.backends entry point." in ran.err


def test_a_run_leaves_the_variable_as_it_was(vendor: Suite) -> None:
    (vendor.path / "harmless.py").write_text("")
    assert vendor.run(*only("toy"), "--accel-import=harmless").ret == OK
    assert imports.VARIABLE not in os.environ


def test_names_are_kept_in_order_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {}
    imports.announce(["b", "a.c", "b"], environ)
    assert environ == {imports.VARIABLE: "b,a.c"}
    with pytest.raises(UnknownNameError, match="expected a name such as"):
        imports.announce(["a,b"], environ)
    imports.announce([], environ)
    assert not environ
    monkeypatch.setenv(imports.VARIABLE, "no_such_module")
    with pytest.raises(imports.ModuleImportError, match="module no_such_module: cannot be imported"):
        imports.load()


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-c", "import sys; from accelcheck import cli; sys.exit(cli.main(sys.argv[1:]))", *words)


@pytest.mark.slow
def test_list_shows_an_imported_backend(vendor: Suite) -> None:
    done = command(vendor.path, "list", "--device=toy", "--technique=eager", "--import=vendor_toy")
    assert done.returncode == OK, done.stderr
    lines = done.stdout.splitlines()
    assert "toy: Toy 0" in lines
    assert [line.split()[:2] for line in lines if line.startswith("eager")] == [["eager", "runs"]]


@pytest.mark.slow
def test_a_duet_runs_on_an_imported_backend(vendor: Suite) -> None:
    case = "toy/timed/toy/float32/speed"
    words = [f"--case={case}", "--pairs=2", "--margin=0.99", "--import=vendor_toy", "--technique=toy"]
    done = command(vendor.path, "duet", "--env-b=TOY=1", "--device=toy", *words)
    assert done.returncode == OK, done.stderr
    assert any(line.startswith(case) for line in done.stdout.splitlines())


@pytest.mark.slow
def test_a_command_names_the_module_that_failed(vendor: Suite) -> None:
    done = command(vendor.path, "curve", "--device=toy", "--import=vendor_nonsuch")
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "No module named 'vendor_nonsuch'" in done.stderr


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", ["curve", "claims", "duet", "list", "selftest"])
def test_commands_with_a_device_take_modules(vendor: Suite, name: str) -> None:
    done = command(vendor.path, name, "--device=nonsuch", "--import=not/a/module")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "module 'not/a/module': expected a name such as torch_vendor" in done.stderr
