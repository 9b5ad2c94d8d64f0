"""The probe: every answer comes from a child, and no broken backend takes the others along."""

from __future__ import annotations

import importlib
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from marks import needs_python_backends
from probe_harness import HANG, TORCH
from process_harness import completed

from accelcheck.core import imports
from accelcheck.core.capability import Code
from accelcheck.core.case import Verdict
from accelcheck.core.processes import Child
from accelcheck.devices import probe as probe_module
from accelcheck.devices.probe import HostFacts, probe

ROOT = Path(__file__).parents[2]
TOY = Path(__file__).parents[1] / "toy_backend.py"
CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
LIMIT = 20.0  # seconds a child may take in these tests, importing torch included; hanging ones get less

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put fake packages on the import path of this process and of its children."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("PJRT_DEVICE", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        monkeypatch.delenv(name, raising=False)

    def put(package: str, code: str, entry: str = "") -> None:
        (tmp_path / f"{package}.py").write_text(code)
        if entry:
            info = tmp_path / f"{package}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[torch.backends]\n{entry}\n")

    return put


@pytest.fixture
def xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Believe a fake torch_xla, whatever real one is installed beside."""
    monkeypatch.setattr("accelcheck.devices.xla.version", lambda _: "")


def test_a_cpu_machine_pays_for_one_child(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    start = probe_module._started

    def count(words: list[str], environ: Mapping[str, str]) -> Child:
        started.append(words)
        return start(words, environ)

    monkeypatch.setattr(probe_module, "_started", count)
    statuses, facts = probe(["cpu", "cuda", "nonsuch"], LIMIT)
    assert statuses["cpu"].present
    fingerprint = statuses["cpu"].fingerprint
    assert fingerprint is not None
    assert fingerprint.versions["torch"]
    assert statuses["nonsuch"].capability.code is Code.NO_PACKAGE
    assert statuses["nonsuch"].capability.verdict is Verdict.UNAVAILABLE
    assert "nonsuch" in statuses["nonsuch"].capability.reason
    assert facts.autoload
    assert facts.cores >= 1
    assert ["cpu", "*"] in started
    if not statuses["cuda"].present:
        assert started == [["cpu", "*"]]


@pytest.mark.slow
def test_the_parent_does_not_import_torch() -> None:
    code = """
    import sys
    from accelcheck.devices.probe import probe
    statuses, _ = probe(["cpu"], 60)
    print(statuses["cpu"].capability, "torch" in sys.modules)
    """
    done = completed([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=ROOT)
    assert done.stdout.strip() == "ok False"


@pytest.mark.slow
def test_children_do_not_import_from_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('a source tree')")
    (tmp_path / "queue.py").write_text("raise ImportError('a file of the same name')")
    # A script elsewhere, as the command pytest is: Python does not add the working folder to its import path.
    script = tmp_path / "bin" / "script.py"
    script.parent.mkdir()
    script.write_text("from accelcheck.devices.probe import probe; print(probe(['cpu'], 60)[0]['cpu'].capability)")
    done = completed(
        [sys.executable, str(script)], check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.stdout.strip() == "ok"


@pytest.mark.slow
def test_by_hand() -> None:
    done = completed([sys.executable, "-m", "accelcheck.devices.probe", "cpu"], check=True, cwd=ROOT)
    stages = [message["stage"] for message in map(json.loads, done.stdout.splitlines()) if "stage" in message]
    assert stages == ["import torch", "open cpu", "done"]


@pytest.mark.slow(after=1)
@pytest.mark.usefixtures("xla")
@pytest.mark.parametrize(
    ("code", "timeout", "expected", "words"),
    [
        ("raise ImportError('undefined symbol: _ZN5torch')", LIMIT, Code.IMPORT_FAILED, ["undefined symbol"]),
        (CRASH, LIMIT, Code.PROBE_FAILED, ["SIGSEGV", "torch_xla.py:1"]),
        (HANG, 3.0, Code.PROBE_TIMEOUT, ["within 3 s", "open xla"]),
    ],
    ids=["raises", "crashes", "hangs"],
)
def test_a_bad_package_stops_no_other_device(
    install: Install, code: str, timeout: float, expected: Code, words: list[str]
) -> None:
    install("torch_xla", code)
    if code != CRASH:
        install("torch", TORCH)
    begun = time.monotonic()
    statuses, facts = probe(["cpu", "xla"], timeout)
    assert statuses["cpu"].present, statuses["cpu"].capability
    assert statuses["xla"].capability.code is expected
    assert statuses["xla"].capability.verdict is Verdict.UNAVAILABLE
    assert all(word in statuses["xla"].capability.reason for word in words), statuses["xla"].capability.reason
    assert facts.autoload
    assert time.monotonic() - begun < timeout + LIMIT


@pytest.mark.parametrize(
    ("code", "timeout", "word"),
    [
        ("raise OSError('libtoy.so: cannot open shared object file')", LIMIT, "libtoy.so"),
        (HANG, 3.0, "no answer within 3 s"),
    ],
    ids=["raises", "hangs"],
)
def test_a_broken_autoloaded_backend_is_named_and_left(install: Install, code: str, timeout: float, word: str) -> None:
    install("torch", TORCH)
    install("toy_broken", f"def load():\n    {code}\n", "broken = toy_broken:load")
    statuses, facts = probe(["cpu", "broken"], timeout)
    assert statuses["cpu"].present, statuses["cpu"].capability
    assert statuses["broken"].capability.code is Code.IMPORT_FAILED
    assert word in statuses["broken"].capability.reason
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in statuses["broken"].capability.action
    assert not facts.autoload
    assert list(facts.broken) == ["broken"]
    assert "broken" in facts.backends


@pytest.mark.slow
@needs_python_backends
def test_a_sound_backend_beside_a_broken_one_is_found(install: Install) -> None:
    install("toy_backend", TOY.read_text(), "toy = toy_backend:load")
    install("a_broken", "raise RuntimeError('no such library')", "broken = a_broken:load")
    statuses, facts = probe(["cpu", "toy", "broken"], LIMIT)
    assert statuses["cpu"].present
    assert statuses["broken"].capability.code is Code.IMPORT_FAILED
    assert statuses["broken"].capability.reason.endswith("no such library")
    assert (facts.autoload, list(facts.broken)) == (False, ["broken"])
    assert statuses["toy"].present, statuses["toy"].capability
    fingerprint = statuses["toy"].fingerprint
    assert fingerprint is not None
    assert (fingerprint.chip, fingerprint.runtime) == ("Toy 0", "toy_backend 1.0")


FOREIGN = """
import os
from accelcheck.devices.base import Device, Fingerprint

class Foreign(Device):
    name = "foreign"
    type = "cpu"
    def fingerprint(self): return Fingerprint(self.name, f"chip of {os.getpid()}", 1)
    def torch_device(self): raise NotImplementedError
    def synchronize(self): pass

class Undetectable(Foreign):
    name = "undetectable"
    def detect(self): raise OSError("no /proc here")
"""


def test_devices_of_other_packages(install: Install) -> None:
    install("torch", TORCH)
    install("foreign_device", FOREIGN)
    module = importlib.import_module("foreign_device")
    statuses, _ = probe(["foreign", "undetectable"], LIMIT, [module.Foreign(), module.Undetectable()])
    fingerprint = statuses["foreign"].fingerprint
    assert fingerprint is not None, statuses["foreign"].capability
    assert fingerprint.chip != f"chip of {os.getpid()}"
    assert statuses["undetectable"].capability.code is Code.PROBE_FAILED
    assert "no /proc here" in statuses["undetectable"].capability.reason


def test_noise_on_standard_output_is_no_answer(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelcheck.devices.xla.version", lambda _: "")
    install("torch", TORCH)
    install("torch_xla", "print('half a line', end=''); print('{\"stage\": \"done\"}', flush=True); raise OSError('x')")
    statuses, _ = probe(["xla"], LIMIT)
    assert statuses["xla"].capability.code is Code.IMPORT_FAILED


def test_host_facts_are_plain() -> None:
    assert HostFacts("cpu", 2).as_json() == {
        "cpu": "cpu",
        "cores": 2,
        "backends": (),
        "broken": {},
        "autoload": True,
        "failed_imports": {},
    }


def test_a_broken_torch_is_not_blamed_on_a_backend(install: Install) -> None:
    install("torch", "raise ImportError('libc10.so: cannot open shared object file')")
    install("sound", "def load():\n    pass\n", "sound = sound:load")
    statuses, facts = probe(["cpu"], LIMIT)
    assert statuses["cpu"].capability.code is Code.IMPORT_FAILED
    assert "libc10.so" in statuses["cpu"].capability.reason
    assert facts.autoload
    assert facts.broken == {}


@pytest.mark.parametrize(
    ("code", "timeout", "expected", "word"),
    [
        ("raise OSError('libtoy.so: no such file')", LIMIT, Code.IMPORT_FAILED, "OSError: libtoy.so: no such file"),
        (CRASH, LIMIT, Code.PROBE_FAILED, "died of SIGSEGV during: --accel-import=toy_imported"),
        pytest.param(
            HANG,
            5.0,
            Code.PROBE_TIMEOUT,
            "no answer within 5 s, during: --accel-import=toy_imported",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["raises", "crashes", "hangs"],
)
def test_a_module_that_cannot_be_imported_is_named_and_other_devices_go_on(
    install: Install, monkeypatch: pytest.MonkeyPatch, code: str, timeout: float, expected: Code, word: str
) -> None:
    install("torch", TORCH)
    install("toy_imported", code)
    monkeypatch.setenv(imports.VARIABLE, "toy_imported")
    statuses, facts = probe(["cpu", "toy"], timeout)
    assert statuses["cpu"].present, statuses["cpu"].capability
    assert list(facts.failed_imports) == ["toy_imported"]
    for capability in (facts.failed_imports["toy_imported"], statuses["toy"].capability):
        assert capability.code is expected
        assert word in capability.reason


def test_an_imported_module_comes_before_devices_of_packages(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("torch", TORCH)
    install("toy_imported", "loaded = True")
    opens = "    def open(self):\n        import sys\n        assert 'toy_imported' in sys.modules\n"
    install("foreign_importing", FOREIGN.replace("    def synchronize", f"{opens}    def synchronize"))
    device = importlib.import_module("foreign_importing").Foreign()
    monkeypatch.setenv(imports.VARIABLE, "toy_imported")
    statuses, facts = probe(["foreign"], LIMIT, [device])
    assert statuses["foreign"].present, statuses["foreign"].capability
    assert not facts.failed_imports
