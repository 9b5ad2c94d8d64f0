"""Program of a test's ranks, without torch: ``complain`` ends at once, ``stay`` waits to be ended. No test."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from accelcheck.core.processes import Mailbox


def main(arguments: Sequence[str]) -> None:
    how, folder = arguments
    rank = os.environ.get("RANK", "0")
    if how == "complain":
        print(f"rank {rank} has had enough", flush=True)
        sys.exit(7)
    Mailbox(Path(folder)).put(f"pid-{rank}", os.getpid())
    time.sleep(120)
