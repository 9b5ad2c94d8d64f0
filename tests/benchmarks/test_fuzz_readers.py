"""Files of strangers: any bytes, and any mutation of a valid file, are read or refused with the error of their kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from process_harness import script

fuzz = script(Path(__file__).parents[2] / "benchmarks" / "fuzz_readers.py")

# No deadline: what is read limits how long a file takes, as tests/core/test_strangers.py shows without a clock.
STEADY = settings(
    max_examples=200, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("name", fuzz.READERS)
def test_a_valid_file_is_read(name: str) -> None:
    assert fuzz.fed(fuzz.READERS[name], fuzz.READERS[name].seed)[0] == "read"


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", fuzz.READERS)
@STEADY
@given(content=st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(name: str, content: bytes) -> None:
    assert fuzz.fed(fuzz.READERS[name], content)[0] in {"read", "refused"}


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", fuzz.READERS)
@STEADY
@given(data=st.data())
def test_any_mutation_of_a_valid_file_is_read_or_refused(name: str, data: st.DataObject) -> None:
    def draw(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    assert fuzz.fed(fuzz.READERS[name], fuzz.mutated(fuzz.READERS[name].seed, draw))[0] in {"read", "refused"}


def test_a_reader_that_raises_something_else_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    def breaks(content: bytes, folder: Path) -> object:
        raise KeyError(content)

    assert fuzz.fed(fuzz.Reader(b"", breaks, ValueError), b"x")[0] == "raised"
    assert "KeyError" in capsys.readouterr().err
