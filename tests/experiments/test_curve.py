"""The compile curve: chains, points from known clocks, their crossing, and the command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from technique_harness import StubDevice

from accelcheck import cli
from accelcheck.commands import common
from accelcheck.commands import curve as command
from accelcheck.commands.common import GREEN, NOTHING, RED, USAGE
from accelcheck.core.capability import SUPPORTED, Code, unavailable
from accelcheck.core.registry import UnknownNameError
from accelcheck.experiments import curve, curve_report
from accelcheck.experiments import curve_report as report
from accelcheck.measure.curve import COLUMNS, COUNTS, MOST, ROWS, BreakEven, Form, Gap, Point, Shapes, break_even
from accelcheck.report import results
from accelcheck.report.console import plain
from accelcheck.techniques.observe import OperatorLog

STATIC, DYNAMIC, FIXED, VARYING = Form.STATIC, Form.DYNAMIC, Shapes.FIXED, Shapes.VARYING
SOON = (0.01,)


def made(
    count: int, ratio: float, form: Form = STATIC, shapes: Shapes = FIXED, width: float = 0.01, **more: Any
) -> Point:
    facts: dict[str, Any] = {
        "first": 1.0,
        "eager_first": 0.0,
        "graphs": 1,
        "recompilations": 0,
        "programs": None,
        **more,
    }
    eager = 2e-6 * count
    return Point(count, shapes, form, eager, eager * ratio, ratio, ratio - width, ratio + width, 9, **facts)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 14, 30])
def test_a_chain_has_as_many_operators_as_statements(count: int) -> None:
    x = torch.randn(4, COLUMNS)
    log = OperatorLog("cpu")
    with log:
        curve.chain(count)(x)
    assert log.names().total() == count


def test_every_chain_differs_from_a_shorter_one_and_stays_small() -> None:
    x = torch.randn(32, COLUMNS, dtype=torch.float64)
    before = x
    for count in range(1, MOST + 1):
        out = curve.chain(count)(x)
        assert not torch.equal(out, before)
        assert float(out.abs().max()) <= curve.LARGEST
        before = out


def test_fp32_stays_within_what_is_allowed_and_a_wrong_constant_does_not() -> None:
    x = torch.randn(256, COLUMNS)
    for count in (1, 5, 30, MOST):
        run = curve.chain(count)
        error = float((run(x).double() - run(x.double())).abs().max())
        assert error <= curve.allowed(count) < 1e-3 * 1.7 ** (count // 10)
    for count in COUNTS:
        assert curve.allowed(count) < 1e-4, "the published counts would hide a constant that is off by 1e-4"


def test_inputs_are_the_published_shapes_and_the_fixed_one_is_none_of_them() -> None:
    device = StubDevice()
    varying = [tuple(x.shape) for x in curve._inputs(device, VARYING)]
    assert varying == [(rows, 16) for rows in range(4, 14)]
    fixed = curve._inputs(device, FIXED)
    assert len(fixed) >= 2
    assert len({tuple(x.shape) for x in fixed}) == 1
    assert tuple(fixed[0].shape) not in varying
    assert not torch.equal(fixed[0], fixed[1])


class Costs(StubDevice):
    """A device without inductor whose clock charges a call `plain` seconds, or `cheap` if compiled code ran."""

    name = "costs"

    def __init__(self, plain: float, cheap: float) -> None:
        super().__init__("fancy")
        self.plain, self.cheap = plain, cheap
        self.compiled = False

    def elapsed(self, call: Callable[[], object], times: int) -> float:
        self.compiled = False
        call()
        return times * (self.cheap if self.compiled else self.plain)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have torch.compile give a function of a test's own, and Dynamo count a graph."""

    def install(device: Costs, change: Callable[[torch.Tensor], torch.Tensor], counted: Sequence[int] = (1,)) -> None:
        def compile_(run: Callable[[torch.Tensor], torch.Tensor], **_: Any) -> Callable[[torch.Tensor], torch.Tensor]:
            def call(x: torch.Tensor) -> torch.Tensor:
                device.compiled = True
                return change(run(x))

            return call

        left = list(counted)
        monkeypatch.setattr(torch, "compile", compile_)
        monkeypatch.setattr(curve, "graphs", lambda: left.pop(0) if len(left) > 1 else left[0])

    return install


def test_a_point_has_the_ratio_and_the_times_of_the_clock(pretend: Callable[..., None]) -> None:
    device = Costs(4e-3, 1e-3)
    pretend(device, lambda out: out)
    point = curve.point(device, 5, FIXED, STATIC, SOON)
    assert isinstance(point, Point)
    assert (point.ratio, point.low, point.high) == pytest.approx((0.25, 0.25, 0.25))
    assert (point.eager, point.seconds) == pytest.approx((4e-3, 1e-3))
    assert point.pairs >= 9
    assert point.programs is None


def test_a_wrong_result_is_no_point(pretend: Callable[..., None]) -> None:
    device = Costs(4e-3, 1e-3)
    pretend(device, lambda out: out * (1 + 1e-4))
    point = curve.point(device, 5, VARYING, DYNAMIC, SOON)
    assert isinstance(point, Gap)
    assert point.reason.startswith("wrong: expected an error of at most ")


def test_what_goes_wrong_while_it_is_timed_is_no_point_either(pretend: Callable[..., None]) -> None:
    device = Costs(4e-3, 1e-3)
    calls = 0

    def late(out: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return out if calls < 20 else out + 1

    pretend(device, late)
    assert isinstance(curve.point(device, 5, FIXED, STATIC, SOON), Gap)


@pytest.mark.parametrize(
    ("device", "counted", "said"),
    [
        (Costs(4e-3, 1e-3), [0], "expected a graph to be compiled, got none"),
        (Costs(4e-3, 1e-3), [1, 1, 3], "no further graphs"),
        (Costs(0.0, 0.0), [1], "ClockError"),
    ],
    ids=["nothing compiled", "compiled again later", "a clock that stands still"],
)
def test_what_tells_nothing_is_no_point(
    pretend: Callable[..., None], device: Costs, counted: list[int], said: str
) -> None:
    pretend(device, lambda out: out, counted)
    point = curve.point(device, 2, FIXED, STATIC, SOON)
    assert isinstance(point, Gap)
    assert said in point.reason


@pytest.mark.slow
def test_static_compiles_each_of_ten_shapes_and_dynamic_once() -> None:
    device = StubDevice("fancy", features=("strided",))  # aot_eager: captured, not generated
    static, dynamic = (curve.point(device, 2, VARYING, form, SOON) for form in Form)
    assert isinstance(static, Point)
    assert isinstance(dynamic, Point)
    assert (static.graphs, static.recompilations) == (10, 9)
    assert static.graphs > curve.recompile_limit(), "the limit was not lifted, or torch has raised it"
    assert (dynamic.graphs, dynamic.recompilations) == (1, 0)
    assert static.first > static.eager_first > 0


def test_a_form_that_does_not_exist_has_gaps_and_the_other_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve, "refusal", lambda _, form: "no dynamic shapes here" if form is DYNAMIC else "")
    monkeypatch.setattr(curve, "point", lambda _, count, shapes, form: made(count, 0.5, form, shapes))
    points = list(curve.measure(StubDevice(), (1, 2)))
    assert [(item.count, item.shapes, item.form) for item in points] == [
        (count, shapes, form) for count in (1, 2) for shapes in Shapes for form in Form
    ]
    assert {item.form for item in points if isinstance(item, Gap)} == {DYNAMIC}
    assert {item.form for item in points if isinstance(item, Point)} == {STATIC}


def test_without_a_compiler_every_form_is_refused_with_the_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = unavailable(Code.NO_PACKAGE, "no compiler", "install one")
    monkeypatch.setattr(curve, "compiler_capability", lambda _: absent)
    assert {point.reason for point in curve.measure(StubDevice(), (1,)) if isinstance(point, Gap)} == {str(absent)}


def test_compilation_is_paid_back_by_what_it_saves_a_call() -> None:
    assert made(10, 0.5, first=1.0, eager_first=0.0).repaid == 100_000  # of 20 us a call, 10 us are saved
    assert made(10, 1.2).repaid is None
    assert made(10, 0.995, width=0.01).repaid is None, "not faster for certain"


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ({1: 3.0, 5: 1.5, 10: 0.6, 30: 0.2}, (5, 10)),
        ({1: 3.0, 5: 1.005, 10: 0.6}, (1, 10)),  # at 5, 1 lies in the interval
        ({1: 3.0, 5: 0.995, 10: 0.6}, (1, 10)),  # and here
        ({1: 0.9, 5: 0.5}, (None, 1)),
        ({1: 1.0, 5: 0.5}, (None, 5)),
        ({1: 3.0, 5: 2.0, 30: 1.3}, (30, None)),
        ({1: 3.0, 5: 0.8, 10: 1.2, 20: 0.5}, (10, 20)),  # faster once and slower again: from the last time on
        ({1: 3.0, 5: 0.8, 10: 1.2}, (10, None)),
        ({1: 1.0, 5: 1.0}, (None, None)),
    ],
)
def test_it_lies_between_the_last_that_is_slower_and_the_first_from_which_on_all_are_faster(
    ratios: dict[int, float], expected: tuple[int | None, int | None]
) -> None:
    result = break_even([made(count, ratio) for count, ratio in reversed(ratios.items())])
    assert (result.slower, result.faster) == expected
    assert result.last == max(ratios)
    assert (result.estimate is None) == (result.faster is None or (result.slower is None and ratios[1] < 1))


def test_the_estimate_lies_where_a_line_on_logarithms_crosses_one() -> None:
    assert break_even([made(10, 2.0), made(20, 0.5)]).estimate == pytest.approx(15.0)
    assert break_even([made(1, 4.0), made(4, 0.5)]).estimate == pytest.approx(3.0)
    again = break_even([made(1, 4.0), made(4, 0.5), made(10, 2.0), made(20, 0.5)]).estimate
    assert again == pytest.approx(15.0), "where it crosses for the last time"
    assert break_even([]) == BreakEven(None, None, None, None)


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (BreakEven(5, 10, 8.26, 30), "between 5 statements (slower) and 10 (faster), about 8.3 by interpolation"),
        (BreakEven(None, 1, None, 30), "faster at every count from 1 on; none was certainly slower"),
        (BreakEven(30, None, None, 30), "none up to 30 statements"),
        (BreakEven(None, None, None, None), "not measured"),
    ],
)
def test_a_break_even_point_in_words(at: BreakEven, said: str) -> None:
    assert report.crossing(at) == said


FOUND: list[Point | Gap] = [
    made(1, 9.0),
    made(10, 0.5),
    made(1, 12.0, shapes=VARYING, graphs=10, recompilations=9),
    made(10, 1.4, shapes=VARYING, graphs=10, recompilations=9),
    *(Gap(count, shapes, DYNAMIC, "no dynamic shapes here") for count in (1, 10) for shapes in Shapes),
]


def test_the_text_has_a_line_a_point_each_reason_once_and_the_break_even_points() -> None:
    lines = plain(report.text(FOUND, limit=8))
    assert sum("to " in line and "static" in line and "shapes" not in line for line in lines) == 4
    assert any(line.split()[:5] == ["10", "static", "20.00", "10.00", "0.500"] for line in lines)
    assert lines.count("dynamic: no dynamic shapes here") == 1
    assert "static, fixed shapes: between 1 statements (slower) and 10 (faster), about 7.8 by interpolation" in lines
    assert "static, varying shapes: none up to 10 statements" in lines
    assert "dynamic, fixed shapes: not measured" in lines
    assert any("torch stops at 8 graphs" in line for line in lines)
    assert not any("torch stops" in line for line in plain(report.text(FOUND, limit=64)))


def test_a_reason_that_holds_at_some_counts_says_at_which() -> None:
    lines = plain(report.text([made(1, 2.0), Gap(10, FIXED, STATIC, "wrong: expected less")], limit=8))
    assert "static: wrong: expected less (10 statements, fixed shapes)" in lines


def test_xla_shows_its_programs_and_says_where_an_earlier_form_had_made_them() -> None:
    lazy = [made(1, 2.0, programs=1), made(1, 2.0, DYNAMIC, programs=0)]
    lines = plain(report.text(lazy, limit=8))
    assert any("XLA programs" in line for line in lines)
    assert any("caches programs by content" in line for line in lines)
    assert not any("XLA" in line for line in plain(report.text(FOUND, limit=8)))


def test_json_is_sorted_rounded_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    results.write(path, "curve", StubDevice().fingerprint(), report.as_json([made(3, 1 / 3), *FOUND], 8))
    text = path.read_text()
    data = json.loads(text)
    assert text == json.dumps(data, indent=1, sort_keys=True) + "\n"
    assert (data["schema"], data["kind"], data["device"]["chip"]) == (results.SCHEMA, "curve", "stub")
    assert (len(data["points"]), len(data["gaps"])) == (5, 4)
    assert [point["ratio"] for point in data["points"] if point["count"] == 3] == [0.3333]
    assert data["break_even"]["static, varying shapes"]["faster"] is None
    assert data["rows"]["varying"] == list(ROWS)
    assert [item.name for item in tmp_path.iterdir()] == ["curve.json"]


def test_a_file_that_cannot_be_replaced_stays_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "curve.json"
    path.write_text("old")

    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(results.ResultsError, match=r"curve.json: cannot be written: No space left on device"):
        results.write(path, "curve", StubDevice().fingerprint(), {})
    assert path.read_text() == "old"


@pytest.mark.slow
def test_a_picture_is_drawn_of_what_there_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    path = tmp_path / "curve.png"
    curve_report.draw(path, FOUND, "a title")
    assert path.read_bytes().startswith(b"\x89PNG")
    curve_report.draw(path, [point for point in FOUND if isinstance(point, Gap)], "nothing was measured")


def test_counts_are_whole_numbers_ascending_each_once() -> None:
    assert command.counts("5, 1,5,100") == (1, 5, 100)
    assert command.counts(",".join(map(str, COUNTS))) == COUNTS


@pytest.mark.parametrize("text", ["", "0", "1,,2", "-3", "1.5", "ten", "101", "٣"])
def test_other_counts_are_answered_with_the_legal_ones(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnknownNameError, match="whole numbers from 1 to 100"):
        command.counts(text)
    assert cli.main(["curve", f"--counts={text}"]) == USAGE
    assert "whole numbers from 1 to 100" in capsys.readouterr().err


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The command without a probe and without clocks; what it was asked to measure."""
    asked: list[tuple[int, ...]] = []

    def measure(device: object, counts: tuple[int, ...]) -> Iterator[Point | Gap]:
        asked.append(counts)
        yield from FOUND

    monkeypatch.setattr(common, "refusal", lambda _: None)
    monkeypatch.setattr(curve, "measure", measure)
    return asked


def test_the_command_prints_and_writes_what_it_measured(
    measured: list[tuple[int, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "curve.json"
    assert cli.main(["curve", "--counts", "10,1", "--json", str(path)]) == GREEN
    assert measured == [(1, 10)]
    assert "Break-even" in capsys.readouterr().out
    assert json.loads(path.read_text())["kind"] == "curve"


def test_without_matplotlib_it_says_how_to_get_it_and_measures_all_the_same(
    measured: list[tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = unavailable(Code.NO_PACKAGE, "no matplotlib", 'pip install "accelcheck[plot]"')
    monkeypatch.setattr(curve_report, "available", lambda: absent)
    path = tmp_path / "curve.png"
    assert cli.main(["curve", "--plot", str(path)]) == RED, "what was asked for was not done"
    printed = capsys.readouterr()
    assert 'pip install "accelcheck[plot]"' in printed.err
    assert "Break-even" in printed.out
    assert not path.exists()
    assert cli.main(["curve"]) == GREEN


def test_what_can_be_drawn_is(measured: list[tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(curve_report, "available", lambda: SUPPORTED)
    monkeypatch.setattr(curve_report, "draw", lambda path, found, _: drawn.append((path, len(found))))
    path = tmp_path / "curve.png"
    assert cli.main(["curve", "--plot", str(path)]) == GREEN
    assert drawn == [(path, len(FOUND))]


def test_a_file_that_cannot_be_written_is_known_before_anything_is_measured(
    measured: list[tuple[int, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["curve", "--json", str(tmp_path / "absent" / "curve.json")]) == USAGE
    assert cli.main(["curve", "--json", str(tmp_path)]) == USAGE
    printed = capsys.readouterr().err
    assert "expected a folder that exists" in printed
    assert "expected a file's name" in printed
    assert measured == []


def test_nothing_measured_is_not_green(monkeypatch: pytest.MonkeyPatch, measured: list[tuple[int, ...]]) -> None:
    monkeypatch.setattr(curve, "measure", lambda *_: iter([FOUND[-1]]))
    assert cli.main(["curve"]) == NOTHING


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", ["claims", "curve"])
def test_an_unknown_device_is_answered_with_the_legal_ones(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--device", "cpuu"]) == USAGE
    assert "Did you mean 'cpu'? Legal values: cpu," in capsys.readouterr().err


@pytest.mark.parametrize("name", ["claims", "curve"])
def test_an_absent_device_is_said_with_its_reason(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "refusal", lambda _: "no such hardware")
    assert cli.main([name, "--device", "cuda"]) == NOTHING
    assert "cuda: no such hardware" in capsys.readouterr().err


def test_the_command_is_declared_with_its_defaults() -> None:
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers())
    given = parser.parse_args(["curve"])
    assert (given.device, command.counts(given.counts), given.plot, given.json) == ("cpu", COUNTS, None, None)
