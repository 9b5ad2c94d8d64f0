"""``torch.func``: modules mapped over samples, and differentiated as functions of their parameters and inputs.

Only private predicates of `torch._C._functorch` tell inside a transform whether it maps or tracks a tensor.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from accelcheck.core.capability import Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices import torch_names
from accelcheck.devices.base import Device
from accelcheck.devices.torch_names import pytree
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.observe import Log, exactly
from accelcheck.workloads.base import Program, Result, flatten, is_inexact

SAMPLEWISE = frozenset(
    """attention-causal attention-ragged cnn-frozen-norm conv-strided custom-function elementwise-5
    elementwise-broadcast elementwise-scalar embedding-norm-gelu gather gelu layer-norm-narrow matmul mean-pool
    mlp mlp-blocks transformer-block""".split()
)
"""One workload of each kind whose samples, along the first dimension of the inputs, are independent of each other."""
DIFFERENTIABLE = frozenset(
    """attention-causal conv-strided custom-function elementwise-5 embedding-norm-gelu mlp mlp-blocks shared-layer
    train-mlp train-transformer transformer-block""".split()
)
"""One workload of each kind, for `torch.func.grad` and `vjp`. Custom functions must have a ``setup_context``."""
SMALL = frozenset(["elementwise-broadcast", "elementwise-overlap", "layer-norm-narrow", "max-pool", "softmax"])
"""Workloads whose whole Jacobian has at most a million elements, and whose operators have forward derivatives."""

MOST_ELEMENTS = 5 * 10**7
"""Largest Jacobian that is computed whole, in elements."""

_NOT_MAPPED = re.compile(r"vmap: .*(data-dependent control flow|randomness|\.item\(\))|Batching rule not implemented")
"""Pattern of torch's errors for a module that vmap does not support; see "Limitations" in its documentation."""
_SEEN = "what the module was given under a transform"


class Transform(Technique):
    """Transform of `torch.func` around the module, which counts the tensors that the module is called with."""

    family = "autograd"
    source = "https://docs.pytorch.org/docs/stable/func.api.html"
    keeps_strides = False

    def __init__(self, name: str, promise: str) -> None:
        self.name, self.promise = name, promise


class Mapped(Transform):
    """``vmap`` over the samples: the module is called once, for one sample."""

    requires = frozenset({"samplewise"})
    workloads = SAMPLEWISE
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD})

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        seen = program.extras[_SEEN] = Counter[str]()
        program.resets.append(seen.clear)
        program.call = self.over(program, seen)

    def over(self, program: Program, seen: Counter[str]) -> Callable[..., Any]:
        """Maps the program's module; the result counts in `seen` what `evidence` reads."""
        return mapped(program.module, seen)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        seen: Counter[str] = program.extras[_SEEN]
        calls, batches = seen["calls"], seen["batches"]
        yield Evidence(f"calls of the module = {batches}, one a batch", calls, engaged=calls == batches > 0)
        whole = seen["inputs"]
        yield Evidence(f"mapped inputs of the module = {whole}", seen["mapped"], engaged=seen["mapped"] == whole > 0)


class MappedCopies(Mapped):
    """``vmap`` over two copies of all inputs; the results of the second copy are judged."""

    requires = frozenset()
    workloads = frozenset({"elementwise-5", "matmul", "mlp"})

    def over(self, program: Program, seen: Counter[str]) -> Callable[..., Any]:
        return copied(program.module, seen, program.writes)


class Differentiated(Transform):
    """Gradients by a transform, applied to the program as a function of its parameters and floating-point inputs."""

    modes = frozenset({Mode.BACKWARD})
    excludes = frozenset({"batchnorm"})  # a transform refuses to update statistics that the module holds
    differentiates_twice = False

    def gradients(self, function: Function, leaves: Mapping[str, Tensor]) -> tuple[Result, Result]:
        """Computes all outputs by path, and the gradients of `leaves` by name."""
        raise NotImplementedError(f"{type(self).__name__}.gradients: apply the transform")

    def idle(self, program: Program) -> frozenset[int]:
        """Returns the places of floating-point inputs that no output depends on: they get no gradient."""
        return frozenset()

    def tracks(self, leaf: Tensor) -> bool:
        """Returns whether the transform tracks a parameter or input, as the module sees it."""
        return bool(torch_names.functorch.is_gradtrackingtensor(leaf))

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        function = Function(program, self.tracks)
        function.idle = self.idle(program)
        program.extras[_SEEN] = function.seen
        program.resets.append(function.seen.clear)
        if mode is Mode.TRAIN:
            program.backpropagate = function.backpropagate
        else:
            program.elsewhere = lambda own, _: self._run(own, function)

    def _run(self, program: Program, function: Function) -> Result:
        function.seen.clear()
        program.switch(training=True)
        program.module.zero_grad(set_to_none=True)
        inputs = {
            f"input[{index}]": value.detach()
            for index, value in enumerate(program.inputs)
            if is_inexact(value) and index not in function.idle
        }
        outputs, gradients = self.gradients(function, inputs | function.parameters())
        buffers = {f"buffer:{name}": buffer.clone() for name, buffer in program.module.named_buffers()}
        return outputs | {f"grad:{name}": gradient for name, gradient in gradients.items()} | buffers

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        seen: Counter[str] = program.extras[_SEEN]
        calls = program.steps if mode is Mode.TRAIN else 1
        yield exactly("calls of the module as a function", seen["calls"], calls)
        claim = f"parameters and inputs tracked by the transform = {seen['leaves']}"
        yield Evidence(claim, seen["tracked"], engaged=seen["tracked"] == seen["leaves"] > 0)
        yield exactly("parameters left replaced by a call", seen["replaced"], 0)
        if mode is not Mode.TRAIN:
            left = sum(parameter.grad is not None for parameter in program.module.parameters())
            yield exactly("gradients that the tape left in parameters", left, 0)


class Grad(Differentiated):
    """``vjp`` with the output gradients of the plain run; in training, ``grad_and_value`` of the loss."""

    workloads = DIFFERENTIABLE
    modes = frozenset({Mode.BACKWARD, Mode.TRAIN})

    def gradients(self, function: Function, leaves: Mapping[str, Tensor]) -> tuple[Result, Result]:
        transformed: Any = torch.func.vjp(function, leaves, has_aux=True)  # annotated without the auxiliary outputs
        floats, pull, others = transformed
        return floats | others, pull(function.cotangents(floats))[0]


class Jacobian(Differentiated):
    """Whole Jacobian, by columns (`forward`) or rows (reverse), contracted with the plain run's output gradients."""

    workloads = SMALL

    def __init__(self, name: str, promise: str, *, forward: bool) -> None:
        super().__init__(name, promise)
        self.forward = forward

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        idle, outputs = self._traced(program)
        if any(tensor.is_complex() for tensor in (*program.module.parameters(), *program.inputs, *outputs)):
            raise Unsupported(unsupported(Code.NO_FEATURE, "torch computes whole Jacobians of real numbers alone"))
        leaves = [value for place, value in enumerate(program.inputs) if is_inexact(value) and place not in idle]
        given = [*program.module.parameters(), *leaves]
        rows, columns = (sum(tensor.numel() for tensor in tensors) for tensors in (outputs, given))
        if rows * columns > MOST_ELEMENTS:
            reason = f"the whole Jacobian has {rows:,} x {columns:,} elements"
            most = f"and is computed up to {MOST_ELEMENTS:,} of them"
            raise Unsupported(unsupported(Code.TOO_LARGE, f"{reason}, {most}"))
        super().prepare(program, mode, device)

    def idle(self, program: Program) -> frozenset[int]:
        return self._traced(program)[0]

    def _traced(self, program: Program) -> tuple[frozenset[int], list[Tensor]]:
        """Returns the places of the inputs that no output depends on, and the outputs that have gradients."""
        program.switch(training=True)
        inputs = [value.detach().requires_grad_() if is_inexact(value) else value for value in program.inputs]
        call = program.module if program.call is None else program.call
        outputs = [out for _, out in flatten(call(*inputs)) if is_inexact(out)]
        places = [place for place, value in enumerate(inputs) if is_inexact(value)]
        roots = [out.sum().real for out in outputs if out.requires_grad]
        gradients = torch.autograd.grad(roots, [inputs[place] for place in places], allow_unused=True)
        return frozenset(place for place, grad in zip(places, gradients, strict=True) if grad is None), outputs

    def tracks(self, leaf: Tensor) -> bool:
        if not self.forward:
            return super().tracks(leaf)
        return forward_ad.unpack_dual(leaf).tangent is not None  # type: ignore[no-untyped-call]  # untyped in torch

    def gradients(self, function: Function, leaves: Mapping[str, Tensor]) -> tuple[Result, Result]:
        def doubled(leaves: Mapping[str, Tensor]) -> tuple[Result, tuple[Result, Result]]:
            floats, others = function(leaves)
            return floats, (floats, others)

        transform = torch.func.jacfwd if self.forward else torch.func.jacrev
        try:
            jacobian, (floats, others) = transform(doubled, has_aux=True)(leaves)
        except NotImplementedError as error:
            if "forward AD" not in str(error):
                raise
            reason = f"torch has no forward derivative here: {str(error).splitlines()[0]}"
            raise Unsupported(unsupported(Code.NO_FEATURE, reason)) from error
        cotangents = function.cotangents(floats)
        gradients = {
            name: torch.stack(
                [_contracted(given, jacobian[path][name]).to(leaf.dtype) for path, given in cotangents.items()]
            ).sum(0)
            for name, leaf in leaves.items()
        }
        return floats | others, gradients


def _contracted(cotangent: Tensor, jacobian: Tensor) -> Tensor:
    """Multiplies over the output's dimensions, in the wider dtype: a Jacobian has that of the inputs or the output."""
    wider = torch.promote_types(cotangent.dtype, jacobian.dtype)
    product: Tensor = torch.tensordot(cotangent.to(wider), jacobian.to(wider), dims=cotangent.dim())
    return product


class Function:
    """Program as a function of its parameters and float inputs by name. Counts calls and tensors that `tracks` sees."""

    def __init__(self, program: Program, tracks: Callable[[Tensor], bool]) -> None:
        self.program = program
        self.tracks = tracks
        self.seen: Counter[str] = Counter()
        self.idle: frozenset[int] = frozenset()
        """Places of inputs on which no output depends: they get no gradient."""
        self._own = dict(program.module.named_parameters())

    def __call__(self, leaves: Mapping[str, Tensor]) -> tuple[Result, Result]:
        """Computes the floating-point and complex outputs, and all other outputs, by path."""
        outputs = dict(flatten(self._called(leaves)))
        floats = {path: out for path, out in outputs.items() if is_inexact(out)}
        return floats, {path: out for path, out in outputs.items() if path not in floats}

    def parameters(self) -> dict[str, Tensor]:
        """Returns the module's parameters by name, detached from the autograd graph."""
        return {name: parameter.detach() for name, parameter in self._own.items()}

    def cotangents(self, outputs: Result) -> Result:
        """Returns the output gradients of the plain run, by path."""
        return {path: self.program.cotangent(path, out) for path, out in outputs.items()}

    def backpropagate(self, step: int) -> Tensor:
        """Sets the parameters' gradients of the loss and returns the loss, as `Program.backpropagate` requires."""
        if step == 0:
            self.seen.clear()
        program = self.program

        def loss(parameters: Mapping[str, Tensor]) -> Tensor:
            if program.loss is None or program.target is None:
                raise ValueError("a training loss needs a loss and a target: give the Problem both")
            return program.loss(self._called(parameters), program.target)

        gradients, value = torch.func.grad_and_value(loss)(self.parameters())
        for name, parameter in self._own.items():
            parameter.grad = gradients[name]
        result: Tensor = value
        return result

    def _called(self, leaves: Mapping[str, Tensor]) -> Any:
        program = self.program
        self.seen.update(calls=1, leaves=len(leaves), tracked=sum(map(self.tracks, leaves.values())))
        inputs = tuple(leaves.get(f"input[{index}]", value) for index, value in enumerate(program.inputs))
        parameters = {f"module.{name}": leaves[name] for name in self._own}
        with program.around():
            out = torch.func.functional_call(_ProgramModule(program), parameters, inputs)
        # Put back and count parameters that the call has left replaced, so that later runs use the module's own.
        for name, parameter in self._own.items():
            prefix, _, last = name.rpartition(".")
            owner = program.module.get_submodule(prefix)
            if getattr(owner, last) is not parameter:
                self.seen["replaced"] += 1
                setattr(owner, last, parameter)
        return out


class _ProgramModule(nn.Module):
    """Module with the program's module as a child that calls what the program calls."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.module = program.module
        # Not the call, which may be the module: registered as a child twice, it would not be restored.
        self.program = program

    def forward(self, *inputs: Any) -> Any:
        call = self.module if self.program.call is None else self.program.call
        return call(*inputs)


def mapped(module: nn.Module, seen: Counter[str]) -> Callable[..., Any]:
    """Maps `module`, called with batches of one sample, over all inputs whose first size is that of the first input.

    `seen` counts calls, batches, inputs with a batch dimension, and how many of these are mapped inside.
    """

    def call(*inputs: Any) -> Any:
        batch = inputs[0].size(0)
        dims = tuple(0 if isinstance(v, Tensor) and v.dim() and v.size(0) == batch else None for v in inputs)
        seen["batches"] += 1

        def sample(*values: Any) -> Any:
            _count(seen, [value for value, dim in zip(values, dims, strict=True) if dim == 0])
            lone = [value if dim is None else value.unsqueeze(0) for value, dim in zip(values, dims, strict=True)]
            return pytree.tree_map_only(Tensor, lambda out: out.squeeze(0), module(*lone))

        try:
            return torch.func.vmap(sample, in_dims=dims)(*inputs)
        except RuntimeError as error:
            if _NOT_MAPPED.search(str(error)):
                reason = f"torch.func.vmap cannot map the module: {str(error).splitlines()[0]}"
                raise Unsupported(unsupported(Code.NO_FEATURE, reason)) from error
            raise

    return call


def _count(seen: Counter[str], inputs: list[Any]) -> None:
    """Counts a call inside `torch.func.vmap`, its inputs with a batch dimension, and those of them that are mapped."""
    mapped_inputs = sum(bool(torch_names.functorch.is_batchedtensor(value)) for value in inputs)
    seen.update(calls=1, inputs=len(inputs), mapped=mapped_inputs)


def copied(module: nn.Module, seen: Counter[str], writes: Collection[int] = ()) -> Callable[..., Any]:
    """Maps `module` over two copies of its inputs, counted as in `mapped`; inputs at `writes` get the second ones."""

    def call(*inputs: Any) -> Any:
        dims = tuple(0 if isinstance(value, Tensor) else None for value in inputs)
        seen["batches"] += 1

        def copy(*values: Any) -> Any:
            _count(seen, [value for value in values if isinstance(value, Tensor)])
            return module(*values)

        copies = [torch.stack([value, value]) if isinstance(value, Tensor) else value for value in inputs]
        out = torch.func.vmap(copy, in_dims=dims)(*copies)
        for place in writes:
            inputs[place].copy_(copies[place][1])
        return pytree.tree_map_only(Tensor, lambda results: results[1], out)

    return call


TECHNIQUES: tuple[Technique, ...] = (
    Mapped("func-vmap", "A module mapped over samples gives the same outputs and gradients as for the batch."),
    MappedCopies("func-vmap-copies", "Operators mapped over copies of their inputs give what each copy gives."),
    Grad("func-grad", "Gradients of a functional call equal those of autograd."),
    Jacobian(
        "func-jacrev",
        "The Jacobian by reverse mode, mapped over its rows, contracts to autograd's gradient.", forward=False),
    Jacobian(
        "func-jacfwd",
        "The Jacobian by forward mode, mapped over its columns, contracts to autograd's gradient.", forward=True),
)  # fmt: skip
