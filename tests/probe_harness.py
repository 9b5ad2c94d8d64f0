"""Programs for children of the probe.

It has no tests of its own.
"""

HANG = "import time; time.sleep(600)"
# What the probe asks of torch, in no time: so that a child which hangs is told from one on a busy machine.
TORCH = """
import importlib.metadata, os, types
__version__ = "0.0"
accelerator = types.SimpleNamespace(current_accelerator=lambda: None)
backends = types.SimpleNamespace(cpu=types.SimpleNamespace(get_cpu_capability=lambda: "NONE"))
_C = types.SimpleNamespace(_get_privateuse1_backend_name=lambda: "privateuseone")
if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
    for entry in importlib.metadata.entry_points(group="torch.backends"):
        entry.load()()
"""
