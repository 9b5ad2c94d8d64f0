"""Tables and progress of the commands: on a terminal, and as plain lines."""

from __future__ import annotations

import subprocess
import sys


def test_neither_the_plugin_nor_declaring_the_commands_imports_scipy_or_rich() -> None:
    code = (
        "import sys, accelcheck.plugin.hooks, accelcheck.plugin.controller, accelcheck.report.terminal, accelcheck.measure.gate; "
        "from accelcheck.core.registry import discover; discover('accelcheck.commands', 'COMMANDS'); "
        "print(*({'scipy', 'rich', 'torch'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
