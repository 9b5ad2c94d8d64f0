"""``torchrun``: real processes on this machine, started as users start them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelcheck.core.processes import Child, calling

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def torchrun(
    options: Sequence[str], function: str, arguments: Sequence[object] = (), environ: Mapping[str, str] | None = None
) -> Child:
    """Start torchrun under this Python. It and its ranks end with this process, and its ranks end with it.

    Args:
        options: Options of torchrun: ``--nproc-per-node=2``, ``--standalone``.
        function: Function that each rank calls, ``package.module:name``, with a list of texts.
        arguments: Of the function.
        environ: Variables besides those of this process.
    """
    words = [*options, *calling(function, *arguments)]
    return Child(
        calling("torch.distributed.run:main", *words, parent=True), {"OMP_NUM_THREADS": "1", **(environ or {})}
    )
