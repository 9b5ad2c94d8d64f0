"""The command line as a whole: help, near misses, JSON, completion, a reader that goes away, and what a start costs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from process_harness import completed

import accelcheck
from accelcheck import cli
from accelcheck.commands.common import GREEN, NOTHING, USAGE
from accelcheck.commands.parsing import SHELLS, Parser, print_json
from accelcheck.core.capability import SUPPORTED
from accelcheck.core.selection import Selection
from accelcheck.devices.base import Fingerprint, Status
from accelcheck.techniques.matrix import Matrix

PARSERS = {parser.prog: parser for parser in cli.parser().all_commands()}
LEAVES = {name: parser for name, parser in PARSERS.items() if not parser.commands()}


def program(*words: str, code: str = "") -> subprocess.CompletedProcess[str]:
    code = code or "import sys; from accelcheck import cli; sys.exit(cli.main(sys.argv[1:]))"
    return completed([sys.executable, "-c", code, *words], timeout=120)


def refused(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == USAGE
    return capsys.readouterr().err


def examples_of(parser: Parser) -> list[str]:
    return [line.partition("  # ")[0].strip() for line in (parser.epilog or "").splitlines()[1:]]


@pytest.mark.parametrize("name", PARSERS)
def test_each_help_ends_with_examples_that_parse(name: str) -> None:
    parser = PARSERS[name]
    assert parser.format_help().endswith(f"{parser.epilog}\n")
    lines = examples_of(parser)
    assert lines
    for line in lines:
        first, *words = shlex.split(line)
        assert first == "accelcheck"
        if "--print-completion" in words:
            continue  # it writes its script at once: another test has it
        given = cli.parser().parse_args(words)
        if name != "accelcheck":
            assert line.startswith(name)
            assert given.run


@pytest.mark.parametrize("name", PARSERS)
def test_no_line_of_a_help_but_examples_is_wider_than_the_terminal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = PARSERS[name].format_help()
    below = text.partition("\n\n")[2]  # argparse wraps the usage, as far as it can
    assert [line for line in below.partition("\nexamples:")[0].splitlines() if len(line) > 80] == []


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"accelcheck {accelcheck.__version__}\n"


def test_the_package_runs_as_the_program() -> None:
    done = completed([sys.executable, "-m", "accelcheck", "--version"])
    assert (done.returncode, done.stdout) == (0, f"accelcheck {accelcheck.__version__}\n"), done.stderr


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == USAGE
    assert "examples:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("lst", "unknown command 'lst'. Did you mean 'list'?"),
        ("baseline shw", "unknown command 'shw'. Did you mean 'show'?"),
        ("list --devcie=cpu", "unknown option '--devcie'. Did you mean '--device'?"),
        ("list --devcie cpu", "unknown option '--devcie'. Did you mean '--device'?"),
        ("--verson", "unknown option '--verson'. Did you mean '--version'?"),
        ("list --level 9", "argument --level: unknown value '9'. Legal values: 1, 2, 3, 4."),
        ("list --dtype float33", "argument --dtype: unknown value 'float33'. Did you mean 'float32'?"),
        ("list eager", "unexpected argument 'eager'"),
    ],
)
def test_a_near_miss_is_answered_with_the_nearest(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(*words.split(), capsys=capsys)


def test_a_duet_of_nothing_shows_its_usage(capsys: pytest.CaptureFixture[str]) -> None:
    printed = refused("duet", capsys=capsys)
    assert printed.startswith("usage: accelcheck duet")
    assert "--python, --env-a or --env-b" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "codes"),
    [(["--help"], {0, cli.CLOSED}), (["list", "--devices", "--device=cuda"], {cli.CLOSED})],
    ids=["help, whose writer ignores it", "a table"],
)
def test_a_reader_that_goes_away_ends_it_without_a_traceback(words: list[str], codes: set[int]) -> None:
    read, write = os.pipe()
    os.close(read)
    code = "import sys; from accelcheck import cli; sys.exit(cli.main(sys.argv[1:]))"
    with os.fdopen(write, "wb") as closed:
        ended = subprocess.run(
            [sys.executable, "-c", code, *words],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
        )
    assert ended.returncode in codes
    assert "Traceback" not in ended.stderr
    assert "BrokenPipe" not in ended.stderr


def test_declaring_all_commands_imports_neither_torch_nor_numpy() -> None:
    heavy = ("torch", "numpy", "scipy", "rich", "matplotlib", "shtab")
    code = f"import sys; from accelcheck import cli; cli.parser(); print([m for m in {heavy} if m in sys.modules])"
    assert program(code=code).stdout.strip() == "[]"


def test_without_torch_commands_say_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Matrix, "load", Mock(side_effect=ModuleNotFoundError("No module named 'torch'", name="torch")))
    assert cli.main(["list", "--markdown"]) == NOTHING
    assert capsys.readouterr().err == "accelcheck: torch is not installed; accelcheck doctor says how to install it\n"


def test_another_missing_module_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Matrix, "load", Mock(side_effect=ModuleNotFoundError("No module named 'other'", name="other")))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["list", "--markdown"])


def test_json_has_no_numbers_that_json_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    print_json("test", {"a": [float("nan"), 1.5], "b": {"c": (float("inf"),)}})
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "kind": "test", "a": [None, 1.5], "b": {"c": [None]}}


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert cli.main(["list", *words, "--json"]) == GREEN
    return json.loads(capsys.readouterr().out)


def test_the_list_of_cases_is_that_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cases", "--device=cpu", "--technique=amp-*", "--workload=mlp", "--dtype=float32"]
    assert cli.main(["list", *words]) == GREEN
    ids = capsys.readouterr().out.split()
    chosen = Selection(("cpu",), techniques=("amp-*",), workloads=("mlp",), dtypes=("float32",))
    assert ids == [case.id for case in Matrix.load().cases(chosen)]
    assert len(ids) > 2
    assert [case["id"] for case in listed(capsys, *words)["cases"]] == ids
    assert len(listed(capsys, *words, "--level=3")["cases"]) >= len(ids)


def test_the_list_of_workloads_can_be_that_of_a_technique(capsys: pytest.CaptureFixture[str]) -> None:
    known = Matrix.load()
    every = listed(capsys, "--workloads")["workloads"]
    assert [entry["name"] for entry in every] == list(known.workloads)
    some = {entry["name"] for entry in listed(capsys, "--workloads", "--technique=sdpa-math")["workloads"]}
    cases = known.cases(Selection(("cpu",), techniques=("sdpa-math",), level=4))
    assert some == {case.workload for case in cases} != set(known.workloads)


def test_the_list_of_traits_says_who_asks_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    traits = {trait["name"]: trait for trait in listed(capsys, "--traits")["traits"]}
    known = Matrix.load()
    assert set(traits) >= {trait for workload in known.workloads.values() for trait in workload.traits}
    assert "sdpa-math" in traits["attention"]["required-by"]
    assert "mlp" not in traits["attention"]["workloads"]


@pytest.mark.slow
def test_the_list_of_techniques_has_each_answer_with_its_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Status("cpu", SUPPORTED, Fingerprint("cpu", "Toy processor", 2, versions={"torch": "2"}))
    monkeypatch.setattr("accelcheck.commands.listing.probe", lambda *_, **__: ({"cpu": here}, None))
    shown = listed(capsys, "--device=cpu", "--technique=checkpoint-xla", "--technique=amp-bf16")
    amp, checkpoint = sorted(shown["techniques"], key=lambda one: str(one["name"]))
    assert amp["answers"]["cpu"]["runs"] is True
    assert checkpoint["answers"]["cpu"]["verdict"] == "unsupported"
    assert checkpoint["answers"]["cpu"]["reason"]
    assert shown["devices"]["cpu"]["fingerprint"]["versions"] == {"torch": "2"}


def test_the_list_of_devices_says_why_one_is_absent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (cuda,) = listed(capsys, "--devices", "--device=cuda")["devices"]
    assert cuda["capability"]["code"] == "no-hardware"
    assert cli.main(["list", "--devices", "--device=cdua"]) == USAGE
    assert "Did you mean 'cuda'?" in capsys.readouterr().err


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_gets_a_script_with_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--print-completion", shell])
    assert ended.value.code == 0
    script = capsys.readouterr().out
    assert [name for name in cli.parser().commands() if not re.search(rf"\b{name}\b", script)] == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_options_and_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--print-completion", "bash"])
    (tmp_path / "completion").write_text(capsys.readouterr().out)
    (tmp_path / "store").mkdir()

    def proposed(*words: str) -> list[str]:
        ask = (
            f"source completion; COMP_WORDS=({shlex.join(['accelcheck', *words])}); COMP_CWORD={len(words)}; "
            f"COMP_LINE={shlex.quote(' '.join(['accelcheck', *words]))}; COMP_POINT=${{#COMP_LINE}}; "
            "$(complete -p accelcheck | sed 's/.*-F \\([^ ]*\\) .*/\\1/') accelcheck; "
            "printf '%s\\n' \"${COMPREPLY[@]}\""
        )
        ended = completed(["bash", "--norc", "-c", ask], check=True, cwd=tmp_path, timeout=60)
        return [word.strip() for word in ended.stdout.split()]

    assert proposed("doc") == ["doctor"]
    assert proposed("list", "--workl") == ["--workloads", "--workload"]
    assert proposed("duet", "--level", "") == ["1", "2", "3", "4"]
    assert proposed("baseline", "--baselines", "sto") == ["store"]
