"""AMD GPUs through a ROCm build of torch."""

from __future__ import annotations

from typing import ClassVar

from accelcheck.core.capability import Capability, Code, unavailable
from accelcheck.devices import hardware
from accelcheck.devices._late_torch import torch
from accelcheck.devices.base import Device, Fingerprint
from accelcheck.devices.cuda import CudaLike
from accelcheck.devices.packages import versions


class Rocm(CudaLike):
    """``rocm``: AMD GPUs."""

    name = "rocm"
    features = CudaLike.features | {"hip"}
    masks: ClassVar[tuple[str, ...]] = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    variables: ClassVar[tuple[str, ...]] = (
        *("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HIPBLASLT_ALLOW_TF32", "HIP_LAUNCH_BLOCKING"),
        *("HIP_VISIBLE_DEVICES", "HSA_CU_MASK", "HSA_OVERRIDE_GFX_VERSION", "HSA_XNACK"),
        *("MIOPEN_DEBUG_CONVOLUTION_ATTRIB_FP16_ALT_IMPL", "MIOPEN_FIND_ENFORCE", "MIOPEN_FIND_MODE"),
        *("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_TUNABLEOP_ENABLED"),
        *("ROCBLAS_INTERNAL_FP16_ALT_IMPL", "ROCR_VISIBLE_DEVICES", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
        *("TORCH_BLAS_PREFER_HIPBLASLT", "TORCH_ROCM_FA_PREFER_CK"),
    )

    def hardware(self) -> hardware.Hardware:
        return hardware.amd()

    def architecture(self) -> str:
        """The name of the instruction set, such as ``gfx942``, without the settings that follow it."""
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return str(getattr(properties, "gcnArchName", "")).partition(":")[0]

    def usable(self) -> Capability:
        if torch.version.hip is None:
            reason = f"torch {torch.__version__} is built without ROCm, and this machine has an AMD GPU"
            action = "install a ROCm build of torch: https://pytorch.org/get-started/locally"
            return unavailable(Code.WRONG_BUILD, reason, action)
        return self.offered()

    def fingerprint(self) -> Fingerprint:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        # The marketing name may be empty in a container; the architecture never is.
        chip = " ".join(filter(None, (properties.name, getattr(properties, "gcnArchName", ""))))
        packages = versions("torch", "triton", "pytorch-triton-rocm", "triton-rocm", "numpy")
        return self.described(chip, f"HIP {torch.version.hip}", packages)


DEVICES: tuple[Device, ...] = (Rocm(),)
