"""The selected part of the matrix of cases."""

from dataclasses import dataclass

from accelcheck.core.shards import Shard


@dataclass(frozen=True)
class Selection:
    """The selected part of the matrix: empty fields select all, techniques and workloads may be globs.

    A `shard` is a part of the cases that the other fields select.
    """

    devices: tuple[str, ...]
    techniques: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    level: int = 1
    shard: Shard | None = None
    fuzz: str = ""
    """Random programs besides, as ``--accel-fuzz`` names them."""
