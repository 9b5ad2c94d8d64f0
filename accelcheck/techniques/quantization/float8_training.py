"""Training with float8 products by torchao, forward and backward, and the FP64 emulation of such a training."""

import copy
import importlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from accelcheck.core.capability import Capability
from accelcheck.core.case import Evidence, Mode
from accelcheck.core.quiet import torchao_imported
from accelcheck.devices.base import Device
from accelcheck.devices.torch_names import disable_current_modes
from accelcheck.techniques.base import Technique
from accelcheck.techniques.observe import Log, at_least, operators
from accelcheck.techniques.quantization.emulation import RELATIVE, RoundedSides, is_linear, nearest, replaced
from accelcheck.techniques.quantization.float8 import WeightOnly
from accelcheck.techniques.quantization.int8 import Quantized, count
from accelcheck.techniques.quantization.torchao import AO_PACKAGE
from accelcheck.workloads.base import Program
from accelcheck.workloads.dispatch import layer_by_layer

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_LAYERS = "linear layers"


class _Product(torch.autograd.Function):
    """Multiplies ``x`` (..., K) by the transpose of ``weight`` (N, K); `cast` rounds operands of all three products.

    ``cast(operand, dim, gradient=False)``, where `dim` is the one that the product sums over.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cast: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.cast = cast
        out: Tensor = cast(x, -1) @ cast(weight, -1).t()
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        grad, rows = grads[0].flatten(0, -2), x.flatten(0, -2)
        of_input = ctx.cast(grad, -1, gradient=True) @ ctx.cast(weight, 0)
        of_weight = ctx.cast(grad, 0, gradient=True).t() @ ctx.cast(rows, 0)
        return of_input.reshape(x.shape), of_weight, None


class Float8Trained(nn.Module):
    """Linear layer with float8 operands in FP64, forward and backward, with the parameters of the original.

    With `rows`, each row or column of an operand has a scale, a power of two; otherwise the operand has one. `flips`
    works as in `accelcheck.techniques.quantization.emulation.Quantizer`.
    """

    def __init__(self, linear: nn.Linear, *, rows: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.rows = linear.weight, linear.bias, rows
        self.flips: torch.Generator | None = None

    def cast(self, x: Tensor, dim: int, *, gradient: bool = False) -> Tensor:
        """Rounds an operand to float8, FP64 in and out: see `_Product`."""
        with torch.no_grad(), disable_current_modes():
            dtype = E5M2 if gradient and not self.rows else E4M3
            side, single = RoundedSides(self.flips), x.float()
            most = single.abs().amax(dim, keepdim=True) if self.rows else single.abs().max()
            scale = (torch.finfo(dtype).max / most.double().clamp(min=1e-12)).float()
            if self.rows:
                scale = torch.exp2(torch.log2(side.position(scale, most, RELATIVE)).floor())
            position = side.position(single * scale, single, RELATIVE)
            return nearest(position, dtype) / (scale.double() if self.rows else side.scale(scale))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Product.apply(x, self.weight, self.cast)  # type: ignore[no-untyped-call]  # untyped in torch
        return out if self.bias is None else out + self.bias


class Float8Training(Technique):
    """Layers of ``convert_to_float8_training`` with ``emulate=True``: rounded operands, multiplied in FP32."""

    family = "quantization"
    source = "https://docs.pytorch.org/ao/stable/workflows/training.html"
    modes = frozenset({Mode.BACKWARD, Mode.TRAIN, Mode.LEARNING})
    requires = frozenset({"linear"})
    excludes = frozenset({"branching"})
    workloads = frozenset({"mlp-blocks", "transformer-block", "train-mlp", "train-transformer", "digits-mlp-training"})
    level = 3
    early = frozenset({"mlp-blocks"})
    admits = Quantized.admits
    differentiates_twice = False
    packages = {"torchao": AO_PACKAGE}  # noqa: RUF012 - as in the base class

    def __init__(self, recipe: str, scales: str, *, rows: bool) -> None:
        self.name, self.recipe, self.rows = f"float8-training-{recipe}", recipe, rows
        self.promise = f"The three products of each linear layer, forward and backward, have float8 operands: {scales}."

    def capability(self, device: Device) -> Capability:
        return WeightOnly().capability(device)

    @property
    def oracle(self) -> str:
        return self.name

    def emulate(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        return replaced(copy.deepcopy(module), lambda linear: Float8Trained(linear, rows=self.rows))

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        program.extras[_LAYERS] = count(program.module, is_linear)
        with torchao_imported():
            tools: Any = importlib.import_module("torchao.float8")
        made = replace(tools.Float8LinearConfig.from_recipe_name(self.recipe), emulate=True)
        program.module = tools.convert_to_float8_training(
            program.module, config=made, module_filter_fn=lambda layer, _: is_linear(layer)
        )
        program.around = layer_by_layer

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        wanted, steps = program.extras[_LAYERS], 1 if mode is Mode.BACKWARD else program.steps
        layers = count(program.module, lambda part: type(part).__name__ == "Float8Linear")
        yield Evidence(f"linear layers converted = {wanted} >= 1", layers, engaged=layers == wanted >= 1)
        for dtype, least in ((E4M3, 4), (E5M2, 2)) if not self.rows else ((E4M3, 6),):
            casts = sum(op.name == "aten::_to_copy" and op.outputs[0][0] == dtype for op in operators(log).operators)
            yield at_least(f"operands cast to {dtype}", casts, least * wanted * steps)


TECHNIQUES: tuple[Technique, ...] = (
    Float8Training("tensorwise", "one scale per tensor", rows=False),
    Float8Training("rowwise", "one power of two per row or column that is summed over", rows=True),
)
