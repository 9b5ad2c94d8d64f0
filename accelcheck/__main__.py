"""``python -m accelcheck``: runs the program if its script is not on PATH."""

import sys

from accelcheck.cli import main

sys.exit(main())
