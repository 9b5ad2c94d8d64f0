"""Judges a result that exceeds its budget slightly again: by more samples, or by a class of fast algorithms.

Each part of a divisible workload is judged by itself: its budgets then depend on no other part, and sampling one
operator costs less than sampling all.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from accelcheck.checks.trial import Trial
from accelcheck.core.fault import Fault
from accelcheck.verify.algorithms import ALGORITHMS, admitted
from accelcheck.verify.effort import CAREFUL
from accelcheck.verify.judge import Judgement, judge, judge_together, may_be_algorithmic
from accelcheck.verify.reference import InapplicableError, Reference, VacuousError
from accelcheck.verify.views import Reading
from accelcheck.workloads.base import Result
from accelcheck.workloads.probes import Draw
from accelcheck.workloads.problem import Divisible, divided, part_of

Alike = Sequence[tuple[Draw, Mapping[str, Reading], Reference]]
"""Draws of one kind, with the readings and the reference of each."""

WHOLE = ""
"""Label of all parts together."""


@dataclass
class CloserLooks:
    """Judges again where a result is close to its budget.

    `needed` has the draws that are right only by the budget of a class of fast algorithms, by class.
    """

    trial: Trial
    needed: dict[str, list[Draw]] = field(default_factory=dict)
    _inapplicable: set[tuple[str, str]] = field(default_factory=set)
    """Pairs of part and algorithm class that no operator of the part has, in any draw."""

    def judged(
        self, result: Result, judgement: Judgement, reference: Reference, draw: Draw
    ) -> tuple[Judgement, Reference]:
        """Returns the judgement, by more samples where it is close, and its reference."""
        divisible = self.trial.workload.divisible
        for part in self._parts(judgement.near(1, reference, divisible=divisible)):
            if (closer := self._reference(draw, 1, part)) is None:
                continue
            again = judge(result, closer)
            if again.near(2, closer, divisible=divisible) and (closest := self._reference(draw, 2, part)) is not None:
                closer, again = closest, judge(result, closest)
            judgement, reference = judgement.amended(again, closer.judged), reference.amended(closer)
        for part in self._parts(fault.path for fault in judgement.faults):
            if (algorithmic := self._by_algorithm(result, judgement.faults, draw, part)) is not None:
                again, closer = algorithmic
                judgement, reference = judgement.amended(again, closer.judged), reference.amended(closer)
        return judgement, reference

    def together(self, alike: Alike) -> Judgement:
        """Judges several draws together, by more samples where it is close: means of small samples may all be low."""
        divisible = self.trial.workload.divisible
        judgement = judge_together([(readings, reference) for _, readings, reference in alike])
        for part in self._parts(judgement.near(1, divisible=divisible)):
            for careful in (1, 2):
                if (looked := self._looked_together(alike, careful, part)) is None:
                    break
                again, paths = looked
                judgement = judgement.amended(again, paths)
                if not again.near(2, divisible=divisible):
                    break
        return judgement

    def _looked_together(self, alike: Alike, careful: int, part: str) -> tuple[Judgement, frozenset[str]] | None:
        """Returns the judgement of several draws of a part, and its paths."""
        references = [self._reference(draw, careful, part) for draw, *_ in alike]
        known = [reference.summary for reference in references if reference is not None]
        if len(known) < len(alike):
            return None
        looked = [(readings, reference) for (_, readings, _), reference in zip(alike, known, strict=True)]
        paths = frozenset.intersection(*(frozenset(reference.leanings) for reference in known))
        return judge_together(looked, careful=careful == len(CAREFUL)), paths

    def _reference(self, draw: Draw, careful: int, part: str, algorithm: str = "") -> Reference | None:
        """Returns the reference by more samples; None where, for a part alone, rounding decides its result.

        A part's reference has only tensors that no other part adds to, as to the gradient of a shared input.
        """
        try:
            reference = self.trial.reference(draw, careful=careful, algorithm=algorithm, part=part)
        except VacuousError:
            if part == WHOLE and not algorithm:
                raise
            return None
        if part == WHOLE:
            return reference
        return reference.limited({path for path in reference.truth if part_of(self._module, path) == part})

    @functools.cached_property
    def _module(self) -> Divisible:
        return divided(self.trial.problem(self.trial.case.seed).module)

    def _parts(self, paths: Iterable[str]) -> Sequence[str]:
        """Returns the parts that have these paths; `WHOLE` alone where a path belongs to several."""
        paths = set(paths)
        if not paths:
            return ()
        parts = {part_of(self._module, path) if self.trial.workload.divisible else WHOLE for path in paths}
        return (WHOLE,) if WHOLE in parts else sorted(parts)

    def _by_algorithm(
        self, result: Result, faults: Iterable[Fault], draw: Draw, part: str
    ) -> tuple[Judgement, Reference] | None:
        """Returns the judgement and reference of the first fast algorithm class in which a part is right, or None."""
        technique, dtype = self.trial.technique, self.trial.case.dtype
        if technique.oracle != "float64" or technique.precision(dtype) != "float32" or dtype != "float32":
            return None
        own = [fault for fault in faults if part == WHOLE or part_of(self._module, fault.path) == part]
        if any(not may_be_algorithmic(fault, tuple(result[fault.path].shape)) for fault in own):
            return None
        for name in ALGORITHMS:
            if (part, name) in self._inapplicable:
                continue
            try:
                reference = self._reference(draw, 1, part, name)
            except InapplicableError:
                self._inapplicable.add((part, name))
                continue
            if reference is None:  # its samples explain nothing
                continue
            again = judge(admitted(result, reference.truth, reference.spread_over), reference)
            if not again.faults:
                self.needed.setdefault(name, []).append(draw)
                return again, reference
        return None
