"""Time that a process waited for a core."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from accelcheck.measure import paired


def test_the_waits_of_all_threads_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "_TASKS", tmp_path)
    assert paired.waited() is None
    for number, text in enumerate(("5 1500000000 7", "0 500000000 1", "", "1 x 2")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "schedstat").write_text(text)
    (tmp_path / "ended").mkdir()
    assert paired.waited() == pytest.approx(2.0)


@pytest.mark.skipif(sys.platform != "linux", reason="the count is Linux's")
def test_a_process_that_shares_a_core_waits_for_it() -> None:
    code = """
        import os, time
        from accelcheck.measure.paired import waited

        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        other = os.fork()
        if other == 0:
            while True:
                pass
        before, end = waited(), time.monotonic() + 1.0
        while time.monotonic() < end:
            pass
        os.kill(other, 9)
        print(waited() - before)
        """
    result = subprocess.check_output([sys.executable, "-c", textwrap.dedent(code)], text=True)
    assert 0.2 < float(result) < 1.0
