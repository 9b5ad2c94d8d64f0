"""Tables and progress of the commands: on a terminal, and as plain lines."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest
from process_harness import completed

from accelcheck.report import console
from accelcheck.report.console import Table, escaped, plain, show

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HOSTILE = "[bold red]\x1b[31m\x07\u202e[/]:smile:\n"
WIDE = Table(
    ("case", "A", "interval", "answer"),
    [
        (
            "eager/speed-transformer/cpu/float32/train-speed",
            "1.25",
            "1.000 to 1.500",
            "not compared: B: killed by SIGSEGV",
        ),
        ("compile-static/speed-mlp/cpu/float32/speed", "-2e-05", "1.000 to 1.500", "same"),
    ],
    right=(1,),
)


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True

    @property
    def shown(self) -> list[str]:
        """Its lines without styles."""
        return [line.rstrip() for line in ESCAPE.sub("", self.getvalue()).splitlines()]


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns, whatever this one is."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)


def written(*parts: str | Table) -> str:
    file = io.StringIO()
    show(parts, file)
    return file.getvalue()


def on_terminal(*parts: str | Table) -> Terminal:
    file = Terminal()
    show(parts, file)
    return file


def test_what_is_no_terminal_gets_whole_lines_without_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = written("title", WIDE)
    assert text.splitlines() == [
        "title",
        "case                                                  A  interval        answer",
        "eager/speed-transformer/cpu/float32/train-speed    1.25  1.000 to 1.500  not compared: B: killed by SIGSEGV",
        "compile-static/speed-mlp/cpu/float32/speed       -2e-05  1.000 to 1.500  same",
    ]
    assert text.splitlines() == plain(["title", WIDE])


def test_a_terminal_gets_a_table_that_fits_folded_between_words_and_never_within_a_number() -> None:
    file = on_terminal(WIDE)
    assert max(map(len, file.shown)) <= 80
    words = [word for line in file.shown for word in line.split()]
    assert "-2e-05" in words
    assert "1.000" in words
    assert "SIGSEGV" in words
    for column in ("eager/speed-transformer/cpu/float32/train-speed", "compile-static/speed-mlp/cpu/float32/speed"):
        assert column in "".join(line[: file.shown[0].index("A")].split(" ")[0] for line in file.shown)


def test_of_what_fits_no_terminal_the_longest_words_are_folded_and_no_others() -> None:
    file = on_terminal(Table(("name", "path", "count"), [("compiled", "x" * 200, "123456")], right=(2,)))
    assert max(map(len, file.shown)) <= 80
    assert file.shown[0].split() == ["name", "path", "count"]
    assert file.shown[1].split() == ["compiled", "x" * 64, "123456"]


def test_a_table_that_fits_is_not_folded() -> None:
    small = Table(("view", "caught"), [("row", "12"), ("column", "3")], right=(1,), indent=2)
    file = on_terminal(small)
    assert file.shown == ["  view    caught", "  row         12", "  column       3"] == small.lines()


def test_a_table_without_rows_is_its_head() -> None:
    assert Table(("view", "caught"), []).lines() == ["view  caught"]
    assert on_terminal(Table(("view", "caught"), [])).shown == ["view  caught"]


@pytest.mark.parametrize("terminal", [False, True])
def test_text_from_elsewhere_is_neither_markup_nor_control_sequences(terminal: bool) -> None:
    parts = Table(("name",), [(HOSTILE,)]), f"reason: {HOSTILE}"
    text = ESCAPE.sub("", on_terminal(*parts).getvalue()) if terminal else written(*parts)
    safe = r"[bold red]\x1b[31m\x07\u202e[/]:smile:"
    assert text.splitlines()[1].rstrip() == safe + r"\n"
    assert text.splitlines()[2] == f"reason: {safe}"
    assert not set("\x1b\x07\u202e") & set(text)


def test_escaped_text_keeps_what_is_printable() -> None:
    assert escaped("Größe 1 µs, 10 % ✓") == "Größe 1 µs, 10 % ✓"
    assert escaped("a\tb\udc80") == r"a\tb\udc80"


def test_no_color_leaves_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    file = Terminal()
    with console.progress("steps", 2, file) as done:
        done("first", 1)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", file.getvalue())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that have passed; a list of one."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_what_is_no_terminal_gets_lines_with_count_elapsed_time_and_estimate(clock: list[float]) -> None:
    file = io.StringIO()
    with console.progress("claims", 4, file, interval=0.0) as done:
        clock[0] += 30.0
        done("first: confirmed", 1)
        clock[0] += 90.0
        done(HOSTILE, 2)
        done("", 1)
    assert file.getvalue().splitlines() == [
        "  1 of 4 claims, 0:00:30 elapsed, 0:01:30 left: first: confirmed",
        r"  3 of 4 claims, 0:02:00 elapsed, 0:00:40 left: [bold red]\x1b[31m\x07\u202e[/]:smile:\n",
        "  4 of 4 claims, 0:02:00 elapsed, 0:00:00 left",
    ]


def test_lines_come_at_intervals(clock: list[float]) -> None:
    file = io.StringIO()
    with console.progress("verdicts", 100, file) as done:
        for _ in range(100):
            clock[0] += 1.0
            done("", 1)
    counts = [int(line.split()[0]) for line in file.getvalue().splitlines()]
    assert counts == [20, 40, 60, 80, 100]


def test_a_terminal_gets_a_bar_a_count_and_an_estimate(clock: list[float]) -> None:
    file = Terminal()
    with console.progress("claims", 4, file) as done:
        clock[0] += 30.0
        done("first: [confirmed]", 1)
    (last,) = [line for line in file.shown if "first" in line][:1]
    assert "━" in last
    assert "1/4 0:00:30 left 0:01:30 first: [confirmed]" in last
    assert len(last.rpartition("\r")[2]) <= 80


def test_what_is_done_is_cut_where_the_terminal_ends_and_the_estimate_is_not(clock: list[float]) -> None:
    file = Terminal()
    with console.progress("claims", 29, file) as done:
        clock[0] += 30.0
        done("a-claim-with-a-long-name-memory: not confirmed, and more", 1)
    (last,) = [line for line in file.shown if "a-claim" in line][:1]
    last = last.rpartition("\r")[2]
    assert len(last) <= 80
    assert "━" * 18 in last
    assert "1/29 0:00:30 left 0:14:00 a-claim-with" in last
    assert last.endswith("…")


def test_a_bar_draws_when_a_step_is_done_and_starts_no_thread(clock: list[float]) -> None:
    import threading

    file = Terminal()
    before = threading.enumerate()
    with console.progress("points", 2, file) as done:
        assert threading.enumerate() == before
        drawn = len(file.getvalue())
        clock[0] += 60.0
        assert len(file.getvalue()) == drawn
        done("one", 1)
        assert len(file.getvalue()) > drawn


def test_standard_output_is_not_redirected_while_a_bar_is_drawn() -> None:
    file, own = Terminal(), sys.stdout
    with console.progress("points", 2, file):
        assert sys.stdout is own


def test_the_cursor_comes_back_when_a_command_fails() -> None:
    file = Terminal()
    with pytest.raises(RuntimeError), console.progress("points", 2, file):
        raise RuntimeError
    assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l")


def test_neither_the_plugin_nor_declaring_the_commands_imports_scipy_or_rich() -> None:
    code = (
        "import sys, accelcheck.plugin.hooks, accelcheck.plugin.controller, accelcheck.report.terminal, "
        "accelcheck.measure.gate; "
        "from accelcheck.core.registry import modules; [*modules('accelcheck.commands')]; "
        "print(*({'scipy', 'rich', 'torch'} & sys.modules.keys()))"
    )
    done = completed([sys.executable, "-c", code], check=True)
    assert done.stdout.strip() == ""
