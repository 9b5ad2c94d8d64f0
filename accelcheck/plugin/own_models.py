"""The fixture ``accel``: checks of user-owned models in the user's tests."""

from __future__ import annotations

import fnmatch
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from accelcheck.core.case import LEVELS, Mode, stable_seed
from accelcheck.core.registry import UnknownNameError, unknown
from accelcheck.core.selection import Selection
from accelcheck.expectations.limits import Limit
from accelcheck.measure.gate import Use
from accelcheck.plugin import configuration, options
from accelcheck.plugin.marks import Words, WordsError
from accelcheck.plugin.own_explanations import OWN, OwnExplanations
from accelcheck.report.advice import advice
from accelcheck.report.console import escaped_lines, plain
from accelcheck.report.message import explain
from accelcheck.techniques.matrix import Matrix
from accelcheck.workloads.nested import OwnModelError
from accelcheck.workloads.own_model import STEPS, task_of, workload_of

if TYPE_CHECKING:
    from torch import Tensor

    from accelcheck.checks.execute import Bench
    from accelcheck.core.journal import Record
    from accelcheck.workloads.base import OptimizerMaker, Workload
    from accelcheck.workloads.own_task import Metric

EXPLAINED = 3
"""Most wrong cases that a failing test explains; each other one has a line."""
LONGEST = 48
"""Longest name of a workload, in characters."""


@dataclass(frozen=True)
class Checked:
    """The results of a check: records of all its cases, and reasons why techniques were not tried, by name."""

    records: tuple[Record, ...]
    refused: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, technique: str) -> tuple[Record, ...]:
        """The records of a technique; raises `UnknownNameError` where it has none."""
        records = tuple(record for record in self.records if record.case.technique == technique)
        if not records:
            raise unknown("technique with a record", technique, sorted({r.case.technique for r in self.records}))
        return records

    def __str__(self) -> str:
        return "\n".join(plain(advice(self.records, self.refused)))


class Accel:
    """Checks models of one test. Each method returns its results, or fails the test where a technique is wrong.

    All take, by keyword, ``techniques``, ``devices`` and ``dtypes``, lists of names (techniques may be globs);
    ``level``, 1 to 4, the highest level of techniques to try; and ``name``, a part of case ids. The mark ``accel`` of
    the test sets them for all its checks, and options of the run set the rest. The default is every technique of level
    1 that applies to the model, on all devices that are present, in FP32. Named techniques are tried at any level.
    """

    def __init__(
        self,
        request: pytest.FixtureRequest,
        run: configuration.RunConfiguration,
        matrix: Matrix,
        keep: Callable[[Sequence[Record]], None],
    ) -> None:
        self._request, self._run, self._matrix, self._keep = request, run, matrix, keep
        mark = request.node.get_closest_marker("accel")
        self._marked = Words.of(f"{request.node.nodeid}: mark accel", mark.kwargs if mark is not None else {})
        self._names: set[str] = set()

    def check(
        self,
        model: Callable[..., Any],
        inputs: tuple[Any, ...] = (),
        keywords: Mapping[str, Any] | None = None,
        *,
        sizes: Sequence[Any] | None = None,
        estimators: Sequence[str] = (),
        name: str = "",
        **words: Any,
    ) -> Checked:
        """Checks outputs, and gradients where there are any, under every technique: against the FP64 oracle.

        Args:
            model: A module, or a function of tensors; on the CPU, in FP32. It is copied, and never changed.
            inputs: Positional arguments of the model.
            keywords: Keyword arguments of the model.
            sizes: Example inputs of other sizes; by default sizes that the model accepts, by
                `accelcheck.api.workload_of`.
            estimators: Names of custom autograd functions whose gradients are meant to differ from the derivatives.
            name: Part of case ids; by default made of the test's name.
            **words: ``techniques``, ``devices``, ``dtypes``, ``level``.
        """
        __tracebackhide__ = True
        given = {"sizes": sizes, "estimators": estimators}
        workload = _made(workload_of, model, inputs, keywords, name=self._name(name), **given)
        return self._checked(workload, (Mode.FORWARD, Mode.BACKWARD), words)

    def check_training(
        self,
        model: Callable[..., Any],
        batches: Iterable[Any],
        loss: Callable[..., Tensor],
        optimizer: OptimizerMaker,
        *,
        steps: int = STEPS,
        name: str = "",
        **words: Any,
    ) -> Checked:
        """Checks losses, final parameters and buffers of a few optimizer steps under every technique, like `check`.

        Args:
            model: See `check`.
            batches: Pairs of input and target, one a step: see `accelcheck.api.workload_of`.
            loss: Function ``loss(output, target)`` of the model's output that returns a 0-D tensor.
            optimizer: Function from a list of parameters to an optimizer, such as ``torch.optim.AdamW``.
            steps: Number of steps.
            name: See `check`.
            **words: See `check`.
        """
        __tracebackhide__ = True
        given = {"batches": batches, "loss": loss, "optimizer": optimizer, "steps": steps}
        return self._checked(_made(workload_of, model, name=self._name(name), **given), (Mode.TRAIN,), words)

    def benchmark(
        self,
        model: Callable[..., Any],
        inputs: tuple[Any, ...] = (),
        keywords: Mapping[str, Any] | None = None,
        *,
        batches: Iterable[Any] | None = None,
        loss: Callable[..., Tensor] | None = None,
        optimizer: OptimizerMaker | None = None,
        name: str = "",
        **words: Any,
    ) -> Checked:
        """Measures a correct forward pass, with `batches` also a training step, beside FP32 eager in the same process.

        It needs the machine for itself: with workers of pytest-xdist the test is skipped.

        Args:
            model: See `check`.
            inputs: See `check`.
            keywords: See `check`.
            batches: See `check_training`; with them, no inputs or keywords.
            loss: See `check_training`.
            optimizer: See `check_training`.
            name: See `check`.
            **words: See `check`; also ``limits``, a dict of ``speed-up-at-least``, ``memory-at-most`` (times FP32
                eager's) and ``first-call-at-most`` (seconds), which fail the test.
        """
        __tracebackhide__ = True
        if hasattr(self._request.config, "workerinput"):
            pytest.skip("timing needs the machine for itself: run this test without -n")
        given = {"batches": batches, "loss": loss, "optimizer": optimizer}
        workload = _made(workload_of, model, inputs, keywords, name=self._name(name), **given)
        return self._checked(workload, (Mode.SPEED, Mode.TRAIN_SPEED), words)

    def accuracy(
        self,
        model: Callable[..., Any],
        data: Iterable[Any],
        metric: Metric,
        *,
        max_drop: float = 0.01,
        name: str = "",
        **words: Any,
    ) -> Checked:
        """Checks the mean score of held-out data under every technique: against that of FP32 eager.

        Args:
            model: A trained model; see `check`.
            data: Pairs of input and target.
            metric: Function ``metric(output, target)``: a score for each sample, larger is better; see
                `accelcheck.api.task_of`.
            max_drop: Largest drop of the mean score.
            name: See `check`.
            **words: See `check`.
        """
        __tracebackhide__ = True
        task = _made(task_of, model, data, metric, max_drop=max_drop, name=self._name(name))
        return self._checked(task, (Mode.ACCURACY,), words)

    def _name(self, given: str) -> str:
        """A name that no other check of this test has."""
        node = self._request.node
        path = re.sub(r"[^a-z0-9]+", "-", f"{node.path.stem}.{node.name}".lower().replace(".", "-")).strip("-")
        name = given or (path if len(path) <= LONGEST else f"{path[: LONGEST - 9].strip('-')}-{stable_seed(path):08x}")
        number = 1
        while (unique := name if number == 1 else f"{name}.{number}") in self._names:
            number += 1
        self._names.add(unique)
        return unique

    def _checked(self, workload: Workload, modes: Sequence[Mode], words: Mapping[str, Any]) -> Checked:
        __tracebackhide__ = True
        node = self._request.node
        asked = Words.of(node.nodeid, words).over(self._marked)
        matrix = Matrix(self._matrix.techniques, {workload.name: workload}, self._matrix.seconds)
        try:
            selection = self._selection(asked)
            matrix.check(replace(selection, workloads=()))
        except UnknownNameError as error:
            raise WordsError(f"{node.nodeid}: {error}") from None
        cases = matrix.cases(selection, modes)
        refused = {
            name: why
            for name, why in matrix.refusals(workload).items()
            if not selection.techniques or any(fnmatch.fnmatchcase(name, word) for word in selection.techniques)
        }
        if not cases:
            raise WordsError(escaped_lines(f"{node.nodeid}: {self._nothing(selection, refused)}"))
        run = replace(self._run, selection=selection)
        config = self._request.config
        limits = tuple(Limit(("*",), kind, bound, "a limit of the test") for kind, bound in asked.limits.items())
        gate = replace(configuration.gate(config, run), use=Use.OFF)
        gate.limits += limits
        with ExitStack() as ended, tempfile.TemporaryDirectory(prefix="model-", dir=run.folder) as folder:
            began = time.monotonic()
            supervisor = configuration.supervisor(config, run, matrix, Path(folder), ended.callback, gate)
            records = []
            for case in cases:
                records.append(supervisor.run(case))
                if printed := supervisor.printed():
                    print(escaped_lines(printed))
            self._keep(records)
            why = self._explained(supervisor.bench, records, time.monotonic() - began)
        checked = Checked(tuple(records), refused)
        self._end(checked, why)
        return checked

    def _explained(self, bench: Bench, records: Sequence[Record], seconds: float) -> list[str]:
        """Explains failures with ``--accel-explain``; a line for each."""
        config = self._request.config
        if not options.value(config, "explain"):
            return []
        own = config.stash.setdefault(OWN, OwnExplanations())
        own.worked += seconds
        return [*own.explain(config, bench, records)]

    def _selection(self, asked: Words) -> Selection:
        own, known = self._run.selection, self._run.statuses
        devices = options.chosen_devices(asked.devices, known, known) if asked.devices else own.devices
        techniques, dtypes = asked.techniques or own.techniques, asked.dtypes or own.dtypes or ("float32",)
        level = max(LEVELS) if techniques else own.level
        return Selection(devices, techniques, dtypes=dtypes, level=level if asked.level is None else asked.level)

    def _nothing(self, selection: Selection, refused: Mapping[str, str]) -> str:
        """The reason why there is no case."""
        if refused and selection.techniques:
            reasons = "; ".join(f"{name} {why}" for name, why in sorted(refused.items())[:EXPLAINED])
            return f"none of the techniques asked for can be tried with this model: {reasons}"
        if not selection.devices:
            return "no device is present"
        return f"no technique of level {selection.level} has a case of this kind: give a higher level, or other dtypes"

    def _end(self, checked: Checked, why: Sequence[str]) -> None:
        """Fails the test where a case is wrong, with lines about explanations; skips it where none ran."""
        wrong = [record for record in checked.records if not record.verdict.green]
        command = shlex.join(["pytest", self._request.node.nodeid])
        if wrong:
            shown = [explain(record, command=command) for record in wrong[:EXPLAINED]]
            shown += [f"{record.case.id}: {record.verdict}" for record in wrong[EXPLAINED:]]
            pytest.fail("\n\n".join([*shown, *why, str(checked)]), pytrace=False)
        if not any(record.verdict.executed for record in checked.records):
            reasons = dict.fromkeys(f"{record.case.technique}: {record.reason}" for record in checked.records)
            pytest.skip(escaped_lines("; ".join(reasons)))


def _made(make: Callable[..., Workload], *arguments: Any, **words: Any) -> Workload:
    """The workload, or its error without the frames below the test's line."""
    __tracebackhide__ = True
    try:
        return make(*arguments, **words)
    except OwnModelError as error:
        raise OwnModelError(str(error)) from error.__cause__


def run_of(config: pytest.Config) -> configuration.RunConfiguration:
    """Devices and options for a test that uses ``accel`` in a run without any option of accelcheck."""
    try:
        return configuration.RunConfiguration.find(config)
    except ValueError as error:  # an option or a setting is wrong, or a plugin
        raise pytest.UsageError(escaped_lines(f"accelcheck: {error}")) from error
