"""Guards the loading of conftest.py, which may import torch, against broken backends. No torch.

`import torch` loads the installed out-of-tree backends. One that raises would end pytest with its error, and one that
hangs would never let pytest begin. So with such backends the first import of torch is tried in a child process.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from accelcheck.core import foreign
from accelcheck.devices.packages import AUTOLOAD, backends


@contextmanager
def guarded(seconds: float) -> Iterator[None]:
    """A context for pytest's loading before it is configured, which prints where it is after these seconds."""
    foreign.keep_stderr()
    watch = _Watch(seconds)
    finder = _BeforeTorch(seconds, watch)
    sys.meta_path.insert(0, finder)
    try:
        with watch:
            yield
    finally:
        finder.leave()


class _BeforeTorch(MetaPathFinder):
    """Finds torch by the other finders, and tries it in a child process before its code runs.

    Not during the search, when no other thread can import anything: a thread watches the child process.
    """

    def __init__(self, seconds: float, watch: _Watch) -> None:
        self._seconds, self._watch = seconds, watch

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        self.leave()
        specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None and os.environ.get(AUTOLOAD) != "0" and backends():
            loader, execute = spec.loader, spec.loader.exec_module

            def tried(module: ModuleType) -> None:
                vars(loader).pop("exec_module", None)
                with self._watch.paused():
                    _try(self._seconds)
                execute(module)

            vars(loader)["exec_module"] = tried
        return spec

    def leave(self) -> None:
        with suppress(ValueError):
            sys.meta_path.remove(self)


def _try(seconds: float) -> None:
    from accelcheck.devices.probe import broken_backends
    from accelcheck.report.console import escaped

    broken = broken_backends(seconds)
    if broken:
        os.environ[AUTOLOAD] = "0"
    for name, error in broken.items():
        _say(escaped(f"the backend {name} breaks `import torch`: {error}; {AUTOLOAD}=0 is set for this run"))


class _Watch:
    """Prints words and the stack when an import takes long, also while native code holds the interpreter."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer: threading.Timer | None = None

    def __enter__(self) -> None:
        words = (
            f"what pytest loads before its start, conftest.py say, has not returned within {self._seconds:g} s; it is "
            f"waited for. Where a backend of torch hangs, set {AUTOLOAD}=0 or uninstall it. It is here:"
        )
        self._timer = threading.Timer(self._seconds, _say, (words,))
        self._timer.daemon = True
        self._timer.start()
        faulthandler.dump_traceback_later(self._seconds + 0.5, file=foreign.stderr())

    def __exit__(self, *error: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._timer is not None:
            self._timer.cancel()

    @contextmanager
    def paused(self) -> Iterator[Any]:
        """A context whose time does not count."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()


def _say(line: str) -> None:
    with suppress(OSError):
        os.write(foreign.stderr(), f"accelcheck: {line}\n".encode(errors="backslashreplace"))
