"""Claims beside measurements, as text and as JSON. No torch."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from accelcheck.experiments.claims.catalogue import Claim, ClaimResult, ClaimStatus, Measured, What
from accelcheck.report.console import Table

_HEAD = ("claim", "promised", "measured here", "outcome", "promised for")


def text(answers: Sequence[ClaimResult]) -> list[str | Table]:
    """The report as text: a row per claim, the origin of its figures, reasons for missing ones, sources, counts."""
    lines: list[str | Table] = [Table(_HEAD, [_row(answer) for answer in answers])]
    for title, part in (
        ("What was measured", [f"{a.claim.name}: {a.claim.workload}: {a.measured.how}" for a in answers if a.measured]),
        ("Not measurable here", _grouped((a.claim.name, a.reason) for a in answers if a.reason)),
        ("Published", _grouped((a.claim.name, f"{a.claim.published} {a.claim.source}".strip()) for a in answers)),
    ):
        lines += ["", title, *part] if part else []
    return [*lines, "", counts(answers)]


def counts(answers: Sequence[ClaimResult]) -> str:
    """Number of claims by outcome, in one line."""
    tally = Counter(answer.outcome for answer in answers)
    parts = ", ".join(f"{tally[outcome]} {outcome}" for outcome in ClaimStatus if tally[outcome])
    broken = sum(answer.broken for answer in answers)
    return f"{len(answers)} claims: {parts}" + (f"; {broken} of them wrong or with an error" if broken else "")


def as_json(answers: Sequence[ClaimResult]) -> dict[str, Any]:
    """JSON-ready values: claims by name."""
    return {"claims": {answer.claim.name: _plain(answer) for answer in answers}}


def promised(claim: Claim) -> str:
    """A claim's figure in words."""
    if claim.what.bounded:
        return f"at most {_figure(claim.what, claim.figure)}"
    if claim.most is not None:
        return f"{_figure(claim.what, claim.figure)} to {_figure(claim.what, claim.most)}"
    return f"at least {_figure(claim.what, claim.figure)}"


def _plain(answer: ClaimResult) -> dict[str, Any]:
    claim, measured = answer.claim, answer.measured
    return {
        **{name: getattr(claim, name) for name in ("what", "workload", "least", "most", "source")},
        "devices": list(claim.classes),
        "published": claim.published,
        "outcome": answer.outcome,
        **({"value": None, "low": None, "high": None, "how": ""} if measured is None else asdict(measured)),
        "code": answer.code,
        "reason": answer.reason,
    }


def _row(answer: ClaimResult) -> tuple[str, ...]:
    claim = answer.claim
    figure = "-" if answer.measured is None else _measured(claim.what, answer.measured)
    return claim.name, promised(claim), figure, answer.outcome, ", ".join(claim.classes)


def _measured(what: What, found: Measured) -> str:
    value, low, high = (_figure(what, number) for number in (found.value, found.low, found.high))
    return value if found.low == found.high else f"{value} ({low} to {high})"


def _figure(what: What, number: float) -> str:
    if what is What.SPEED_UP:
        return f"{number:.2f}x"
    if what is What.EXTRA_TIME:
        return f"{100 * number:+.1f} %"
    if what is What.MEMORY:
        return f"{-100 * number:+.1f} %"
    return f"{number:.2g} relative" if what is What.ERROR else f"{number:.3g}x a doubling"


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Lines that apply to several claims, each once."""
    groups: dict[str, list[str]] = {}
    for name, text in pairs:
        groups.setdefault(text, []).append(name)
    return [f"{', '.join(names)}: {text}" for text, names in groups.items()]
