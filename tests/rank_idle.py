"""What a test's `Torchrun` runs, without torch: ``complain`` ends at once, ``stay`` waits to be ended. No test by itself."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from accelcheck.techniques.processes.torchrun import leave_with_parent, put

if __name__ == "__main__":
    leave_with_parent()
    rank = os.environ.get("RANK", "0")
    if sys.argv[1] == "complain":
        print(f"rank {rank} has had enough", flush=True)
        sys.exit(7)
    put(Path(sys.argv[2]) / f"here-{rank}", os.getpid())
    time.sleep(120)
