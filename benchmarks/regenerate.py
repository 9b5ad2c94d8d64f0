"""Writes every file that is derived from the source and from stored results: ``nox -s regenerate``.

    python benchmarks/regenerate.py             # write stale files; about 20 s, more for a workload without ceilings
    python benchmarks/regenerate.py --check     # name stale files; exit status 1 where there is one
    python benchmarks/regenerate.py cuda.jsonl  # with the journal of a whole run, which confirms a must-pass list

`derived` has the writer of each file. `MEASURED` lists the files that need another machine or many minutes, with their
commands; they are not written here. A must-pass list takes up a case only after a run has passed it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import budget_ceilings
import gate_table
import must_pass
import verdict_speed

from accelcheck import cli
from accelcheck.expectations import ceilings
from accelcheck.expectations.must_pass import SUFFIX, parsed
from accelcheck.report.run import load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

ROOT = Path(__file__).resolve().parent.parent
COMMAND = "nox -s regenerate"
RESULTS = ROOT / "baselines" / "cpu"


def reference(_: str) -> str:
    return str(runpy.run_path(str(ROOT / "docs" / "tools" / "reference.py"))["page"]())


def techniques(_: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        cli.main(["list", "--markdown"])
    return printed.getvalue()


def verdicts(page: str) -> str:
    """The tables of two stored results."""
    rules, cost = stored("verdict_rules.json")["rules"], stored("verdict_speed.json")
    parts = [key for key in ("caught", "caught-with-hidden", "failed", "failed-without-int8") if key in rules[0]]
    page = tabled(page, "| rule |", (row(rule["rule"], *(f"{rule[key]:.1%}" for key in parts)) for rule in rules))
    times = (
        row(
            f"2^{time['exponent']}",
            str(time["threads"]),
            verdict_speed.human(time["verdict"]),
            verdict_speed.human(time["assert_close"]),
            f"{time['ratio']:.2f}",
            f"{time['low']:.2f} to {time['high']:.2f}",
        )
        for time in cost["times"]
    )
    page = tabled(page, "| elements | threads |", times)
    memory = (row(f"2^{size['exponent']}", f"{size['bytes'] / 2**20:.2f} MiB") for size in cost["memory"])
    return tabled(page, "| elements | memory beyond the inputs |", memory)


def gates(page: str) -> str:
    sessions = [line for line in gate_table.read([RESULTS / "speed_gates.jsonl"]) if line["kind"] == "session"]
    tallies, _ = gate_table.gates(sessions)
    return tabled(page, gate_table.HEADER, gate_table.rows([*gate_table.saved_runs(sessions), *tallies]))


def cases(before: str) -> str:
    there = runpy.run_path(str(ROOT / "tests" / "stored_cases.py"))
    every = there["everything"]()
    if gone := sorted(set(there["parsed"](before)) - there["facts"](every)):
        raise SystemExit(
            f"{len(gone)} stored cases are gone or have another level or seed, such as {gone[0]}: ledgers, "
            "baselines and journals name them. "
            "If that is meant, remove tests/cases.txt, run this again, and say why in CHANGELOG.md"
        )
    return str(there["written"](every))


def limits(text: str) -> str:
    """Ceilings of today's references: the stored ones, and measured ones where none is stored."""
    kept, names = ceilings.parsed(text), {name for name, *_ in budget_ceilings.references()}
    comparison = budget_ceilings.measured(without=kept) if names - kept.keys() else {}
    return ceilings.written({name: views for name, views in {**kept, **comparison}.items() if name in names})


def versions(text: str, journals: Sequence[Path] = ()) -> str:
    """Hashes of all past and present versions of must-pass lists."""
    known = dict(line.rsplit(" ", 1) for line in text.splitlines())
    for kind, content in lists(tuple(journals)).items():
        stored_list = parsed(kind, content)
        known.setdefault(f"{kind} {stored_list.version}", stored_list.digest)
    return "".join(f"{name} {digest}\n" for name, digest in sorted(known.items()))


@functools.cache
def lists(journals: tuple[Path, ...]) -> dict[str, str]:
    """The must-pass lists by class, from the stored journals of whole runs and those that are given."""
    return must_pass.lists(load([*sorted((ROOT / "baselines").glob("*/level?.jsonl")), *journals]))


def derived(journals: Sequence[Path] = ()) -> dict[str, Callable[[str], str]]:
    """Writer of each derived file, by path: makes the text from the stored one, which is empty where there is none."""
    folder = must_pass.TARGET.relative_to(ROOT)

    def written(text: str) -> Callable[[str], str]:
        return lambda _: text

    return {
        "tests/cases.txt": cases,
        "docs/reference.md": reference,
        "docs/techniques.md": techniques,
        "docs/verdicts.md": verdicts,
        "docs/speed.md": gates,
        **{f"{folder}/{kind}{SUFFIX}": written(text) for kind, text in lists(tuple(journals)).items()},
        "tests/must_pass.txt": functools.partial(versions, journals=journals),
        "accelcheck/expectations/ceilings.json": limits,
    }


MEASURED = {
    "accelcheck/expectations/ceilings.json": "python benchmarks/budget_ceilings.py, for lower ones: 8 minutes",
    "accelcheck/workloads/torch_operators.json": "python benchmarks/torch_operators.py, after a torch release: 20 min",
    "docs/vendor_faults.md": "python benchmarks/vendor_faults.py > docs/vendor_faults.md, with acme-npu: minutes",
    "docs/checked_models.md": "accelcheck check of examples/language, with transformers: minutes",
    "docs/images": "nox -s browser: Chromium",
    "baselines": "baselines/README.md has the commands: a quiet machine, or another device",
}
"""Files with measured results, each with its command and needs."""


def stored(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def tabled(page: str, header: str, rows: Iterable[str]) -> str:
    """The page with these rows in the table whose header begins so."""
    lines = page.splitlines()
    first = 2 + next(number for number, line in enumerate(lines) if line.startswith(header))
    last = next(number for number in range(first, len(lines)) if not lines[number].startswith("|"))
    return "\n".join([*lines[:first], *rows, *lines[last:], ""])


def renewed(path: str, write: Callable[[str], str]) -> str | None:
    """The right text of a stale derived file; None where it is up to date."""
    file = ROOT / path
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    after = write(before)
    return None if after == before else after


def main() -> int:
    """Write or name what is stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "journals", nargs="*", type=Path, metavar="JOURNAL", help="of a whole run, besides the stored ones"
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args()
    stale = 0
    for path, write in derived(given.journals).items():
        text = renewed(path, write)
        if text is None:
            continue
        stale += 1
        print(f"{path}: stale: run {COMMAND}" if given.check else f"{path}: written")
        if not given.check:
            (ROOT / path).write_text(text, encoding="utf-8")
    if not given.check:
        print("".join(f"{path}: measured, not written here: {how}\n" for path, how in MEASURED.items()), end="")
    return int(bool(stale) and given.check)


if __name__ == "__main__":
    sys.exit(main())
