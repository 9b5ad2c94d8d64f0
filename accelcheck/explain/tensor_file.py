"""Writes and reads tensors in the format safetensors: https://github.com/huggingface/safetensors#format."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "complex64": "C64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""Names of torch's dtypes in the format safetensors."""


def reading(file: str) -> list[str]:
    """Lines of a script that define ``read(name)``, which makes a 1-D tensor from a file."""
    kinds = ", ".join(f'"{short}": torch.{name}' for name, short in NAMES.items())
    return [
        f'raw = open("{file}", "rb").read()  # safetensors: the length of a JSON head, the head, the numbers',
        'size = 8 + int.from_bytes(raw[:8], "little")',
        "head = json.loads(raw[8:size])",
        f"kinds = {{{kinds}}}",
        "def read(name):",
        '    begin, end = head[name]["data_offsets"]',
        '    return torch.frombuffer(bytearray(raw[size + begin:size + end]), dtype=kinds[head[name]["dtype"]])',
    ]


def packed(tensors: Mapping[str, Tensor]) -> bytes:
    """Encode tensors as the bytes of a file."""
    head: dict[str, Any] = {}
    body = b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        kind = NAMES[str(tensor.dtype).removeprefix("torch.")]
        head[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body
