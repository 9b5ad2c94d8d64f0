"""Entry points of packages are loaded on demand; one that cannot be loaded is named, and the rest goes on."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from plugin_harness import Suite, only
from process_harness import completed

import accelcheck
from accelcheck.core import entry_points
from accelcheck.devices.pinning import pin
from accelcheck.expectations import must_pass
from accelcheck.expectations.ledger import Ledger, shipped

OK, USAGE = int(pytest.ExitCode.OK), int(pytest.ExitCode.USAGE_ERROR)
DEVICE = """
from accelcheck.devices.cpu import Cpu

class Acme(Cpu):
    name = "acme"
    features = frozenset({"strided"})
"""
TECHNIQUE = """
from accelcheck.techniques.eager import Eager

class Quick(Eager):
    name = "acme-quick"

class Slow(Eager):
    name = "acme-slow"

def brought():
    return [Slow, Quick()]
"""
WORKLOAD = """
import torch
from accelcheck.workloads.base import Problem, Workload

TINY = Workload(
    "acme-tiny", "A product.", lambda g, extent: Problem(torch.nn.Linear(3, 3), (torch.randn(2, 3, generator=g),))
)
"""
BROKEN = "def load_driver():\n    raise OSError('libacme.so.2: cannot open shared object file')\n\nload_driver()\n"


class Site:
    """A folder of installed packages on the path."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        path.mkdir()
        monkeypatch.syspath_prepend(str(path))
        before = os.environ.get("PYTHONPATH")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(path), *([before] if before else [])]))

    def install(self, package: str, source: str, group: str = "", name: str = "acme", value: str = "") -> Path:
        """A distribution with one module that an entry point names."""
        folder = self.path / package
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        (folder / "plugin.py").write_text(source)
        info = self.path / f"{package}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        if group:
            (info / "entry_points.txt").write_text(f"[accelcheck.{group}]\n{name} = {package}.plugin{value}\n")
        return folder


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    must_pass._of_package.cache_clear()
    return Site(tmp_path / "site", monkeypatch)


def command(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    where = os.pathsep.join((str(Path(accelcheck.__file__).parents[1]), os.environ["PYTHONPATH"]))
    known = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    program = "import sys; from accelcheck import cli; sys.exit(cli.main(sys.argv[1:]))"
    return completed([sys.executable, "-c", program, *words], cwd=folder, env={**known, "PYTHONPATH": where})


@pytest.mark.slow
def test_an_installed_device_runs_cases_without_a_conftest(site: Site, suite: Suite) -> None:
    site.install("acme_chip", DEVICE, "devices", value=":Acme")
    ran = suite.run_apart(*only("eager", workload="mlp", device="acme"))
    assert ran.ret == OK, ran.out + ran.err
    assert set(ran.verdicts.values()) == {"pass"}
    assert "eager/mlp/acme/float32/forward" in ran.verdicts


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("value", [":brought", ":brought()", ":Quick"])
def test_a_value_is_a_class_or_a_function_that_returns_a_list(site: Site, suite: Suite, value: str) -> None:
    source = TECHNIQUE + ("\nboth = brought()\n" if value.endswith("()") else "")
    site.install("acme_kernels", source, "techniques", value=":both" if value.endswith("()") else value)
    ran = suite.run(*only("acme-quick", workload="mlp"))
    assert ran.ret == OK, ran.out + ran.err
    assert "acme-quick/mlp/cpu/float32/forward" in ran.verdicts


def test_an_installed_workload_is_tried_with_what_is_built_in(site: Site, suite: Suite) -> None:
    site.install("acme_models", WORKLOAD, "workloads", value=":TINY")
    ran = suite.run(*only("eager", workload="acme-tiny"))
    assert ran.verdicts["eager/acme-tiny/cpu/float32/forward"] == "pass", ran.out + ran.err


@pytest.mark.parametrize(
    ("group", "workers"),
    [("devices", "0"), ("techniques", "0"), ("workloads", "0"), pytest.param("workloads", "2", marks=pytest.mark.slow)],
)
def test_one_that_fails_to_load_is_named_with_its_traceback_and_the_rest_goes_on(
    site: Site, suite: Suite, group: str, workers: str
) -> None:
    site.install("acme_broken", BROKEN, group, value=":Acme")
    site.install("acme_kernels", TECHNIQUE, "techniques", value=":brought")
    words = ["--accel-device=cpu", "--accel-workload=mlp", "--accel-technique=acme-quick"]
    ran = suite.run(*words) if workers == "0" else suite.run_apart(*words, "-n", workers)
    assert ran.ret == OK, ran.out + ran.err
    assert ran.verdicts["acme-quick/mlp/cpu/float32/forward"] == "pass"
    what = f"entry point acme = acme_broken.plugin:Acme of acme_broken 1.2 (accelcheck.{group})"
    assert ran.out.count(f"accelcheck: not loaded: {what} raised OSError: libacme.so.2: cannot open") == 1
    assert "in load_driver" in ran.out


@pytest.mark.parametrize(
    ("group", "words", "unknown"),
    [
        ("devices", only("eager", workload="mlp", device="acme"), "unknown device 'acme'."),
        ("techniques", only("acme-quick", workload="mlp"), "unknown technique 'acme-quick'."),
        ("devices", [*only("eager", workload="mlp"), "--accel-require"], ""),
    ],
    ids=["its device", "its technique", "required"],
)
def test_what_needs_a_plugin_that_fails_is_answered_with_the_traceback(
    site: Site, suite: Suite, group: str, words: list[str], unknown: str
) -> None:
    site.install("acme_broken", BROKEN, group, value=":Acme")
    ran = suite.run(*words)
    assert ran.ret == USAGE
    assert unknown in ran.err
    entry = f"entry point acme = acme_broken.plugin:Acme of acme_broken 1.2 (accelcheck.{group})"
    assert (f"not loaded: {entry}" if unknown else entry) in ran.err
    assert "raised OSError: libacme.so.2" in ran.err
    assert "in load_driver" in ran.err


@pytest.mark.parametrize(
    ("group", "source", "value", "kind", "name"),
    [("devices", DEVICE, ":Acme", "device", "acme"), ("techniques", TECHNIQUE, ":Quick", "technique", "acme-quick")],
)
def test_two_plugins_with_one_name_are_both_named(
    site: Site, suite: Suite, group: str, source: str, value: str, kind: str, name: str
) -> None:
    for package in ("acme_new", "acme_old"):
        site.install(package, source, group, value=value)
    ran = suite.run(*only("acme-quick" if kind == "technique" else "eager", workload="mlp"))
    assert ran.ret == USAGE
    first, other = (
        f"entry point acme = {package}.plugin{value} of {package} 1.2 (accelcheck.{group})"
        for package in ("acme_old", "acme_new")
    )
    assert f"accelcheck: {first}: {other} registers a {kind} named '{name}' too: rename one" in ran.err
    assert ran.verdicts == {}


def test_a_plugin_cannot_take_the_name_of_a_built_in_device(site: Site, suite: Suite) -> None:
    site.install("acme_chip", DEVICE.replace('"acme"', '"cpu"'), "devices", name="cpu", value=":Acme")
    ran = suite.run(*only("eager", workload="mlp"))
    assert ran.ret == USAGE
    assert "of acme_chip 1.2 (accelcheck.devices): accelcheck itself registers a device named 'cpu' too" in ran.err


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("source", "value", "message"),
    [
        (DEVICE.replace('name = "acme"', 'name = "other"'), ":Acme", "got 'other': give each device an entry point"),
        (DEVICE, ":Cpu", "got 'cpu': give each device an entry point"),
        ("Acme = 7", ":Acme", "expected a class or instance with a name"),
        ("Acme = None", ":Nothing", "raised AttributeError"),
        (f"import torch\n{DEVICE}", ":Acme", "it imports torch when it is loaded"),
        ("import time\ntime.sleep(600)", ":Acme", "did not return within 1 s"),
        ("import sys\nsys.exit(0)", ":Acme", "raised SystemExit: 0"),
    ],
    ids=["another name", "accelcheck's own", "a number", "nothing", "imports torch", "hangs", "exits"],
)
def test_values_of_other_kinds_are_refused(site: Site, suite: Suite, source: str, value: str, message: str) -> None:
    site.install("acme_chip", source, "devices", value=value)
    words = only("eager", workload="mlp", device="acme")
    limit = ["--accel-probe-timeout=1"] if "sleep" in source else []
    # Where torch is imported already, as in this process, a plugin that imports it does no harm.
    ran = suite.run_apart(*words) if "import torch" in source else suite.run(*words, *limit)
    assert ran.ret == USAGE
    assert "not loaded: entry point acme" in ran.err
    assert message in ran.err


def test_nothing_is_loaded_where_accelcheck_is_not_asked_for(site: Site, suite: Suite) -> None:
    for number, group in enumerate(("devices", "techniques", "workloads")):
        site.install(f"acme_{number}", "raise SystemExit('loaded')", group, value=":Acme")
    suite.pytester.makepyfile("def test_nothing(): pass")
    done = suite.pytester.runpytest_subprocess()
    assert done.ret == OK
    done.assert_outcomes(passed=1)
    assert "acme" not in done.stdout.str() + done.stderr.str()


@pytest.mark.slow
def test_commands_know_what_is_installed_and_say_what_fails(site: Site, suite: Suite) -> None:
    site.install("acme_chip", DEVICE, "devices", value=":Acme")
    site.install("acme_broken", BROKEN, "techniques", value=":Acme")
    done = command("list", "--device=acme", "--technique=eager", folder=suite.path)
    assert done.returncode == OK, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("eager")] == [["eager", "runs"]]
    assert (
        "accelcheck: entry point acme = acme_broken.plugin:Acme of acme_broken 1.2 (accelcheck.techniques)"
        in done.stderr
    )
    assert "in load_driver" in done.stderr
    told = command("doctor", folder=suite.path)
    assert "not loaded: entry point acme = acme_broken.plugin:Acme" in told.stdout


# What a package ships beside its device.

ENTRY = """
schema = 2
[[entry]]
cases = ["eager/mlp/acme/float32/forward"]
verdict = "fail"
match = "^out: "
at-most = 2.0
reason = "the chip rounds toward zero"
link = "https://example.org/1"
owner = "acme"
expires = 2999-01-01
"""


def test_a_package_ships_a_ledger_beside_its_device(site: Site) -> None:
    folder = site.install("acme_chip", "raise SystemExit('loaded')", "devices", value=":Acme")
    without = shipped(("acme",))
    (folder / "ledgers").mkdir()
    (folder / "ledgers" / "acme.toml").write_text(ENTRY)
    assert shipped(("acme",)) == (*without, folder / "ledgers" / "acme.toml")
    assert Ledger.load(shipped(("acme",))).covering("eager/mlp/acme/float32/forward")


def test_a_package_ships_no_ledger_for_a_device_of_accelcheck(site: Site) -> None:
    folder = site.install("acme_chip", DEVICE, "devices", name="cpu", value=":Acme")
    (folder / "ledgers").mkdir()
    (folder / "ledgers" / "cpu.toml").write_text(ENTRY)
    assert folder / "ledgers" / "cpu.toml" not in shipped(("cpu",))


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("ledgers/acme.toml", ENTRY.replace("schema = 2", "schema = 1"), "acme.toml"),
        ("must_pass/acme.txt", "version one\n", "must_pass/acme.txt:1: invalid literal"),
    ],
)
def test_a_malformed_file_ends_a_run_at_once(site: Site, suite: Suite, file: str, text: str, message: str) -> None:
    path = site.install("acme_chip", DEVICE, "devices", value=":Acme") / file
    path.parent.mkdir()
    path.write_text(text)
    ran = suite.run(*only("eager", workload="mlp", device="acme"))
    assert ran.ret == USAGE
    assert message in ran.err


def listed(levels: dict[str, int], floor: int = 0) -> str:
    return must_pass.written(3, 0, levels, {level: must_pass.Floor(floor, 0, 0) for level in (1, 2, 3, 4)})


def test_the_list_of_a_package_adds_to_what_every_accelerator_has_to_pass(site: Site) -> None:
    base = must_pass.stored()[must_pass.OTHERS]
    folder = site.install("acme_chip", "raise SystemExit('loaded')", "devices", value=":Acme")
    assert must_pass.of("acme") is base
    must_pass._of_package.cache_clear()
    late = next(key for key, level in base.levels.items() if level == 1)
    (folder / "must_pass").mkdir()
    (folder / "must_pass" / "acme.txt").write_text(listed({"amp-bf16/mlp/float32/forward": 1, late: 4}, floor=10_000))
    differences = must_pass.of("acme")
    assert differences.levels == {**base.levels, "amp-bf16/mlp/float32/forward": 1}
    assert (differences.kind, differences.version) == ("acme", 3)
    assert differences.digest == hashlib.sha256((folder / "must_pass" / "acme.txt").read_bytes()).hexdigest()
    assert differences.floors[1] == must_pass.Floor(10_000, base.floors[1].techniques, base.floors[1].elements)


@pytest.mark.slow
def test_a_package_of_records_holds_what_the_device_ships(site: Site, suite: Suite) -> None:
    folder = site.install("acme_chip", DEVICE, "devices", value=":Acme")
    for kind, text in (
        ("ledgers/acme.toml", ENTRY),
        ("must_pass/acme.txt", listed({"amp-bf16/mlp/float32/forward": 1})),
    ):
        (folder / kind).parent.mkdir()
        (folder / kind).write_text(text)
    ran = suite.run(*only("eager", workload="mlp", device="acme"))
    assert ran.header["must_pass"]["acme"]["class"] == "acme", ran.err
    assert "acme.toml" in {ledger["name"] for ledger in ran.header["ledgers"]}
    done = command("pack", "journal.jsonl", "-o", "acme.accelpack", folder=suite.path)
    assert done.returncode == OK, done.stderr
    told = command("verify", "acme.accelpack", folder=suite.path)
    assert "does not qualify" in told.stdout  # a part of a level
    assert "missing" not in told.stdout + told.stderr


def test_each_worker_sees_one_chip_of_the_mask_that_the_device_names() -> None:
    environ = {"ACME_VISIBLE_CHIPS": "3,5"}
    assert pin("acme", "gw1", environ, None, "ACME_VISIBLE_CHIPS") == {"ACME_VISIBLE_CHIPS": "5"}


@pytest.mark.slow
def test_workers_get_the_mask_of_an_installed_device(site: Site, suite: Suite) -> None:
    source = f"""{DEVICE}
    mask = "ACME_VISIBLE_CHIPS"
    variables = ("ACME_VISIBLE_CHIPS",)

    def open(self):
        import os
        with open({str(suite.path / "seen")!r}, "a") as file:
            worker = os.environ.get("PYTEST_XDIST_WORKER", "-")
            file.write(worker + " " + os.environ.get("ACME_VISIBLE_CHIPS", "all") + "\\n")
"""
    site.install("acme_chip", source, "devices", value=":Acme")
    assert suite.run_apart(*only("eager", workload="mlp", device="acme"), "-n", "2").ret == OK
    seen = {tuple(line.split()) for line in (suite.path / "seen").read_text().splitlines()}
    assert ("-", "all") in seen  # the probe
    assert {pair for pair in seen if pair[0] != "-"} <= {("gw0", "0"), ("gw1", "1")}
    assert {pair for pair in seen if pair[0] != "-"}


def test_the_module_of_an_entry_point_is_found_without_importing_it(site: Site) -> None:
    site.install("acme_chip", "raise SystemExit('loaded')", "devices", value=":Acme")
    (entry,) = (each for each in entry_points.entries(entry_points.DEVICES) if each.name == "acme")
    result = entry_points.spec(entry.module)
    assert result is not None
    assert result.origin == str(site.path / "acme_chip" / "plugin.py")
    assert "acme_chip" not in sys.modules
    assert entry_points.described(entry).endswith("of acme_chip 1.2 (accelcheck.devices)")


@pytest.mark.parametrize("module", ["nonsuch.plugin", "os.path.nonsuch", "acme_chip.nonsuch"])
def test_files_beside_an_absent_module_are_none(site: Site, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    site.install("acme_chip", DEVICE)
    entry = metadata.EntryPoint("acme", f"{module}:Acme", entry_points.DEVICES)
    monkeypatch.setattr(entry_points, "entries", lambda _: (entry,))
    assert entry_points.beside("acme", "ledgers", "acme.toml") is None
