"""Starts, ends and counts the processes of tests; none outlives the tests.

It has no tests of its own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import psutil  # type: ignore[import-untyped]  # it comes without annotations

from accelcheck.core import files
from accelcheck.core.processes import end_with_parent, kill_tree, polls

PATIENT = 240.0
"""Seconds that a run in a process of its own may take on a busy machine."""

END_WITH_US = ("multiprocessing.resource_tracker", "torch._inductor.compile_worker", files._GUARD)
"""Parts of the command lines of what is started once for a process, and waits for its end."""


def completed(words: Sequence[str | Path], *, check: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; its exit status and what it printed."""
    return subprocess.run(words, capture_output=True, text=True, check=check, **options)


def script(path: Path) -> ModuleType:
    """A script as a module, executed but not as ``__main__``."""
    spec = importlib.util.spec_from_file_location(f"{path.stem}_under_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def python(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder that has modules, beside those of accelcheck and of its tests."""
    where = os.pathsep.join(map(str, (Path(__file__).parents[1], Path(__file__).parent, folder)))
    known = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return completed([sys.executable, *words], cwd=folder, env={**known, "PYTHONPATH": where, **environ})


@contextlib.contextmanager
def started(words: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A running program, killed at the end of the context or of this process, with all that it started.

    An interrupt ends it, also where the tests run in the background of a shell, which has them and all that they start
    ignore it.

    Args:
        words: The program and its arguments.
        **options: Options of `subprocess.Popen`.
    """
    begin = functools.partial(_begin, os.getpid())
    process = subprocess.Popen(
        words,
        text=True,
        start_new_session=True,
        preexec_fn=begin,  # noqa: PLW1509 - it takes no lock
        **options,
    )
    with process:
        try:
            yield process
        finally:
            kill_tree(process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _begin(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent(parent)


def forked(script: Path) -> subprocess.CompletedProcess[str]:
    """Run a script of Python in its folder, in a fork of this process, which has torch: importing it takes seconds."""
    output = script.with_suffix(".out")
    pid = os.fork()
    if pid == 0:
        _run_here(script, output)
    _, status = os.waitpid(pid, 0)
    text = output.read_text()
    return subprocess.CompletedProcess([str(script)], os.waitstatus_to_exitcode(status), text, text)


def _run_here(script: Path, output: Path) -> NoReturn:
    code = 1
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        os.chdir(script.parent)
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as Python ends
        traceback.print_exc()
    finally:
        os._exit(code)


def alive(pid: int) -> bool:
    """Returns True where a process runs, and False for one that ended and was not yet waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def left(*pids: int, seconds: float = 5.0) -> list[int]:
    """Returns the processes that still run after that time at most."""
    for _ in polls(seconds):
        if not any(map(alive, pids)):
            break
    return [pid for pid in pids if alive(pid)]


def descendants(pid: int) -> list[int]:
    """Everything that a process has started and that still runs."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True) if alive(child.pid)]


def end_what_is_left() -> list[str]:
    """Kill all processes that this one has started; returns those that still ran after seconds, by command line."""
    if pools := sys.modules.get("accelcheck.techniques.distributed.pool"):
        pools.close_all()  # ranks that it keeps for the next case
    for _ in polls(5.0):
        if not (running := _children()):
            return []
    for pid in running:
        kill_tree(pid)
    return [f"process {pid}: {words}" for pid, words in running.items()]


def _children() -> dict[int, str]:
    """Command lines of the children that do not end with this process by themselves, by number."""
    children = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            children[child.pid] = " ".join(child.cmdline())
    return {pid: words for pid, words in children.items() if alive(pid) and not any(w in words for w in END_WITH_US)}
