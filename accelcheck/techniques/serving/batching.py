"""Independence of a batch: each row alone gives its result in the batch, within rounding or, by some kernels, bitwise."""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.techniques.observe import exactly
from accelcheck.techniques.serving.decoding import Serving, only
from accelcheck.workloads.decoders import Decoder

if TYPE_CHECKING:
    from collections.abc import Iterable

    from accelcheck.devices.base import Device
    from accelcheck.techniques.base import Technique
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program

_ALIKE = "rows alike"


class RowsAlone(Serving):
    """Runs each row of a batch alone.

    Attributes:
        bitwise: True for kernels that promise the bits of the batch.
    """

    family = "batching"
    bitwise = False

    def capability(self, device: Device) -> Capability:
        if self.bitwise and not device.has("torch-cuda"):
            return unsupported(Code.NO_BACKEND, "batch_invariant_ops has Triton kernels for CUDA alone")
        return SUPPORTED

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        decoder: Decoder = only(program, Decoder)

        def call(tokens: Tensor) -> Tensor:
            with self.kernels():
                out = torch.cat([decoder(row) for row in tokens.split(1)])
                if self.bitwise:
                    program.extras[_ALIKE] = (out == decoder(tokens)).flatten(1).all(1)
            return out

        program.call = call

    def kernels(self) -> Any:
        """Makes the context of the kernels."""
        if not self.bitwise:
            return contextlib.nullcontext()
        return importlib.import_module("batch_invariant_ops").set_batch_invariant_mode()

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        rows = program.inputs[0].size(0)
        yield exactly("passes, by their embeddings", log.count("aten::embedding"), rows + self.bitwise)
        if self.bitwise:
            yield exactly("rows with the bits that they have in the batch", int(program.extras[_ALIKE].sum()), rows)


TECHNIQUES: tuple[Technique, ...] = (
    RowsAlone(
        "batch-invariant",
        "A row computed alone has the result that it has in a batch, within rounding.",
        *("decoder", "decoder-experts"),
        source="https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html",
    ),
    RowsAlone(
        "batch-invariant-kernels",
        "A row computed alone has the bits that it has in a batch.",
        *("decoder", "decoder-experts"),
        source="https://github.com/thinking-machines-lab/batch_invariant_ops",
        packages={
            "batch_invariant_ops": "pip install git+https://github.com/thinking-machines-lab/batch_invariant_ops"
        },
        bitwise=True,
    ),
)
