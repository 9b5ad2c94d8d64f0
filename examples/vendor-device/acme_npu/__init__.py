"""Acme NPU: an accelerator for PyTorch that simulates a chip on the host. ``torch.device("acme")``, ``torch.acme``.

Importing it imports no torch: accelcheck imports it before torch, as a parent of its plugin's modules.
"""

from __future__ import annotations

NAME = "acme"


def autoload() -> None:
    """Register the device: `import torch` calls this, through the entry point of the group ``torch.backends``."""
    import torch
    from torch.utils import backend_registration

    if hasattr(torch, NAME):
        return
    from acme_npu import module

    backend_registration.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, module)  # type: ignore[no-untyped-call]  # noqa: SLF001 - documented
    backend_registration.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
