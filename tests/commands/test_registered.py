"""Registrations of conftest.py in commands, in processes of their own: pytest is asked once a process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from process_harness import completed

import accelcheck
from accelcheck.devices.probe import builtin
from accelcheck.measure.baselines import Baseline, Baselines, Place
from accelcheck.measure.regression import Sample

VENDOR = """
from accelcheck.devices.cpu import Cpu

class Vendor(Cpu):
    name = "vendor"
    features = frozenset({"strided"})
"""
CONFTEST = """
from accelcheck.techniques.eager import Eager

class Quick(Eager):
    name = "vendor-quick"

def pytest_accel_devices():
    from vendor_device import Vendor
    return [Vendor()]

def pytest_accel_techniques():
    return [Quick()]
"""
CASE = "vendor-quick/speed-mlp/vendor/float32/speed"


@dataclass
class Folder:
    path: Path

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.python("-c", "import sys; from accelcheck import cli; sys.exit(cli.main(sys.argv[1:]))", *words)

    def python(self, *words: str) -> subprocess.CompletedProcess[str]:
        where = os.pathsep.join((str(Path(accelcheck.__file__).parents[1]), str(self.path)))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        return completed([sys.executable, *words], cwd=self.path, env={**environ, "PYTHONPATH": where})


@pytest.fixture
def vendor(tmp_path: Path) -> Folder:
    (tmp_path / "vendor_device.py").write_text(VENDOR)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    return Folder(tmp_path)


@pytest.mark.slow
def test_list_has_what_plugins_registered(vendor: Folder) -> None:
    done = vendor.run("list", "--technique=vendor-*", "--device=vendor")
    assert done.returncode == 0, done.stderr
    assert "vendor-quick" in done.stdout


@pytest.mark.slow
def test_the_table_for_documents_is_the_same_everywhere(vendor: Folder) -> None:
    done = vendor.run("list", "--markdown", "--technique=eager")
    assert done.returncode == 0, done.stderr
    assert "eager" in done.stdout
    assert "vendor" not in done.stdout


@pytest.mark.slow
def test_a_duet_runs_on_what_plugins_registered(vendor: Folder) -> None:
    done = vendor.run("duet", "--env-b=TOY=1", "--device=vendor", f"--case={CASE}", "--pairs=2", "--margin=0.99")
    assert done.returncode == 0, done.stderr
    assert any(line.startswith(CASE) for line in done.stdout.splitlines())


@pytest.mark.slow
def test_a_command_finds_what_is_built_in_what_is_registered_and_what_torch_has(vendor: Folder) -> None:
    code = (
        "from accelcheck.plugin import registered; print([type(registered.device(name)).__name__ for name in ('cpu', "
        "'vendor', 'npu')])"
    )
    assert vendor.python("-c", code).stdout == "['Cpu', 'Vendor', 'Generic']\n"


@pytest.mark.slow
def test_prune_of_registered_things(vendor: Folder) -> None:
    place = Place("vendor", "Chip", 1, "2.13", "unknown")
    store = Baselines(vendor.path / "baselines")
    gone = CASE.replace("speed-mlp", "mlp")
    for case in (CASE, gone):
        store.write(Baseline(case, "0123abcd", place, Sample(0.0, 0.01, 10)), replace=True)
    assert vendor.run("baseline", "prune").returncode == 0
    assert list(store.read(place)) == [CASE]


@pytest.mark.slow
@pytest.mark.parametrize("words", [["duet", "--env-b=TOY=1", "--device=vendro"], ["curve", "--device=vendro"]])
def test_an_unknown_device_is_answered_with_those_that_there_are(vendor: Folder, words: list[str]) -> None:
    done = vendor.run(*words)
    assert done.returncode == 4
    legal = ", ".join(sorted({*builtin(), "vendor"}))
    assert f"unknown device 'vendro'. Did you mean 'vendor'? Legal values: {legal}." in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ini", ["filterwarnings = error", "addopts = --ff --no-such-option", "pythonpath = src"])
def test_what_plugins_registered_is_known_whatever_runs_are_told(vendor: Folder, ini: str) -> None:
    (vendor.path / "pytest.ini").write_text(f"[pytest]\n{ini}\n")
    if "src" in ini:
        (vendor.path / "src").mkdir()
        (vendor.path / "vendor_device.py").rename(vendor.path / "src" / "vendor_device.py")
    code = "from accelcheck.plugin import registered; print(type(registered.device('vendor')).__name__)"
    done = vendor.python("-c", code)
    assert done.stdout == "Vendor\n", done.stderr


@pytest.mark.slow
def test_a_conftest_that_cannot_be_imported_is_said(vendor: Folder) -> None:
    (vendor.path / "conftest.py").write_text("import no_such_module")
    done = vendor.run("duet", "--env-b=TOY=1", "--device=vendor", f"--case={CASE}")
    assert done.returncode == 4
    assert f"pytest does not start in {vendor.path} (exit 4): " in done.stderr
    assert "No module named 'no_such_module'" in done.stderr
