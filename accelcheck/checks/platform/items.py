"""The function that tries each item."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from accelcheck.checks.platform import collectives, dtypes, extension, loading, profiling
from accelcheck.checks.trial import Finding, Trial

ITEMS: Mapping[str, Callable[[Trial], Finding]] = MappingProxyType(
    {
        "distributed-backend": collectives.verify,
        "cpp-extension": extension.verify,
        "profiler": profiling.verify,
        "import-with-hardware": loading.with_hardware,
        "import-without-hardware": loading.without_hardware,
    }
)
"""Function by the name of the workload, without the many dtypes and modes."""


def verify(trial: Trial) -> Finding:
    """Tries the item that the workload names.

    Raises:
        Unsupported: The platform lacks it, or this machine cannot try it.
        ValueError: The workload names no item.
    """
    name = trial.case.workload
    if name.startswith(dtypes.PREFIX):
        return dtypes.verify(trial)
    if name not in ITEMS:
        raise ValueError(f"{name}: expected a dtype's workload or one of {', '.join(ITEMS)}")
    return ITEMS[name](trial)
