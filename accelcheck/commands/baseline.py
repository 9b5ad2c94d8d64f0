"""Shows, compares, updates and prunes stored baselines."""

import argparse
import functools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelcheck.commands.common import GREEN, NOTHING, RED, add_import, refuse
from accelcheck.commands.parsing import add_json, examples, print_json
from accelcheck.core.case import LEVELS
from accelcheck.core.registry import unknown
from accelcheck.core.selection import Selection
from accelcheck.measure.baselines import Baseline, Baselines
from accelcheck.measure.regression import CHECKED, change
from accelcheck.plugin import options, registered
from accelcheck.report import console


def add(commands: Any) -> None:
    baseline = commands.add_parser("baseline", help="stored figures: show, compare, update, prune", description=__doc__)
    baseline.add_argument(
        "--baselines",
        type=Path,
        metavar="FOLDER",
        help="folder of the baselines (default: the one that pytest uses in this folder: accel_baselines, or else "
        "baselines)",
    )
    examples(
        baseline,
        ("accelcheck baseline show", "what is stored"),
        ("accelcheck baseline update --device=cuda", "time level 2 on a GPU, and store it"),
    )
    actions = baseline.add_subparsers(dest="action", required=True)
    show = actions.add_parser(
        "show", help="stored ratios, and the smallest slowdown that a check of three processes finds"
    )
    show.add_argument("place", nargs="?", help="one folder, as show prints it (default: all)")
    add_json(show)
    examples(
        show, ("accelcheck baseline show", "every stored case"), ("accelcheck baseline show --json", "for programs")
    )
    show.set_defaults(run=_show)
    compare = actions.add_parser(
        "compare", help="compare two folders case by case; the exit code is 1 if the second is slower"
    )
    compare.add_argument("first", help="folder, as `accelcheck baseline show` prints it")
    compare.add_argument("second", help="folder that is compared with the first one")
    add_json(compare)
    examples(compare, ("accelcheck baseline compare cpu-x/torch-2.12 cpu-x/torch-2.13", "two folders that show prints"))
    compare.set_defaults(run=_compare)
    update = actions.add_parser("update", help="time the suite on a device in ten processes, and store the ratios")
    update.add_argument("--device", default="cpu", help="device to time (default: cpu)")
    add_import(update)
    update.add_argument("--new-only", action="store_true", help="keep stored baselines, and add missing ones")
    update.add_argument("arguments", nargs="*", help="further arguments of pytest, after --")
    examples(
        update,
        ("accelcheck baseline update --device=cuda", "time level 2 anew"),
        ("accelcheck baseline update --new-only -- -k eager", "add what is missing, of some cases"),
    )
    update.set_defaults(run=_update)
    prune = actions.add_parser(
        "prune", help="remove baselines of cases that no longer exist, and files that killed writers left"
    )
    unknown = "also remove baselines of techniques and workloads that are not registered"
    prune.add_argument("--unknown", action="store_true", help=unknown)
    prune.add_argument("--dry-run", action="store_true", help="print what would be removed, and remove nothing")
    examples(prune, ("accelcheck baseline prune --dry-run", "what would be removed"))
    prune.set_defaults(run=_prune)


def _store(given: argparse.Namespace) -> Baselines:
    """Returns the named store, or that of a pytest run in this folder."""
    return Baselines(given.baselines or options.baselines(registered.here()))


def _show(given: argparse.Namespace) -> int:
    store = _store(given)
    places = _places(store)
    if not places:
        return refuse(f"{store.root}: no baseline is stored", NOTHING)
    chosen = places if given.place is None else {given.place: _named(places, given.place)}
    shown = {
        folder: [
            (
                baseline.case,
                baseline.ratio,
                change(baseline.ratio, replace(baseline.ratio, count=CHECKED), len(stored)).smallest - 1,
            )
            for baseline in stored.values()
        ]
        for folder, stored in chosen.items()
    }
    if given.json:
        fields = ("case", "ratio", "spread", "processes", "slowdown")
        folders = {
            folder: [
                dict(zip(fields, (case, ratio.factor, ratio.spread, ratio.count, seen), strict=True))
                for case, ratio, seen in rows
            ]
            for folder, rows in shown.items()
        }
        print_json("baseline show", {"folders": folders})
        return GREEN
    head = ("case", "time / FP32 eager's", "spread", "processes", "slowdown found")
    for folder, rows in shown.items():
        cells = [
            (case, f"{ratio.factor:.4f}", f"{100 * ratio.spread:.2f} %", str(ratio.count), f"{100 * seen:.1f} %")
            for case, ratio, seen in rows
        ]
        console.show([folder, console.Table(head, cells, right=range(1, len(head)), indent=2)])
    return GREEN


def _compare(given: argparse.Namespace) -> int:
    places = _places(_store(given))
    first, second = _named(places, given.first), _named(places, given.second)
    both = [case for case in first if case in second and _work(first[case]) == _work(second[case])]
    held = {case: change(first[case].ratio, second[case].ratio, len(both)) for case in both}
    factors = {
        case: (first[case].ratio.factor, second[case].ratio.factor, difference.factor, difference.limit)
        for case, difference in held.items()
    }
    only = {"first": sorted(set(first) - set(both)), "second": sorted(set(second) - set(both))}
    if given.json:
        names = ("first", "second", "change", "limit")
        cases = [
            {"case": case, **dict(zip(names, factors[case], strict=True)), "slower": difference.regression}
            for case, difference in held.items()
        ]
        print_json("baseline compare", {"cases": cases, "only": only})
    else:
        rows = [
            (case, *(f"{factor:.4f}" for factor in factors[case]), "slower" if difference.regression else "")
            for case, difference in held.items()
        ]
        console.show([console.Table(("case", "first", "second", "change", "limit", ""), rows, right=range(1, 5))])
        for name, cases_of_one in only.items():
            print(f"only in the {name} folder, or changed since: {len(cases_of_one)} cases")
    if not both:
        return NOTHING
    return RED if any(difference.regression for difference in held.values()) else GREEN


def _update(given: argparse.Namespace) -> int:
    use = "new-only" if given.new_only else "update"
    command = [
        *(sys.executable, "-m", "pytest", "--pyargs", "accelcheck.suite.test_speed"),
        *(f"--accel-device={given.device}", "--accel-require", "--accel-level=2"),
        *(f"--accel-import={module}" for module in given.imports),
        *([] if given.baselines is None else [f"--accel-baselines={given.baselines.resolve()}"]),
        *(f"--accel-baseline={use}", *given.arguments),
    ]
    return subprocess.run(command, check=False).returncode  # noqa: S603 - the command that the user asked for


def _prune(given: argparse.Namespace) -> int:
    known = registered.matrix(registered.here())
    store = _store(given)

    @functools.cache
    def existing(device: str) -> set[str]:
        return {case.id for case in known.cases(Selection((device,), level=max(LEVELS)))}

    stale, foreign = store.partial(), list[Path]()
    for path, baseline in store.stored():
        technique, workload = baseline.case.split("/")[:2] if baseline.case.count("/") > 1 else ("", "")
        if technique not in known.techniques or workload not in known.workloads:
            (stale if given.unknown else foreign).append(path)
        elif baseline.case not in existing(baseline.place.device):
            stale.append(path)
    for path in stale:
        print(path)
        if not given.dry_run:
            store.remove(path)
    print(f"{len(stale)} files {'would be removed' if given.dry_run else 'removed'}")
    if foreign:
        print(
            f"{len(foreign)} kept: their techniques or workloads are not registered here, perhaps by plugins of "
            "another folder; --unknown removes them too"
        )
    return GREEN


def _work(baseline: Baseline) -> tuple[object, ...]:
    """Returns the parts that comparable baselines of a case must share."""
    return baseline.digest, baseline.environment


def _places(store: Baselines) -> dict[str, dict[str, Baseline]]:
    places: dict[str, dict[str, Baseline]] = {}
    for _, baseline in store.stored():
        places.setdefault(baseline.place.folder, {})[baseline.case] = baseline
    return places


def _named(places: dict[str, dict[str, Baseline]], name: str) -> dict[str, Baseline]:
    if name not in places:
        raise unknown("folder of baselines", name, sorted(places))
    return places[name]
