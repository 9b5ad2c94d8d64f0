"""The size of the file that a quantized model is saved to, compared with FP32."""

from __future__ import annotations

import io
import zipfile
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelcheck.core.case import Evidence

if TYPE_CHECKING:
    from collections.abc import Mapping


def on_disk(state: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes of the file that ``torch.save`` writes for a state, and how many of these are elements of tensors."""
    file = io.BytesIO()
    torch.save(state, file)
    with zipfile.ZipFile(file) as archive:
        elements = sum(entry.file_size for entry in archive.infolist() if "/data/" in entry.filename)
    return len(file.getvalue()), elements


def _tied(module: nn.Module) -> list[str]:
    """Weights of linear layers that other modules hold too, such as the table of a language model: one name each."""
    heads = {f"{name}.weight" for name, part in module.named_modules(remove_duplicate=False) if type(part) is nn.Linear}
    state = module.state_dict()
    others = {value.data_ptr() for name, value in state.items() if name not in heads}
    return [
        *{
            value.data_ptr(): name for name, value in state.items() if name in heads and value.data_ptr() in others
        }.values()
    ]


def smaller_file(plain: nn.Module, quantized: nn.Module, weights: int) -> Evidence:
    """Evidence that elements take at least a third of the FP32 weights' bytes less in the quantized model's file.

    int8 saves three quarters of these bytes. torch.ao adds 16 bytes per channel, a quarter for channels with 16 inputs. Only
    elements are compared, because everything else in the file of a small model is as large as its weights.

    Args:
        plain: The original model; counted as if it were FP32.
        quantized: The quantized model.
        weights: Bytes of the quantized layers' weights in FP32.

    Returns:
        The evidence; `Evidence.unseen` where torch.save cannot write tensors of the model's device.
    """
    full = {name: value.float() if value.is_floating_point() else value for name, value in plain.state_dict().items()}
    for name in _tied(plain):
        full[name] = full[name].clone()  # the table stays in the quantized model's file, whatever becomes of the head
    claim = f"bytes of elements in a file fall from FP32's by {weights // 3} (a third of the weights) or more"
    try:
        (file, before), (smaller, after) = on_disk(full), on_disk(quantized.state_dict())
    except (RuntimeError, NotImplementedError) as error:  # a device's storage may have no way to the CPU
        if all(value.device.type == "cpu" for value in full.values()):
            raise
        return Evidence.unseen(claim, f"torch.save: {type(error).__name__}: {str(error).splitlines()[0]}")
    return Evidence(
        claim,
        f"{before} -> {after} (whole file {file} -> {smaller})",
        engaged=before - after >= weights / 3 > 0,
    )
