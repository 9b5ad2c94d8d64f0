"""A conftest.py that imports torch before devices are probed, where a backend breaks or hangs that import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from probe_harness import HANG, TORCH
from process_harness import PATIENT, completed

BACKENDS = {
    "raises": "raise OSError('libvendor.so: cannot open shared object file')",
    "hangs": HANG,
    "crashes": "import os; os.abort()",
}


def run(folder: Path, conftest: str, backend: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A run of one test, in a process with a torch that is there at once, and with this backend."""
    (folder / "torch.py").write_text(TORCH)
    if backend is not None:
        (folder / "torch_vendor.py").write_text(f"def autoload():\n    {backend}\n")
        info = folder / "torch_vendor-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-vendor\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[torch.backends]\nvendor = torch_vendor:autoload\n")
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_mine.py").write_text("def test_mine(): pass\n")
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in {"TORCH_DEVICE_BACKEND_AUTOLOAD", "PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"}
    }
    path = os.pathsep.join([str(folder), *filter(None, [environ.get("PYTHONPATH")])])
    return completed(
        [sys.executable, "-m", "pytest", "-p", "no:benchmark", "test_mine.py", *arguments],
        cwd=folder,
        env={**environ, "PYTHONPATH": path},
        timeout=PATIENT,
    )


@pytest.mark.parametrize("backend", [pytest.param(n, marks=pytest.mark.slow) if n == "hangs" else n for n in BACKENDS])
def test_a_backend_that_breaks_torch_does_not_end_a_run_whose_conftest_imports_it(tmp_path: Path, backend: str) -> None:
    limit = "--accel-probe-timeout=4" if backend == "hangs" else "--accel-probe-timeout=60"
    ran = run(tmp_path, "import torch\n", BACKENDS[backend], "--accel-device=cpu", limit)
    assert ran.returncode == pytest.ExitCode.OK, ran.stdout + ran.stderr
    assert ran.stderr.count("accelcheck: the backend vendor breaks `import torch`: ") == 1
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set for this run" in ran.stderr
    # The probe need not find it out again, and lists it.
    assert "  vendor: unavailable [import-failed] the backend vendor breaks `import torch`" in ran.stdout


def test_a_run_that_does_not_ask_for_accelcheck_is_left_alone(tmp_path: Path) -> None:
    ran = run(tmp_path, "import torch\n", BACKENDS["raises"])
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    assert "libvendor.so" in ran.stderr
    assert "accelcheck" not in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "pass"])
def test_a_backend_that_works_is_loaded(tmp_path: Path, backend: str | None) -> None:
    conftest = "import os, torch\nassert 'TORCH_DEVICE_BACKEND_AUTOLOAD' not in os.environ\n"
    ran = run(tmp_path, conftest, backend, "--accel-device=cpu")
    assert ran.returncode == pytest.ExitCode.OK, ran.stdout + ran.stderr
    assert "breaks" not in ran.stderr


@pytest.mark.slow
def test_an_import_that_takes_long_is_named_while_it_lasts(tmp_path: Path) -> None:
    (tmp_path / "slow_vendor.py").write_text("import time\ntime.sleep(5)\n")
    ran = run(tmp_path, "import slow_vendor\n", None, "--accel-device=cpu", "--accel-probe-timeout=3")
    assert "accelcheck: what pytest loads before its start, conftest.py say, has not returned within 3 s" in ran.stderr
    assert 'slow_vendor.py", line 2 in <module>' in ran.stderr
