"""What quantization saves: bytes of the weights in memory, and of the file that the model is saved to."""

from __future__ import annotations

import io
import zipfile
from typing import TYPE_CHECKING, Any

import torch

from accelcheck.core.case import Evidence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn


def on_disk(state: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes of the file that ``torch.save`` writes of a state, and those among them that are tensors' elements."""
    file = io.BytesIO()
    torch.save(state, file)
    with zipfile.ZipFile(file) as archive:
        elements = sum(entry.file_size for entry in archive.infolist() if "/data/" in entry.filename)
    return len(file.getvalue()), elements


def smaller_file(plain: nn.Module, quantized: nn.Module, weights: int) -> Evidence:
    """Whether the elements in the quantized model's file are fewer than in FP32's, by a third of its weights or more.

    int8 takes three quarters away; what torch.ao adds, 16 bytes a channel, is a quarter where a channel has 16 inputs. Of
    a small model, what a file holds besides elements is as large as the weights.

    Args:
        plain: The model as it was; counted as if it were FP32.
        quantized: What became of it.
        weights: Bytes of the weights in FP32.
    """
    full = {name: value.float() if value.is_floating_point() else value for name, value in plain.state_dict().items()}
    (file, before), (smaller, after) = on_disk(full), on_disk(quantized.state_dict())
    return Evidence(
        f"bytes of elements in a file fall from FP32's by {weights // 3} (a third of the weights) or more",
        f"{before} -> {after} (whole file {file} -> {smaller})",
        engaged=before - after >= weights / 3 > 0,
    )
