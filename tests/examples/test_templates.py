"""Templates of examples/ci: options exist, scripts work, and installs are what accelcheck needs."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from process_harness import completed, script

from accelcheck.core.journal_reading import read
from accelcheck.core.registry import modules
from accelcheck.core.shards import Shard
from accelcheck.plugin.options import OPTIONS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "ci"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TEMPLATES = ("relay.yml", "self-hosted.yml", "slurm-array.sh", "kubernetes-job.yaml")
OTHERS = {"slurm_one_node.py", "README.md"}
FAKE = """#!/usr/bin/env bash
printf '%s\\n' "$(basename "$0") $*" >> "$CALLS"
case $(basename "$0") in
sbatch) wc -l < "$CALLS" ;;
pytest) exit "${STATUS:-0}" ;;
esac
"""
"""Stands for sbatch, pytest and accelcheck: writes down how it was called. Numbers of jobs are 1 and 2."""


def text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def commands(name: str) -> Iterator[list[str]]:
    """The commands of pytest and accelcheck in a template, word by word; variables stay as they are."""
    lines = re.sub(r"\\\n\s*", " ", text(name)).splitlines()
    for line in lines:
        start = re.search(r"(?:^\s*(?:- )?(?:run: |exec )?|/bin/)(?=(?:pytest|accelcheck)\"? )", line)
        if start is not None:
            command = re.split(r" (?:\|\||&&|\||#)", line[start.end() :])[0]
            yield shlex.split(f'"{command}' if re.match(r'\w+" ', command) else command)


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    """The program's, with the commands that it finds."""
    made = argparse.ArgumentParser(prog="accelcheck", exit_on_error=False)
    result = made.add_subparsers(dest="command", required=True)
    for module in modules("accelcheck.commands"):
        if hasattr(module, "add"):
            module.add(result)
    return made


@pytest.fixture
def flags(pytestconfig: pytest.Config) -> set[str]:
    """The options of pytest and its plugins."""
    groups = [pytestconfig._parser._anonymous, *pytestconfig._parser._groups]
    return {name for group in groups for option in group.options for name in option.names()}


def test_every_file_is_known() -> None:
    assert {path.name for path in FOLDER.iterdir()} - {"__pycache__"} == OTHERS | set(TEMPLATES)
    assert [name for name in (*TEMPLATES, "slurm_one_node.py") if f"]({name})" not in text("README.md")] == []


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_commands_of_a_template_are_real(name: str, parser: argparse.ArgumentParser, flags: set[str]) -> None:
    result = list(commands(name))
    assert {words[0] for words in result} == {"pytest", "accelcheck"}
    valued = {f"--accel-{option.name.replace('_', '-')}": not option.flag for option in OPTIONS}
    for program, *words in result:
        if program == "accelcheck":
            parser.parse_args(words)
            continue
        for flag, equals, _ in (word.partition("=") for word in words if word.startswith("-")):
            assert flag in flags
            assert bool(equals) == valued.get(flag, bool(equals)), flag


def test_an_option_that_does_not_exist_is_found(flags: set[str], parser: argparse.ArgumentParser) -> None:
    assert {f"--accel-{option.name.replace('_', '-')}" for option in OPTIONS} <= flags
    assert "--accel-shards" not in flags
    with pytest.raises((SystemExit, argparse.ArgumentError)):
        parser.parse_args(["marge", "a.jsonl"])


@pytest.mark.parametrize("name", ["relay.yml", "self-hosted.yml"])
def test_what_is_installed_beside_torch_is_all_that_accelcheck_needs(name: str) -> None:
    (listed,) = re.findall(r"pip install (numpy .*)", text(name))
    needed = {Requirement(word).name.lower() for word in PROJECT["dependencies"]} - {"torch"}
    assert needed <= set(listed.split())
    assert set(listed.split()) - needed <= {"jinja2"}  # torch requires it, and reports use it
    extras = {extra for words in re.findall(r"accelcheck\[([\w,]+)\]", text(name)) for extra in words.split(",")}
    assert extras <= set(PROJECT["optional-dependencies"])


def test_templates_have_as_many_tasks_as_shards() -> None:
    cluster, runners = text("kubernetes-job.yaml"), text("self-hosted.yml")
    sizes = re.findall(r"^  (?:SHARDS: \"|completions: |parallelism: |maxFailedIndexes: )(\d+)", cluster, re.MULTILINE)
    assert sizes == ["8"] * 4
    (count,) = re.findall(r"SHARDS: \"(\d+)\"", runners)
    assert f"shard: {list(range(1, int(count) + 1))}" in runners


def test_actions_are_pinned_to_commits() -> None:
    used = [word for name in TEMPLATES for word in re.findall(r"uses: (\S+)", text(name))]
    assert len(used) > 8
    assert [word for word in used if not re.fullmatch(r"[\w/.-]+@[0-9a-f]{40}", word)] == []


def test_the_relay_reports_counts_of_the_journal() -> None:
    if shutil.which("jq") is None:
        pytest.skip("jq is not installed: apt-get install jq")
    (filter_,) = re.findall(r"jq --compact-output '(.*?)'", text("relay.yml"), re.DOTALL)
    journal = ROOT / "baselines" / "cpu" / "level1.jsonl"
    _, records = read(journal)
    done = completed(["jq", "-c", filter_, str(journal)], check=True)
    counts = json.loads(done.stdout)
    assert counts["skipped"] == sum(not record.verdict.executed for record in records) > 0
    assert counts["failed"] == sum(not record.verdict.green for record in records)
    assert sum(counts.values()) == len(records)
    end = json.dumps({"kind": "end", "verdicts": {"pass": 1, "crash": 2, "flaky": 3, "unavailable": 4}})
    done = completed(["jq", "-c", filter_], input=end, check=True)
    assert json.loads(done.stdout) == {"passed": 1, "skipped": 4, "failed": 5}


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Run bash with fake programs; gives its exit status and how they were called."""
    for name in ("sbatch", "pytest", "accelcheck"):
        (tmp_path / name).write_text(FAKE, encoding="ascii")
        (tmp_path / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "ACCELCHECK"))}

    def run(*words: str, **variables: str) -> tuple[int, list[str]]:
        calls = tmp_path / "calls"
        calls.write_text("", encoding="ascii")
        environ = {**kept, "PATH": f"{tmp_path}:{kept['PATH']}", "CALLS": str(calls), **variables}
        done = completed(["bash", *words], env=environ, cwd=tmp_path)
        assert "syntax" not in done.stderr
        return done.returncode, calls.read_text(encoding="ascii").splitlines()

    return run


def test_slurm_submits_an_array_and_a_job_behind_it(run: Callable[..., tuple[int, list[str]]], tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    (folder / "shard-7.jsonl").touch()  # of an earlier run
    script = str(FOLDER / "slurm-array.sh")
    status, calls = run(script, "--accel-level=2", ACCELCHECK_SHARDS="3", ACCELCHECK_FOLDER=str(folder))
    assert status == 0
    array, merge = calls
    assert "--array=1-3" in array
    assert array.endswith(f"{script} --accel-level=2")
    assert "--dependency=afterany:1 " in merge
    assert merge.endswith(script)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("again", [False, True])
def test_a_slurm_task_runs_its_shard_and_goes_on_when_it_was_queued_again(
    run: Callable[..., tuple[int, list[str]]], tmp_path: Path, again: bool
) -> None:
    journal = tmp_path / "shard-2.jsonl"
    journal.write_text("{}\n", encoding="ascii")
    variables = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "2", "SLURM_RESTART_COUNT": str(int(again))}
    where = {"ACCELCHECK_SHARDS": "3", "ACCELCHECK_FOLDER": str(tmp_path)}
    status, (call,) = run(str(FOLDER / "slurm-array.sh"), "--accel-level=2", **variables, **where, STATUS="1")
    assert status == 1
    words = call.split()
    assert Shard.parse("2/3") is not None
    assert {"--accel-shard=2/3", "--accel-level=2", f"--accel-{'resume' if again else 'journal'}={journal}"} <= set(
        words
    )


def test_the_last_slurm_job_merges_the_journals(run: Callable[..., tuple[int, list[str]]], tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"shard-{number}.jsonl").touch()
    status, calls = run(str(FOLDER / "slurm-array.sh"), SLURM_JOB_ID="9", ACCELCHECK_FOLDER=str(tmp_path))
    assert status == 0
    assert calls[0] == f"accelcheck merge {tmp_path}/shard-1.jsonl {tmp_path}/shard-2.jsonl -o {tmp_path}/journal.jsonl"


def pods() -> list[str]:
    """The scripts of the two Jobs, with their volume in the folder that they run in."""
    matches = re.findall(r"args:\n +- \|\n((?: {14}.*\n)+)", text("kubernetes-job.yaml"))
    return [textwrap.dedent(script).replace("/journals/", "journals/") for script in matches]


@pytest.mark.parametrize(("pytest_status", "status"), [("0", 0), ("1", 0), ("5", 0), ("4", 4), ("137", 137)])
def test_a_pod_runs_the_shard_of_its_index_and_is_not_tried_again_when_cases_failed(
    run: Callable[..., tuple[int, list[str]]], tmp_path: Path, pytest_status: str, status: int
) -> None:
    shard, _ = pods()
    variables = {"RUN": "r", "SHARDS": "8", "DEVICE": "cuda", "LEVEL": "2", "JOB_COMPLETION_INDEX": "0"}
    ended, (call,) = run("-euc", shard, **variables, STATUS=pytest_status)
    assert ended == status
    assert {"--accel-shard=1/8", "--accel-device=cuda", "--accel-journal=journals/r/shard-1.jsonl"} <= set(call.split())
    assert (tmp_path / "journals" / "r" / "shard-1.status").read_text() == f"{pytest_status}\n"
    (tmp_path / "journals" / "r" / "shard-1.jsonl").write_text("{}\n", encoding="ascii")  # the pod before was lost
    _, (call,) = run("-euc", shard, **variables)
    assert "--accel-resume=journals/r/shard-1.jsonl" in call.split()


@pytest.mark.parametrize(
    ("statuses", "status"),
    [("00", 0), ("05", 0), ("01", 1), ("55", 1), ("15", 1), ("0", 1)],
    ids=["all good", "one is empty", "one failed", "all are empty", "failed and empty", "one is missing"],
)
def test_the_second_job_of_kubernetes_merges_and_fails_where_a_shard_did(
    run: Callable[..., tuple[int, list[str]]], tmp_path: Path, statuses: str, status: int
) -> None:
    folder = tmp_path / "journals" / "r"
    folder.mkdir(parents=True)
    for number, word in enumerate(statuses, 1):
        (folder / f"shard-{number}.jsonl").touch()
        (folder / f"shard-{number}.status").write_text(f"{word}\n", encoding="ascii")
    ended, calls = run("-euc", pods()[1], RUN="r", SHARDS="2")
    assert ended == status
    journals = " ".join(f"shard-{number}.jsonl" for number in range(1, len(statuses) + 1))
    assert calls == [
        f"accelcheck merge {journals} -o journal.jsonl",
        "accelcheck report journal.jsonl --html report.html",
    ]


@pytest.fixture
def one_node() -> ModuleType:
    return script(FOLDER / "slurm_one_node.py")


def test_a_machine_without_slurm_is_told_what_to_install(one_node: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_node, "program", lambda name: "/bin/true" if name == "squeue" else None)
    with (
        pytest.raises(one_node.ClusterError, match=r"not installed: munged, .*; apt-get install slurm-wlm munge"),
        one_node.cluster(),
    ):
        pass


def test_a_command_is_asked_for() -> None:
    done = completed([sys.executable, FOLDER / "slurm_one_node.py"])
    assert done.returncode == 2
    assert "expected a command that submits jobs" in done.stderr
