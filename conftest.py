"""Fixtures of accelcheck's own tests."""

from __future__ import annotations

import argparse
import gc
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from accelcheck.core import processes
from accelcheck.core.shards import LEGAL, Shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from plugin_harness import Suite

    from accelcheck.verify.oracle import Store

pytest_plugins = ["pytester"]

TESTS = Path(__file__).parent / "tests"
SELECTING = ("device", "technique", "workload", "dtype", "case", "level", "shard")
"""Names of the options of accelcheck that select cases."""
SUITE = Path(__file__).parent / "accelcheck" / "suite"


def pytest_configure(config: pytest.Config) -> None:
    """Run the suite, and not the tests of accelcheck, where cases are selected and no path is given."""
    selected = any(getattr(config.option, f"accel_{name}", None) is not None for name in SELECTING)
    if selected and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args[:] = [str(SUITE)]
        config.args_source = pytest.Config.ArgsSource.ARGS  # the header names the folder of the tests otherwise


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options that run slow tests too."""
    parser.addoption("--all", action="store_true", dest="slow_too", help="run accelcheck's slow tests too")
    parser.addoption(
        "--slow-part", metavar="I/N", type=_part, help="run part I of N of accelcheck's slow tests too, such as 1/3"
    )


def _part(word: str) -> Shard:
    shard = Shard.parse(word)
    if shard is None:
        raise argparse.ArgumentTypeError(f"expected {LEGAL}, got {word!r}")
    return shard


def _without_slow(config: pytest.Config) -> bool:
    """Returns True where nothing asks for all slow tests, by an option or by name, as ``FILE::NAME`` does."""
    named = config.option.slow_too or config.option.markexpr or any("::" in word for word in config.args)
    return not named and any(TESTS in (path, *path.parents) for path in map(Path.absolute, map(Path, config.args)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out, but for a part of them that was asked for."""
    if not _without_slow(config):
        return
    slow = []
    seen: Counter[str] = Counter()
    for item in sorted(items, key=lambda item: item.nodeid):  # the same ones whatever the order of the run
        marker = item.get_closest_marker("slow")
        name = item.nodeid.partition("[")[0]
        seen[name] += 1
        if marker is not None and seen[name] > marker.kwargs.get("after", 0):
            slow.append(item)
    shard: Shard | None = config.option.slow_part
    left = set(slow) - set(slow[shard.number - 1 :: shard.of] if shard else ())
    if left:
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=list(left))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how slow tests are run."""
    # Not how many: where workers run the tests, this process does not know them.
    if _without_slow(config):
        which = "slow tests" if config.option.slow_part is None else "other slow tests"
        terminalreporter.write_line(f"{which} are left out; with --all they run too, as in: nox -s tests -- --all")


@pytest.fixture(autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    # Operators in tests are tiny, and the threads of several workers would wait for each other. The suite keeps the
    # number of threads, because it judges devices as they are.
    if TESTS not in request.path.parents:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def _frozen(request: pytest.FixtureRequest) -> None:
    # torch and the tests are a million objects, which each collection would go through: a third of a second.
    if TESTS in request.path.parents:
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _no_process_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    # The last teardown of each worker. It ends what is left, so that it burns no core, and fails the run by name.
    if not any(TESTS in item.path.parents for item in request.session.items):
        yield
        return
    from process_harness import end_what_is_left

    processes.adopt_orphans()
    yield
    if left := end_what_is_left():
        pytest.fail("tests left processes running:\n" + "\n".join(left), pytrace=False)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """References of the tests of one module: two modules may give different workloads the same name."""
    from accelcheck.verify.oracle import Store

    return Store(tmp_path_factory.mktemp("references"))


@pytest.fixture
def fresh(tmp_path: Path) -> Store:
    """References of one test, whose workloads have names that others of its module have too."""
    from accelcheck.verify.oracle import Store

    return Store(tmp_path)


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """Runs of the suite in an empty folder."""
    from plugin_harness import Suite

    monkeypatch.delenv("ACCELCHECK_SESSION", raising=False)
    return Suite(pytester, monkeypatch)
