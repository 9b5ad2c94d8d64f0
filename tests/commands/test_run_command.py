"""`accelcheck run`: plans runs of pytest, keeps files, hands signals on, ends with verdict, paths and exit code."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from plugin_harness import CONFTEST
from process_harness import PATIENT, completed, left, started

from accelcheck import cli
from accelcheck.commands import common, session
from accelcheck.commands.common import GREEN, NOTHING, RED, USAGE
from accelcheck.core import foreground
from accelcheck.core.journal_reading import read
from accelcheck.core.processes import polls

INTERRUPTED = 2


class Started:
    """Takes the place of pytest: writes down how it was called, and a journal of one case with the given verdict."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *codes: int, verdict: str = "pass") -> None:
        self.commands: list[list[str]] = []
        self.environments: list[Mapping[str, str]] = []
        self.reports: list[list[str]] = []
        self._codes = list(codes)
        self._verdict = verdict
        monkeypatch.setattr(foreground, "run", self)
        monkeypatch.setattr(common, "refusal", lambda *_: None)
        for name in (session.LEVEL, session.WORKERS, "PJRT_DEVICE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("accelcheck.devices.hardware.usable_cores", lambda: 6)

    def __call__(self, words: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
        if "report" in words:
            self.reports.append(list(words))
            return GREEN
        self.commands.append(list(words))
        self.environments.append(environ or {})
        journal = next(word.partition("=")[2] for word in words if word.startswith("--accel-journal="))
        lines = [HEADER, {**CASE, "verdict": self._verdict}]
        Path(journal).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return self._codes.pop(0) if self._codes else GREEN

    def words(self, part: int) -> list[str]:
        """The arguments of pytest in a part."""
        assert self.commands[part][:3] == [sys.executable, "-m", "pytest"]
        return self.commands[part][3:]


STORED = Path(__file__).parents[2] / "baselines" / "cpu" / "level1.jsonl"
_LINES = [json.loads(line) for line in STORED.read_text(encoding="utf-8").splitlines()[:2]]
HEADER: dict[str, Any] = _LINES[0]
CASE: dict[str, Any] = _LINES[1]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_device_runs_twice_with_workers_and_then_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch)
    words = ["--device=cpu", "--level=2", "--technique=amp-*", "--journal=here.jsonl", "--", "-x", "--junit-xml=a.xml"]
    assert cli.main(["run", *words]) == GREEN
    chosen = ["--accel-device=cpu", "--accel-require", "-q", "-rfE", "--accel-level=2", "--accel-technique=amp-*"]
    assert started.words(0) == [
        *("--pyargs", "accelcheck.suite", *chosen, "--accel-journal=here.jsonl"),
        *("-n", "6", "--max-worker-restart=1000", "-x", "--junit-xml=a.xml"),
    ]
    assert started.words(1) == [
        *("--pyargs", "accelcheck.suite.test_speed", *chosen, "--accel-journal=here-speed.jsonl"),
        *("-x", "--junit-xml=a-speed.xml", "-n", "0"),
    ]


def test_the_command_that_the_summary_recommends_is_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch)
    assert cli.main(["run", "--device=cpu", "--technique=amp-*", "--", "-x"]) == GREEN
    again = shlex.split(started.environments[0][session.SESSION])
    assert again == ["accelcheck", "run", "--device=cpu", "--technique=amp-*", "--", "-x"]
    monkeypatch.setenv(session.LEVEL, "3")
    given = cli.parser().parse_args(again[1:])
    assert (given.level, given.device, given.technique, given.arguments) == (3, ["cpu"], ["amp-*"], ["-x"])


def test_without_speed_there_is_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch)
    assert cli.main(["run", "--device=cpu", "--no-speed"]) == GREEN
    assert len(started.commands) == 1
    assert session.SESSION not in started.environments[0]


def test_xla_without_a_tpu_gets_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch)
    assert cli.main(["run", "--device=xla", "--device=cpu", "--no-speed", "--journal=j.jsonl"]) == GREEN
    assert [environment.get("PJRT_DEVICE") for environment in started.environments] == ["CPU", None]
    assert sorted(path.name for path in Path().glob("j*")) == ["j-cpu.jsonl", "j-xla.jsonl"]


@pytest.mark.parametrize(
    ("codes", "code", "parts"),
    [
        ((GREEN, GREEN), GREEN, 2),
        ((GREEN, NOTHING), GREEN, 2),
        ((RED, GREEN), RED, 2),
        ((GREEN, RED), RED, 2),
        ((NOTHING, NOTHING), NOTHING, 2),
        ((INTERRUPTED,), INTERRUPTED, 1),
        ((3,), 3, 1),
        ((USAGE,), USAGE, 1),
    ],
)
def test_the_exit_code_is_that_of_the_worst_part(
    codes: tuple[int, ...], code: int, parts: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = Started(monkeypatch, *codes)
    assert cli.main(["run", "--device=cpu"]) == code
    assert len(started.commands) == parts
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"accelcheck: exit {code}"
    assert any(line.startswith("accelcheck: cpu: cut off: 1 cases executed") for line in lines) == (parts == 1)


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        ("pass", "1 cases executed, none of them wrong unless the ledger expects it: 1 pass"),
        ("fail", "1 of 1 executed cases are not right: 1 fail"),
        ("xfail", "1 cases executed, none of them wrong unless the ledger expects it: 1 xfail"),
        ("unsupported", "nothing ran: 1 unsupported"),
    ],
)
def test_the_last_lines_are_the_verdict_and_the_journal(
    verdict: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Started(monkeypatch, verdict=verdict)
    cli.main(["run", "--device=cpu", "--no-speed", "--journal=j.jsonl"])
    first, *more, second, third, _ = capsys.readouterr().out.partition("accelcheck: cpu: ")[2].splitlines()
    assert first == said
    qualified = [line for line in more if line.startswith("accelcheck: cpu does not qualify at level 1: ")]
    assert len(qualified) == (verdict != "unsupported")
    assert second == f"accelcheck: journal: {tmp_path / 'j.jsonl'}"
    assert third.startswith("accelcheck: report: ")


@pytest.mark.parametrize("name", ["j.jsonl", "j-speed.jsonl"])
@pytest.mark.parametrize("link", [False, True], ids=["file", "broken link"])
def test_a_file_that_exists_is_kept(
    name: str, link: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = Started(monkeypatch)
    if link:
        Path(name).symlink_to("nowhere")
    else:
        Path(name).write_text("mine")
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "--device=cpu", "--journal=j.jsonl"])
    assert ended.value.code == USAGE
    assert f"{name} exists, and is kept" in capsys.readouterr().err
    assert started.commands == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--", "--accel-device=cuda"], "--accel-device after --: give --device before it"),
        (["--", "--accel-journal", "j"], "--accel-journal after --: give --journal before it"),
        (["--", "--accel-resume=j"], "give it to pytest itself"),
        (["--journal=absent/j"], "there is no folder absent: make it first"),
    ],
)
def test_what_would_contradict_it_is_refused(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = Started(monkeypatch)
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "--device=cpu", *words])
    assert ended.value.code == USAGE
    assert said in capsys.readouterr().err
    assert started.commands == []


def test_absent_devices_send_to_the_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    started = Started(monkeypatch)
    monkeypatch.setattr(common, "refusal", lambda *_: "no NVIDIA GPU found")
    assert cli.main(["run", "--device=cuda"]) == NOTHING
    assert "cuda: no NVIDIA GPU found; accelcheck doctor says more" in capsys.readouterr().err
    assert started.commands == []


def test_a_report_is_made_of_all_journals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    started = Started(monkeypatch)
    assert cli.main(["run", "--device=cpu", "--journal=j.jsonl", "--report=r.html"]) == GREEN
    (words,) = started.reports
    assert words[1:] == ["-m", "accelcheck.cli", "report", "j.jsonl", "j-speed.jsonl", "--html=r.html"]
    assert f"accelcheck: report: {Path('r.html').resolve()}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_real_run_leaves_a_journal_and_the_code_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    words = ["run", "--device=cpu", "--technique=toy", "--technique=toy-value", "--no-speed", "--journal=j.jsonl"]
    code = "import sys; from accelcheck import cli; sys.exit(cli.main(sys.argv[1:]))"
    more = ["--", "-n", "0", "--accel-workload=tiny", "--accel-dtype=float32"]
    ended = completed([sys.executable, "-c", code, *words, *more], timeout=PATIENT)
    assert ended.returncode == RED, ended.stdout + ended.stderr
    assert "accelcheck: cpu: 1 of 2 executed cases are not right: 1 fail, 1 pass" in ended.stdout.splitlines()
    assert ended.stdout.splitlines()[-1] == "accelcheck: exit 1"
    _, records = read(tmp_path / "j.jsonl")
    assert sorted(str(record.verdict) for record in records) == ["fail", "pass"]


# Signals.

PARENT = (
    "import sys; from accelcheck.core import foreground; sys.exit(foreground.run([sys.executable, '-c', sys.argv[1]]))"
)
COUNTING = """
import pathlib, signal, sys, time
seen = []
def take(number, frame):
    seen.append(number)
    time.sleep(0.3)  # a second one would come by then
    pathlib.Path("seen").write_text(repr(list(map(int, seen))))
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, take)
pathlib.Path("ready").touch()
while not seen: time.sleep(0.01)
time.sleep(0.5)
sys.exit(7)
"""


@contextlib.contextmanager
def started_parent(child: str) -> Iterator[subprocess.Popen[str]]:
    with started([sys.executable, "-c", PARENT, child]) as parent:
        for _ in polls(PATIENT):
            if Path("ready").exists():
                break
        yield parent


@pytest.mark.skipif(sys.platform != "linux", reason="the system's signals are Linux's")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_it_alone_is_handed_on_once(number: signal.Signals) -> None:
    with started_parent(COUNTING) as parent:
        os.kill(parent.pid, number)
        assert parent.wait(PATIENT) == 7
    assert json.loads(Path("seen").read_text()) == [number]


@pytest.mark.skipif(sys.platform != "linux", reason="as above")
def test_it_is_killed_with_what_it_runs() -> None:
    waiting = "import os, pathlib, time\npathlib.Path('ready').write_text(str(os.getpid()))\ntime.sleep(600)"
    with started_parent(waiting) as parent:
        while not Path("ready").read_text():
            time.sleep(0.01)
        child = int(Path("ready").read_text())
        parent.kill()
        parent.wait()
        assert not left(child)


@pytest.mark.parametrize(
    ("ending", "code"), [("import sys; sys.exit(5)", 5), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_its_status_is_that_of_what_it_runs(ending: str, code: int) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert foreground.run([sys.executable, "-c", ending]) == code
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.slow
def test_what_runs_is_interrupted_once_where_that_is_said() -> None:
    ending = """
import signal, sys, time
try:
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1.2)  # a second one would end this with another status
    sys.exit(7)
"""
    lines: list[bool] = []

    def meanwhile() -> bool:
        lines.append(len(lines) >= 2)  # once it sleeps
        return lines[-1]

    assert foreground.run([sys.executable, "-c", ending], meanwhile=meanwhile) == 7
