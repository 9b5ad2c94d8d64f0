"""``python -m accelcheck``: the program where its folder of programs is on no path."""

import sys

from accelcheck.cli import main

sys.exit(main())
