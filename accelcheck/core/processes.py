"""Processes that measure end with the run that started them, however that ends. No torch."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def end_with_parent() -> None:
    """Have this process killed when the one that started it is gone; on Linux alone.

    Stopped, or in the middle of a measurement, it would not see that by itself, and would be beside what is measured next.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
