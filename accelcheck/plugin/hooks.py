"""Implements pytest's hooks. No torch: every pytest run where accelcheck is installed imports this module."""

from __future__ import annotations

import functools
import gc
import json
import os
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from accelcheck.plugin import options

if TYPE_CHECKING:
    from accelcheck.checks.supervisor import Supervisor
    from accelcheck.core.case import Case
    from accelcheck.core.journal import Record
    from accelcheck.measure.gate import Gate
    from accelcheck.plugin.configuration import RunConfiguration
    from accelcheck.plugin.controller import Controller
    from accelcheck.plugin.own_models import Accel
    from accelcheck.techniques.matrix import Matrix

_RUN: pytest.StashKey[RunConfiguration] = pytest.StashKey()
_MATRIX: pytest.StashKey[Matrix] = pytest.StashKey()
_RECORDS: pytest.StashKey[list[Record]] = pytest.StashKey()
_REFUSED: pytest.StashKey[str] = pytest.StashKey()
_GATE: pytest.StashKey[Gate] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declares the options and their ini twins."""
    options.add(parser)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> Generator[None, object, object]:
    """Guards the import of conftest.py, which may import torch, against broken backends."""
    seconds = options.requested_early(early_config, args)
    if seconds is None or "PYTEST_XDIST_WORKER" in os.environ:  # a worker gets the findings of its controller
        return (yield)
    from accelcheck.plugin import early

    with early.guarded(seconds):
        return (yield)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Declares the hooks by which others register devices, techniques and workloads."""
    from accelcheck.plugin import hookspecs

    pluginmanager.add_hookspecs(hookspecs)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Answers ``-n auto``: a worker for each visible chip, where chips can be counted without opening them."""
    from accelcheck.devices.pinning import workers

    return workers(options.value(config, "device") or (), os.environ) if options.requested(config) else None


def pytest_configure(config: pytest.Config) -> None:
    """Reads the options and probes the devices on the controller; reads the controller's findings on a worker."""
    config.addinivalue_line(
        "markers",
        "accel(*modes, techniques, devices, dtypes, limits, level): what the fixture `accel` checks in a test; or the "
        "modes (default: all) whose selected cases parametrize `accel_case`",
    )
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        if "accelcheck" in worker:
            from accelcheck.core import files, foreign
            from accelcheck.core.processes import end_with_parent
            from accelcheck.plugin import configuration

            foreign.keep_stderr()
            end_with_parent()  # a worker would not notice while a case holds the GIL
            run = configuration.RunConfiguration.from_json(json.loads(worker["accelcheck"]))
            files.share(run.folder.parent)
            run.apply(os.environ, worker["workerid"], worker["workercount"])
            config.stash[_RUN] = run
    elif options.requested(config) and not config.option.help:
        config.pluginmanager.register(_controller(config), "accelcheck-controller")


def _controller(config: pytest.Config) -> Controller:
    from accelcheck.core import foreign, imports
    from accelcheck.core.errors import InputError
    from accelcheck.core.processes import end_with_parent
    from accelcheck.measure import timing_processes
    from accelcheck.plugin import configuration, controller, registered
    from accelcheck.report.console import escaped_lines

    foreign.keep_stderr()
    if timing_processes.ongoing() is not None:
        end_with_parent()
    config.add_cleanup(functools.partial(imports.announce, imports.announced()))
    try:
        run = configuration.RunConfiguration.find(config)
        run.apply(os.environ, "", 1)
        config.stash[_RUN] = run
        gate = config.stash[_GATE] = configuration.gate(config, run)
        if run.selection.techniques or run.selection.workloads or run.selection.cases:
            # Only with names, because the registry imports torch.
            registered.check(config, _matrix(config), run.selection)
        return controller.Controller(config, run, gate)
    except InputError as error:
        raise pytest.UsageError(escaped_lines(f"accelcheck: {error}")) from error


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Sends the controller's findings to a worker of xdist."""
    run = node.config.stash.get(_RUN, None)
    if run is not None:
        node.workerinput["accelcheck"] = json.dumps(run.as_json())  # execnet takes plain types only


def _matrix(config: pytest.Config) -> Matrix:
    if _MATRIX not in config.stash:
        from accelcheck.plugin import registered

        config.stash[_MATRIX] = registered.matrix(config)
        # torch and the registry are some 300,000 objects that live to the end. The garbage collector would visit them
        # again and again while pytest makes its items, and collection would take twice the time.
        gc.freeze()
        config.add_cleanup(gc.unfreeze)
    return config.stash[_MATRIX]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes a test that takes `accel_case` with the selected cases."""
    if "accel_case" not in metafunc.fixturenames:
        return
    run = metafunc.config.stash.get(_RUN, None)
    if run is None:
        _parametrize_nothing(metafunc, "not-asked", "accelcheck was not asked for: give --accel-device=auto")
        return
    if _REFUSED in metafunc.config.stash:
        _parametrize_nothing(metafunc, "no-case", "the cases are not known")
        return
    from accelcheck.core.case import ALONE, Mode
    from accelcheck.core.foreign import ForeignCodeError
    from accelcheck.core.registry import DuplicateNameError
    from accelcheck.report.console import escaped_lines

    marker = metafunc.definition.get_closest_marker("accel")
    named = marker.args if marker is not None else ()
    modes = [Mode(mode) for mode in named if mode in set(Mode)] or list(Mode)  # marks.check refuses other words
    if hasattr(metafunc.config, "workerinput"):
        modes = [mode for mode in modes if mode not in ALONE]
        if not modes:
            why = "timing needs the machine for itself: run accelcheck.suite.test_speed without -n"
            _parametrize_nothing(metafunc, "shared", why)
            return
    try:
        cases = _matrix(metafunc.config).cases(run.selection, modes)
    except (DuplicateNameError, ForeignCodeError) as error:  # raised here, it would be an error of each test function
        metafunc.config.stash[_REFUSED] = escaped_lines(f"accelcheck: {error}")
        cases = []
    if cases:
        metafunc.parametrize("accel_case", cases, ids=[case.id for case in cases])
    else:
        shard = f", or none is in its shard {run.selection.shard}" if run.selection.shard is not None else ""
        _parametrize_nothing(metafunc, "no-case", f"no case of this kind matches the selection{shard}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Checks the marks; drops finished cases, and in a timing process all that it does not time; marks timed cases."""
    if any(mark.name == "accel" for item in items for mark in item.own_markers):
        from accelcheck.plugin import marks

        marks.check(items)
    if _RUN not in config.stash:
        return
    refused = config.stash.get(_REFUSED, None)
    if refused is not None:
        if not hasattr(config, "workeroutput"):
            raise pytest.UsageError(refused)
        config.workeroutput["accelcheck-refused"] = refused  # the controller ends the run
        items.clear()
    from accelcheck.measure import timing_processes
    from accelcheck.plugin.benchmark import mark_timed

    if options.models(config):  # nothing can be said of a model that eager cannot run
        items.sort(key=lambda item: (case := _case(item)) is None or case.technique != "eager")
    finished = config.stash[_RUN].finished
    if finished:
        done = {item for item in items if (case := _case(item)) is not None and case.id in finished}
        config.hook.pytest_deselected(items=[item for item in items if item in done])
        items[:] = [item for item in items if item not in done]
    timed = [(item, case) for item in items if (case := _timed(item)) is not None]
    listed = timing_processes.ongoing()
    if listed is not None:
        cases = timing_processes.wanted(listed)
        kept = dict.fromkeys(item for item, case in timed if case.id in cases)  # a set would lose the order
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
    elif config.pluginmanager.hasplugin("benchmark"):
        for item, case in timed:
            mark_timed(item, case)


def _case(item: pytest.Item) -> Case | None:
    case: Case | None = getattr(getattr(item, "callspec", None), "params", {}).get("accel_case")
    return case


def _timed(item: pytest.Item) -> Case | None:
    case = _case(item)
    return case if case is not None and case.timed else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Announces the cases; then has timing processes measure the cases that are compared with baselines."""
    config = session.config
    controller: Controller | None = config.pluginmanager.getplugin("accelcheck-controller")
    if controller is not None:
        controller.announce([item.nodeid for item in session.items])
    if (run := config.stash.get(_RUN, None)) is not None and _MATRIX in config.stash:
        from accelcheck.plugin import time_limits

        time_limits.write(run.folder, config.stash[_MATRIX], filter(None, map(_case, session.items)))
    gate = config.stash.get(_GATE, None)
    timed = [case for item in session.items if (case := _timed(item)) is not None]
    if gate is None or config.option.collectonly or not (cases := gate.wanted(timed)):
        return
    from accelcheck.measure.timing_processes import TimingError
    from accelcheck.plugin.controller import timed_elsewhere
    from accelcheck.report.console import escaped_lines

    timer = functools.partial(timed_elsewhere, config, config.stash[_RUN].folder)
    try:
        gate.time(cases, options.processes(config), timer)
    except TimingError as error:
        raise pytest.UsageError(escaped_lines(f"accelcheck: {error}")) from error


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Gives the controller the scope of the run: with workers it has no matrix."""
    config = session.config
    if _RUN in config.stash and hasattr(config, "workeroutput"):
        from accelcheck.plugin import registered

        config.workeroutput["accelcheck-not-loaded"] = registered.failed(config)
    if _RUN not in config.stash or _MATRIX not in config.stash or config.option.collectonly or _REFUSED in config.stash:
        return
    from accelcheck.report.coverage import Scope

    scope = Scope.of(config.stash[_MATRIX], config.stash[_RUN].selection)
    controller: Controller | None = config.pluginmanager.getplugin("accelcheck-controller")
    if controller is not None:
        controller.scope = scope
    elif hasattr(config, "workeroutput"):
        config.workeroutput["accelcheck"] = json.dumps(scope.as_json())


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Adds the devices to the machine information of pytest-benchmark, which has no accelerators."""
    run = config.stash.get(_RUN, None)
    if run is not None:
        prints = {name: run.statuses[name].fingerprint for name in run.selection.devices}
        machine_info["accelcheck"] = {name: f.as_json() for name, f in prints.items() if f is not None}


def _parametrize_nothing(metafunc: pytest.Metafunc, name: str, reason: str) -> None:
    metafunc.parametrize("accel_case", [pytest.param(None, marks=pytest.mark.skip(reason=reason), id=name)])


@pytest.fixture(scope="session")
def accel_supervisor(request: pytest.FixtureRequest) -> Supervisor:
    """The supervisor that runs the cases of this process."""
    from accelcheck.plugin import configuration

    config = request.config
    run, gate = config.stash[_RUN], config.stash.get(_GATE, None)

    def close(end: Callable[[], None]) -> None:
        request.addfinalizer(end)  # before further processes time cases, which may need the device
        config.add_cleanup(end)

    return configuration.supervisor(config, run, _matrix(config), run.folder, close, gate)


@pytest.fixture(scope="session")
def accel_run(request: pytest.FixtureRequest) -> RunConfiguration:
    """Devices and options of this run, also of one without an option of accelcheck."""
    from accelcheck.plugin import own_models

    config = request.config
    run = config.stash.get(_RUN, None)
    return own_models.run_of(config) if run is None else run


@pytest.fixture
def accel(request: pytest.FixtureRequest, accel_run: RunConfiguration) -> Iterator[Accel]:
    """Checks of your own model: `accel.check`, `accel.check_training`, `accel.benchmark`, `accel.accuracy`.

    The random generators of Python, NumPy and torch are seeded by the test's name, so that a test's model is the same
    each time.
    """
    from accelcheck.core.case import stable_seed
    from accelcheck.plugin import own_models
    from accelcheck.workloads.own_file import seeded

    records = request.node.stash.setdefault(_RECORDS, [])
    with seeded(stable_seed(request.node.name)):
        yield own_models.Accel(request, accel_run, _matrix(request.config), records.extend)


@pytest.fixture
def accel_check(request: pytest.FixtureRequest, accel_supervisor: Supervisor) -> Callable[[Case], Record]:
    """A function that runs a case, keeps its record, and passes, skips or fails the test by the verdict."""
    from accelcheck.core.case import EFFORTS, Verdict
    from accelcheck.core.imports import OPTION
    from accelcheck.measure import timing_processes
    from accelcheck.plugin.benchmark import hand_over
    from accelcheck.report.console import escaped, escaped_lines
    from accelcheck.report.message import explain

    def check(case: Case) -> Record:
        if timing_processes.ongoing() is not None:
            timing_processes.report(case.id)
            timed = accel_supervisor.bench.ratio(case)
            timing_processes.report(case.id, timed if isinstance(timed, str) else (timed.ratio, timed.waited or 0.0))
            pytest.skip("a timing process of another run: timed, not judged")
        record = accel_supervisor.run(case)
        if printed := accel_supervisor.printed():
            print(escaped_lines(printed))
        request.node.stash.setdefault(_RECORDS, []).append(record)
        figures = ((f.view, f"{f.measured:.6g} of {f.allowed:.6g} at {f.path}") for f in record.figures)
        request.node.user_properties += [
            ("accelcheck.case", case.id),
            ("accelcheck.verdict", str(record.verdict)),
            *([("accelcheck.code", record.code)] if record.code else []),
            *((f"accelcheck.evidence.{e.label}", str(e.observed)) for e in record.evidence),
            *((f"accelcheck.view.{view}", figure) for view, figure in figures),
        ]
        if not record.verdict.executed:
            pytest.skip(escaped_lines(record.reason))
        if record.verdict is Verdict.XFAIL:
            # Under --runxfail `pytest.xfail` does nothing, and the case would pass.
            raise pytest.xfail.Exception(escaped(record.headline))  # the whole reason is in the journal
        if not record.verdict.green:
            gate = accel_supervisor.gate
            # The result is right, but too slow or too large for a baseline or a limit.
            gated = gate.words if gate is not None and record.measurements else ()
            run = request.config.stash[_RUN]
            words = (
                *(f"{OPTION}={name}" for name in run.imports),
                *(f"--accel-model={folder / spec}" for spec, folder in options.models(request.config)),
                *(f"--accel-ledger={path}" for path in run.ledgers),
                *([f"--accel-effort={word}"] if (word := options.effort(request.config)) != EFFORTS[0] else []),
            )
            pytest.fail(explain(record, (*words, *gated)), pytrace=False)
        hand_over(request.node, record)
        return record

    return check


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Sends the records to the controller with the report."""
    report = yield
    records = item.stash.get(_RECORDS, None)
    if records and report.when == "call":
        # Text, because execnet takes plain types only; on the report, because xdist sends reports during the run.
        vars(report)["accelcheck"] = json.dumps([record.as_json() for record in records])
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints the records of the fixture `accel` in a run without options of accelcheck, which has no controller."""
    if config.pluginmanager.hasplugin("accelcheck-controller"):
        return
    sent = [getattr(report, "accelcheck", None) for reports in terminalreporter.stats.values() for report in reports]
    if not any(sent):
        return
    from accelcheck.core.journal import Record
    from accelcheck.report import terminal

    records = [Record.from_json(fields) for text in sent if text for fields in json.loads(text)]
    terminal.brief(terminalreporter, records)
