"""Forks of a process that has computed with several threads."""

from __future__ import annotations

import subprocess
import sys

from process_harness import completed

CODE = """
import torch
from accelcheck.core.clean_process import CleanProcess
from accelcheck.verify.cache import compute

torch.set_num_threads(2)
compute()
clean = CleanProcess([], ((compute, 30.0),))
clean.call(compute, limit=30.0)
compute()
print("computed", clean.call(torch.get_num_threads), torch.get_num_threads())
clean.close()
"""


def test_a_fork_of_a_process_that_has_computed_with_threads_computes_with_as_many() -> None:
    done = completed([sys.executable, "-c", CODE], timeout=120)
    assert done.stdout == "computed 2 2\n", done.stderr


def test_without_torch_there_is_nothing_to_end() -> None:
    code = (
        "import sys; from accelcheck.core.forking import end_threads; end_threads(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
