"""The controller's side of a run: header, journal, progress, matrix, exit status. No torch."""

import datetime as dt
import functools
import io
import json
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import pytest

from accelcheck.core.case import Case, Mode, Verdict
from accelcheck.core.journal import ErrorCode, Journal, JournalError, Record
from accelcheck.expectations import must_pass
from accelcheck.measure import timing_processes
from accelcheck.measure.further import leads, widened
from accelcheck.measure.gate import Gate
from accelcheck.measure.timing_processes import Timed, TimingError
from accelcheck.plugin import options, registered, time_limits
from accelcheck.plugin.configuration import RunConfiguration
from accelcheck.report import coverage, terminal
from accelcheck.report.console import escaped, escaped_lines
from accelcheck.report.coverage import Scope
from accelcheck.report.progress import Progress
from accelcheck.report.run import counts

SESSION = "ACCELCHECK_SESSION"
"""Environment variable with the name of the nox session that a run is part of."""
NEAR = 0.75
"""Part of a case's time limit after which lines announce its end."""
PATIENCE = 20.0
"""Seconds after which a running case is named, and between two such lines."""


def timed_elsewhere(config: pytest.Config, run: Path, ids: Sequence[str], count: int) -> Mapping[str, Timed]:
    """Times cases in `count` processes, which repeat the run's command; the measurements by case id.

    A `TimingError` where the first process measured no case.
    """
    folder = Path(tempfile.mkdtemp(prefix="timing-", dir=run))
    words = [*map(str, config.invocation_params.args)]
    # A timing process skips every case: it must not replace what this run writes, such as the failures that --lf reads.
    if config.pluginmanager.hasplugin("cacheprovider"):
        words += ["-o", f"cache_dir={folder / 'cache'}"]
    for option, name in {"xmlpath": "junitxml", "log_file": "log-file", "basetemp": "basetemp"}.items():
        if getattr(config.option, option, None):
            words.append(f"--{name}={folder / option}")
    say = functools.partial(_say, config)
    return timing_processes.measure(words, ids, count, folder, config.invocation_params.dir, say)


def _say(config: pytest.Config, line: str) -> None:
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if reporter is None:
        return
    writer = config.get_terminal_writer()
    reporter.ensure_newline()
    if writer.width_of_current_line:  # with -q the reporter does not count the dots
        writer.line()
    writer.line(f"accelcheck: {escaped(line)}")
    writer.flush()


class Controller:
    """Collects the records of all processes of a run. Never registered on an xdist worker."""

    def __init__(self, config: pytest.Config, run: RunConfiguration, gate: Gate) -> None:
        self.config, self.run, self.gate = config, run, gate
        self._say = functools.partial(_say, config)
        self.records = {record.case.id: record for record in run.earlier}
        self.asked = False
        self.scope: Scope | None = None
        self.timed_elsewhere = 0
        self.refused = ""
        """Reason why workers could not make the cases."""
        self.not_loaded: dict[str, str] = {}
        """Reasons why entry points could not be loaded on workers, by entry point."""
        self.cut_off = ""
        """Reason why the journal could not be written any more."""
        self._leading: list[Record] = []
        """Records of cases that further processes are to time."""
        self._modes: list[Mode] = []
        self._limits: Mapping[str, float] = {}
        resumed = options.resumed(config)
        path = resumed or options.folder(config, "journal")
        self.journal = self._begin(path, resumed=resumed is not None) if path is not None else None
        self.running = RunningCases(_terminal(config), self._limit)
        self.progress: Progress | None = None
        self._started = time.monotonic()

    def _begin(self, path: Path, *, resumed: bool) -> Journal:
        journal = Journal(path, resumed=resumed)
        self.config.add_cleanup(journal.close)
        started = dt.datetime.now(tz=dt.UTC).isoformat(timespec="seconds")
        if resumed:
            journal.resumed({"started": started})
        else:
            own = {"imports": list(self.run.imports), "models": registered.model_facts(self.config)}
            journal.header({"started": started, **self.run.facts(), **self.run.inputs(), **own})
        return journal

    def pytest_report_header(self) -> list[str]:
        """The level, the found devices, and why others are absent."""
        return terminal.header(self.run)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Announces the cases, once the first worker has collected them."""
        self.announce(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodeready(self, node: Any) -> None:
        """Watches a worker's process."""
        watch_worker(node)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Takes the scope of the run, or the reason for none, from a worker, which has the matrix."""
        told: dict[str, Any] = getattr(node, "workeroutput", {})
        self.refused = told.get("accelcheck-refused", self.refused)
        self.not_loaded |= told.get("accelcheck-not-loaded", {})
        if "accelcheck" in told:
            self.scope = Scope.from_json(json.loads(told["accelcheck"]))

    def announce(self, nodeids: Sequence[str]) -> None:
        """Prints the first line about the cases of the run, once."""
        if self._modes or self.config.option.collectonly or timing_processes.ongoing() is not None:
            return
        cases = [case for nodeid in nodeids if (case := self._case(_bracketed(nodeid))) is not None]
        self._modes = [case.mode for case in cases]
        if cases:
            self._say(coverage.first_line(self.run, cases))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Notes that a case began, here or on a worker."""
        self.running.begin(nodeid)
        if self.progress is None and self._modes:
            self.progress = Progress(self._modes, time.monotonic())

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Notes that a case ended; prints the progress when it is due."""
        self.running.end(nodeid)
        case = self._case(_bracketed(nodeid))
        if self.progress is not None and case is not None:
            due = self.progress.finish(case.mode, time.monotonic())
            if due is not None:
                self._say(due)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes the record from a report; makes one if the process died or the case was not reached."""
        name = _bracketed(report.nodeid)
        if report.when not in {"setup", "call", "teardown"}:
            self.running.end(report.nodeid)  # xdist never says that a test finished whose worker died
        data: str | None = getattr(report, "accelcheck", None)
        if data is not None:
            for fields in json.loads(data):
                record = Record.from_json(fields)
                self._take(record, held=record.case.id == name)  # timing processes know the cases of the suite alone
        else:
            self.asked = self.asked or name in {"no-case", "shared"}
            self.timed_elsewhere += name == "shared" and report.when == "setup"
            case = self._case(name)
            if case is None or not report.failed or case.id in self.records:
                return
            # xdist reports a worker that died under a test with a `when` that is none of setup, call and teardown.
            verdict = Verdict.ERROR if report.when in {"setup", "call", "teardown"} else Verdict.CRASH
            self._take(Record(case, verdict, reason=report.longreprtext.strip()))

    def _take(self, record: Record, *, held: bool = False) -> None:
        if not record.family:  # its process is gone, but other cases of the technique may have it
            others = (other for other in self.records.values() if other.case.technique == record.case.technique)
            record = replace(record, family=next((other.family for other in others if other.family), ""))
        self.records[record.case.id] = record
        self._leading = [leading for leading in self._leading if leading.case.id != record.case.id]
        if held and self.gate.further and leads(record):
            self._leading.append(record)  # written once further processes have timed it
        else:
            self._write(lambda journal: journal.case(record.as_json()))

    def _time_further(self, *, cut_off: bool) -> None:
        """Times the leading cases in further processes, unless the run was cut off, and writes their records."""
        timed: Mapping[str, Timed] = {}
        try:
            if self._leading and not cut_off:
                ids = [record.case.id for record in self._leading]
                timed = timed_elsewhere(self.config, self.run.folder, ids, self.gate.further)
        except TimingError as error:
            for line in str(error).splitlines():
                self._say(line)
        finally:
            missing = Timed(asked=self.gate.further)
            for record in (widened(record, timed.get(record.case.id, missing)) for record in self._leading):
                self.records[record.case.id] = record
                self._write(functools.partial(Journal.case, record=record.as_json()))
            self._leading.clear()

    def _write(self, line: Callable[[Journal], None]) -> None:
        """Writes to the journal, and closes it where that fails, as on a full disk."""
        if self.journal is None or self.cut_off:
            return
        try:
            line(self.journal)
        except JournalError as error:
            self.cut_off = str(error)
            self.journal.close()
            self._say(f"{error}; it ends here, and the run goes on")

    def _not_collected(self, name: str) -> None:
        """Makes the record of a case that a must-pass list has, and no process collected."""
        case = self._case(name)
        if case is None or name in self.records:
            return
        required = must_pass.of(case.device)
        reason = (
            f"expected a case of version {required.version} of the must-pass list {required.kind}, which was not "
            "collected: its technique or workload is not registered here"
        )
        self._say(f"{name}: error: {reason}")
        self._take(Record(case, Verdict.ERROR, code=ErrorCode.NOT_COLLECTED, reason=reason))

    def _limit(self, nodeid: str) -> float | None:
        """Time limit of a run of a test's case in seconds; None where there is none, or it is not known here."""
        given = options.timeout(self.config)
        if options.value(self.config, "in_process") or given == 0:
            return None
        if given is None and not self._limits:
            self._limits = time_limits.read(self.run.folder)
        return self._limits.get(_bracketed(nodeid)) if given is None else given

    def _case(self, name: str) -> Case | None:
        if name.count("/") != 4:
            return None
        technique, workload, device, dtype, mode = name.split("/")
        if mode not in set(Mode) or device not in self.run.selection.devices:
            return None
        return Case(technique, workload, device, dtype, Mode(mode), self.run.selection.level)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Ends the journal; a run that executed no case, or did not collect one, does not exit with 0."""
        ends = pytest.ExitCode
        self.running.stop()
        self._time_further(cut_off=exitstatus in {ends.INTERRUPTED, ends.INTERNAL_ERROR})
        for name in self.scope.missing if self.scope is not None else ():
            self._not_collected(name)
            if exitstatus in {ends.OK, ends.NO_TESTS_COLLECTED}:
                exitstatus = session.exitstatus = ends.TESTS_FAILED
        executed = sum(record.verdict.executed for record in self.records.values())
        if self.run.earlier and exitstatus in {ends.OK, ends.NO_TESTS_COLLECTED}:
            good = all(record.verdict.green for record in self.run.earlier)
            exitstatus = session.exitstatus = ends.OK if good else ends.TESTS_FAILED
        if exitstatus == ends.OK and (self.records or self.asked) and not executed:
            session.exitstatus = ends.NO_TESTS_COLLECTED
        if self.refused:
            session.exitstatus = ends.USAGE_ERROR
        tally = counts(self.records.values())
        self._write(lambda journal: journal.end({"verdicts": tally, "exit": int(session.exitstatus)}))
        if self.cut_off and session.exitstatus == ends.OK:
            session.exitstatus = ends.TESTS_FAILED  # the journal lacks cases

    @pytest.hookimpl(trylast=True)  # after pytest-benchmark's table
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the matrix technique x device, counts, the slowest cases, and the cases that the run left out."""
        make_pasteable(terminalreporter)  # pytest prints them after this
        if self.refused:
            terminalreporter.write_line(f"ERROR: {self.refused}", red=True)
        for reason in (self.not_loaded | registered.failed(self.config)).values():
            terminalreporter.write_line(escaped_lines(f"accelcheck: not loaded: {reason}"), yellow=True)
        records, path = self.records.values(), self.journal_path
        if records and not self._modes and not self.run.earlier:  # only tests of models ran
            terminal.brief(terminalreporter, [*records], path, [*self._explained()])
        elif records or self.asked:
            words, session = [*map(str, self.config.invocation_params.args)], os.environ.get(SESSION, "")
            remainder = coverage.lines(self.run, self.gate, records, self.scope, words, session, self.timed_elsewhere)
            terminal.summary(terminalreporter, self.run, self.records, path, remainder, [*self._explained()])
        elif not self._modes and not self.config.option.collectonly and (words := options.suite(self.config)):
            suite = f"accelcheck's own tests: {shlex.join(words)}"
            self._say(f"no collected test takes accel_case, so nothing was verified; {suite}")

    def _explained(self) -> Iterator[str]:
        """Explains failures with ``--accel-explain``; yields a line for each cause."""
        if not options.value(self.config, "explain") or self.journal_path is None or self.cut_off:
            return
        from accelcheck.plugin import explanations

        took = time.monotonic() - self._started
        words = [f"--import={name}" for name in self.run.imports]
        words += [f"--model={folder / spec}" for spec, folder in options.models(self.config)]
        seconds, since = max(explanations.LEAST, took), time.time() - took
        yield from explanations.explain(self.journal_path, words, seconds, since, self._say)

    @property
    def journal_path(self) -> Path | None:
        """File of the journal, or None."""
        return self.journal.path if self.journal is not None else None


def _bracketed(nodeid: str) -> str:
    """The text in the brackets of a test's name, not of its folders' names."""
    return nodeid.rpartition("::")[2].partition("[")[2].rpartition("]")[0]


class RunningCases:
    """Prints the names of cases that run for long: otherwise a compilation of minutes would look like a hang.

    `limit` is a function from a node id to the time limit of a run in seconds; None where there is none.
    """

    def __init__(self, out: TextIO, limit: Callable[[str], float | None]) -> None:
        self._out, self._limit = out, limit
        self._alone = False  # True when the last line is one of ours: the reporter's dots end without a newline
        self._running: dict[str, float] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, nodeid: str) -> None:
        """Watches a test."""
        with self._lock:
            self._running[nodeid] = time.monotonic()
            self._alone = False
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="accelcheck-progress", daemon=True)
            self._thread.start()

    def end(self, nodeid: str) -> None:
        """Stops watching a test."""
        with self._lock:
            self._running.pop(nodeid, None)
            self._alone = False

    def stop(self) -> None:
        """Stops watching all tests, and ends the thread."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(PATIENCE):
            now = time.monotonic()
            with self._lock:
                late = [(name, now - start) for name, start in self._running.items() if now - start >= PATIENCE]
            for name, seconds in late:
                start = "" if self._alone else "\n"
                self._alone = True
                words = escaped(_bracketed(name) or name)
                self._out.write(f"{start}accelcheck: {words}: {running(seconds, self._limit(name))}\n")
            self._out.flush()


def running(seconds: float, limit: float | None) -> str:
    """Words for a case's time until now and its limit, which a case that runs again may exceed up to twice."""
    if limit is None:
        return f"running for {seconds:.0f} s"
    if seconds > limit:
        return f"running for {seconds:.0f} s; each of its runs is ended after {limit:g} s"
    return f"running for {seconds:.0f} s of {limit:g} s" + ("; then it is ended" if seconds >= NEAR * limit else "")


def _terminal(config: pytest.Config) -> TextIO:
    """A copy of the present standard output: while a case runs in this process, pytest captures the usual one."""
    try:
        descriptor = os.dup(sys.stdout.fileno())
    except (io.UnsupportedOperation, OSError):  # not a file, as in a notebook or a test
        return sys.stdout
    out = os.fdopen(descriptor, "w", encoding="utf-8", errors="replace")
    config.add_cleanup(out.close)
    return out


REPRODUCE = "  reproduce: pytest "
SUITE = "--pyargs accelcheck.suite"


def make_pasteable(reporter: pytest.TerminalReporter) -> None:
    """Replaces the node ids of the suite's failed cases by the arguments that run each of them alone."""
    config = reporter.config
    for kind in ("failed", "error"):
        for report in reporter.stats.get(kind, ()):
            words = arguments(getattr(report, "longreprtext", ""))
            if words:
                # pytest takes node ids for paths below its root, and shows them from where it was called.
                here = config.invocation_params.dir
                report.nodeid = words if here == config.rootpath else str(Path(here) / words)


def arguments(message: str) -> str:
    """The arguments of pytest in the command of a failure's message; empty if it does not run the suite."""
    for line in message.splitlines():
        if line.startswith(REPRODUCE + SUITE):
            return line.removeprefix(REPRODUCE)
    return ""


GRACE = 1.0
"""Seconds in which a pipe may close by itself."""


def watch_worker(node: Any) -> None:
    """Waits for the end of a worker's process, in a thread, and then kills other processes that write to its pipe.

    A node of xdist that is no child of ours, on another machine say, is left alone.
    """
    process = getattr(getattr(node.gateway, "_io", None), "popen", None)
    if process is None or sys.platform != "linux":
        return
    try:
        pipe = os.fstat(process.stdout.fileno()).st_ino
    except (OSError, ValueError):
        return
    threading.Thread(target=_wait, args=(process, pipe), name="accelcheck-worker", daemon=True).start()


def _wait(process: Any, pipe: int) -> None:
    with suppress(ChildProcessError):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its owner can still wait for it
    time.sleep(GRACE)
    for holder in () if process.stdout.closed else _writers(pipe):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(holder, signal.SIGKILL)


def _writers(pipe: int) -> list[int]:
    """The processes that have a pipe open for writing, by the number of its inode."""
    writers = []
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        with suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    named = str(descriptor.readlink()) == f"pipe:[{pipe}]"
                    # The link has the mode of the descriptor.
                    if named and descriptor.lstat().st_mode & 0o200:
                        writers.append(int(process.name))
                        break
    return writers
