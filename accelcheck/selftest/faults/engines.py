"""Faults of other runtimes: in the ONNX graph that ONNX Runtime reads, and the model that OpenVINO compiles."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from accelcheck.selftest.faults.base import alike, single
from accelcheck.selftest.faults.sowing import Around, exported, replacing, swapped, with_argument
from accelcheck.techniques.runtimes.openvino import openvino


def onnx_graph(edit: Callable[[Any, Any], None]) -> Around:
    """A decorator for changes of an ONNX graph, with ``onnx`` itself, in the file that a session is made from."""

    @functools.wraps(edit)
    def wrong(plain: Callable[..., Any], path: str, *args: Any, **kwargs: Any) -> Any:
        onnx = importlib.import_module("onnx")
        model = onnx.load(path)
        edit(model.graph, onnx)
        onnx.save(model, path)
        return plain(path, *args, **kwargs)

    return replacing("onnxruntime", "InferenceSession")(wrong)


def initializer(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, Any], None]:
    """An edit of one constant of the graph, by its name."""

    def edit(graph: Any, onnx: Any) -> None:
        (tensor,) = (initializer for initializer in graph.initializer if initializer.name == name)
        value = torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())
        tensor.CopyFrom(onnx.numpy_helper.from_array(change(value).contiguous().numpy(), name))

    return edit


@onnx_graph
def mask_moved(graph: Any, onnx: Any) -> None:
    """The exported causal mask is one position late. Queries do not see themselves."""
    (added,) = (node for node in graph.node if node.op_type == "Add")
    initializer(added.input[1], lambda mask: mask.roll(1, -2))(graph, onnx)


@onnx_graph
def gelu_by_tanh(graph: Any, onnx: Any) -> None:
    """An attribute of the exported graph asks for the approximation of GELU."""
    (gelu,) = (node for node in graph.node if node.op_type == "Gelu")
    del gelu.attribute[:]
    gelu.attribute.append(onnx.helper.make_attribute("approximate", "tanh"))


def converted(edit: Callable[[Any, Any], None]) -> Around:
    """A decorator for changes of the model, with ``openvino`` itself, that OpenVINO has converted and then compiles."""

    def wrong(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model = plain(*args, **kwargs)
        edit(model, openvino())
        return model

    return functools.wraps(edit)(lambda _: swapped(openvino(), "convert_model", wrong))


def compiled(edit: Callable[[Any, Any], None]) -> Around:
    """A decorator like `converted` for the parts of a graph that ``torch.compile`` gives to OpenVINO."""

    @functools.wraps(edit)
    def wrong(plain: Callable[..., Any], manager: Any, name: str) -> Any:
        return _EditingFrontEnd(plain(manager, name), lambda model: edit(model, openvino()))

    owner = "openvino.frontend.pytorch.torchdynamo.compile:FrontEndManager"
    return replacing(owner, "load_by_framework")(wrong)


class _EditingFrontEnd:
    """A frontend whose converted models are changed."""

    def __init__(self, plain: Any, edit: Callable[[Any], None]) -> None:
        self._plain, self._edit = plain, edit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def convert(self, *args: Any) -> Any:
        model = self._plain.convert(*args)
        self._edit(model)
        return model


@converted
def weight_rounded(model: Any, package: Any) -> None:
    """A constant of the converted model is rounded to bfloat16."""
    matrix = next(op for op in model.get_ordered_ops() if op.get_type_name() == "Constant" and len(op.shape) == 2)
    rounded = torch.from_numpy(matrix.data.copy()).bfloat16().float().numpy()
    matrix.output(0).replace(package.op.Constant(rounded).output(0))


@compiled
def activation_lost(model: Any, package: Any) -> None:
    """A part of a compiled graph has lost its last activation."""
    activations = [op for op in model.get_ordered_ops() if op.get_type_name() in {"Relu", "Swish"}]
    if activations:
        activations[-1].output(0).replace(activations[-1].input_value(0))


@converted
def causal_lost(model: Any, package: Any) -> None:
    """The converted attention is not causal."""
    (attention,) = (op for op in model.get_ordered_ops() if op.get_type_name() == "ScaledDotProductAttention")
    attention.set_attribute("causal", False)  # noqa: FBT003 - OpenVINO's signature
    model.validate_nodes_and_infer_types()


fault = alike(seeds=2)  # each draw of parameters is converted anew: a second or more each

FAULTS = (
    fault("tensorrt-bias-dropped", "The graph that becomes an engine has lost the last layer's bias.")(
        single("mlp"), around=exported(with_argument("linear", 2, None)), technique="tensorrt-fp32"
    ),
    fault("tensorrt-causal-lost", "The attention that becomes an engine is not causal.")(
        single("attention-causal"),
        around=exported(with_argument("scaled_dot_product_attention", 5, value=False)),
        technique="tensorrt-fp16",
    ),
    fault("onnx-weight-rounded", "An initializer of the exported graph is rounded to float16.")(
        single("mlp"),
        around=onnx_graph(initializer("fc2.weight", lambda weight: weight.half().float())),
        technique="onnxruntime",
    ),
    fault("onnx-mask-moved")(single("attention-causal"), around=mask_moved, technique="onnxruntime"),
    fault("onnx-gelu-by-tanh")(single("transformer-block"), around=gelu_by_tanh, technique="onnxruntime"),
    fault("openvino-weight-rounded")(single("transformer-block"), around=weight_rounded, technique="openvino"),
    fault("openvino-causal-lost")(single("attention-causal"), around=causal_lost, technique="openvino"),
    fault("openvino-activation-lost")(single("mlp"), around=activation_lost, technique="openvino-compile"),
)
