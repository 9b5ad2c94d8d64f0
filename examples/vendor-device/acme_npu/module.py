"""Functions of ``torch.acme`` that torch asks the module of a device for."""

from __future__ import annotations

import torch
from torch import Tensor

from acme_npu import _C


def is_available() -> bool:
    """Returns True where ``ACME_VISIBLE_DEVICES``, if set, names a device."""
    return _C.visible()


def is_initialized() -> bool:
    """Returns True where this process uses it."""
    return _C.in_use()


def __getattr__(name: str) -> bool:
    """``_initialized``, read by `torch.utils.checkpoint` before it keeps the generator's state."""
    if name == "_initialized":
        return is_initialized()
    raise AttributeError(f"torch.acme has no {name}")


def _is_in_bad_fork() -> bool:
    return _C.in_bad_fork()


def device_count() -> int:
    """Number of devices."""
    return int(_C.visible())


def current_device() -> int:
    """Index of the current device."""
    return 0


def set_device(device: torch.types.Device) -> None:
    """Make a device the current one."""
    index = device if isinstance(device, int) else torch.device(device or "acme").index
    if index not in {None, 0}:
        raise RuntimeError(f"acme: expected device 0, the only one, got {device}")


class device:  # noqa: N801 - the name that torch asks for
    """A context in which a device is the current one; there is only one."""

    def __init__(self, device: torch.types.Device) -> None:
        set_device(device)

    def __enter__(self) -> None:
        """Nothing changes."""

    def __exit__(self, *_: object) -> None:
        """Nothing is to be undone."""


def current_stream(device: torch.types.Device = None) -> torch.Stream:
    """The stream that kernels are put into."""
    return torch.accelerator.current_stream("acme")


def get_device_name(device: torch.types.Device = None) -> str:
    """The chip's name."""
    return "Acme NPU (simulated on the host)"


def synchronize(device: torch.types.Device = None) -> None:
    """Wait until the device has done all its work."""
    _C.synchronize()


def manual_seed_all(seed: int) -> None:
    """Seed the generator of every device."""
    _C.default_generator().manual_seed(seed)


manual_seed = manual_seed_all


def get_rng_state(device: torch.types.Device = "acme") -> Tensor:
    """The state of a device's generator."""
    return _C.default_generator().get_state()


def set_rng_state(state: Tensor, device: torch.types.Device = "acme") -> None:
    """Set the state of a device's generator."""
    _C.default_generator().set_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that autocast may take."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    """Returns True, since it computes in bfloat16."""
    return True


def fallbacks(*, reset: bool = False) -> int:
    """Counts operators that torch's fallback ran on the CPU, for want of a kernel of its own."""
    return _C.fallbacks(reset)


def sleep(milliseconds: float) -> None:
    """Have the current stream wait: for tests of the order of streams."""
    _C.sleep(milliseconds)
