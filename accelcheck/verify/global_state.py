"""The global state that decides what torch computes in this process: read, compared, and put back.

A case that leaves it changed would change every later case: they would pass, or fail, on other numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, is_dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.modules import module as module_hooks

from accelcheck.core.fault import Fault, FaultKind
from accelcheck.devices import strict, torch_names
from accelcheck.verify import config_modules
from accelcheck.verify.generators import Generators

AUTOCAST = ("cpu", "cuda", "xla")
"""Device types whose autocast is looked at."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
MOST = 5
"""Changed functions or variables that a line names."""


Setting = tuple[str, Callable[[], Any], Callable[[Any], object]]
"""A global setting: its name, how it is read, and how a value that was read is put back."""


@dataclass(frozen=True, slots=True)
class _Change:
    """One part of the state that is not as it was: the fault, and what makes it as it was and as it is."""

    fault: Fault
    undo: Callable[[], object]
    redo: Callable[[], object]


@dataclass(frozen=True, eq=False)
class GlobalState:
    """The global state of this process and thread at one moment.

    Attributes:
        values: Of each setting, in the order of `_SETTINGS`.
        functions: For each namespace of torch and NumPy what it holds, by name.
        environment: The variables.
        folder: The working folder; None where it does not exist any more.
        dispatch_modes, function_modes: The active ones, the innermost last.
        kernels: Names of those that Python code has registered for operators.
        generators: Of random numbers. They are put back in silence: most cases seed them.
    """

    values: tuple[Any, ...]
    functions: tuple[Mapping[str, Any], ...]
    environment: Mapping[str, str]
    folder: str | None
    dispatch_modes: tuple[Any, ...]
    function_modes: tuple[Any, ...]
    kernels: frozenset[str]
    generators: Generators

    @classmethod
    def now(cls) -> GlobalState:
        """Read everything; takes about 1 ms."""
        return cls(
            tuple(read() for _, read, _ in _SETTINGS),
            tuple(dict(vars(space)) for _, space in _spaces()),
            dict(os.environ),
            _folder(),
            _dispatch_modes(),
            _function_modes(),
            frozenset(torch_names.python_kernels),
            Generators.now(),
        )

    def restore(self) -> list[Fault]:
        """Put back what differs. Returns a fault for each such part.

        Names that were only added to a namespace, as an import does, count for nothing.
        """
        faults = []
        for change in self._changes():
            faults.append(change.fault)
            change.undo()
        self.generators.restore()
        return faults

    def differences(self) -> list[Fault]:
        """A fault for each part that differs; nothing is put back."""
        return [change.fault for change in self._changes()]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which what decides the result of FP64 on the CPU is as it was then; afterwards it is again as it is now."""
        changes = []
        for change in self._changes(whole=False):
            changes.append(change)
            change.undo()
        try:
            yield
        finally:
            for change in changes:
                change.redo()

    def _changes(self, *, whole: bool = True) -> Iterator[_Change]:
        """What differs now, one part after the other: the former one has been undone when the next is looked at."""
        yield from _moded("dispatch modes", self.dispatch_modes, _dispatch_modes(), _set_dispatch_modes)
        for (name, read, write), was in zip(_SETTINGS, self.values, strict=True):
            if whole or name not in _NOT_JUDGING:
                now = read()
                if was != now:
                    fault = _fault(name, *map(_brief, _differing(was, now)))
                    yield _Change(fault, functools.partial(write, was), functools.partial(write, now))
        # After the default device, which is one of them.
        yield from _moded("function modes", self.function_modes, _function_modes(), _set_function_modes)
        if patched := [*self._patched(whole=whole)]:
            names = _listed([f"{title}.{name}" for title, _, name, _, _ in patched])
            yield _Change(
                _fault("functions", "torch's own", f"others for {names}"),
                functools.partial(_set_functions, [(space, name, was) for _, space, name, was, _ in patched]),
                functools.partial(_set_functions, [(space, name, now) for _, space, name, _, now in patched]),
            )
        if whole:
            yield from self._surroundings()
            yield from self._registered()

    def _registered(self) -> Iterator[_Change]:
        """Kernels that are new for operators of torch. None is put in place again: a library does not keep its functions."""
        new = {name for name in torch_names.python_kernels - self.kernels if name.startswith("aten/")}
        if new and (others := new - _own_kernels()):
            fault = _fault("kernels of torch.library", "torch's own", f"others for {_listed(sorted(others))}")
            yield _Change(fault, functools.partial(_unregister, others), lambda: None)

    def _surroundings(self) -> Iterator[_Change]:
        now = dict(os.environ)
        differing = sorted(
            name
            for name in self.environment.keys() | now.keys()
            if self.environment.get(name) != now.get(name) and name not in _OWN and not name.startswith(_AT_LOAD)
        )
        if differing:
            yield _Change(
                _fault("environment", "it as it was", f"others for {_listed(differing)}"),
                functools.partial(_set_variables, {name: self.environment.get(name) for name in differing}),
                functools.partial(_set_variables, {name: now.get(name) for name in differing}),
            )
        folder = _folder()
        if self.folder is not None and folder != self.folder:
            redo = functools.partial(os.chdir, folder or os.sep)
            yield _Change(
                _fault("working folder", self.folder, str(folder)), functools.partial(os.chdir, self.folder), redo
            )

    def _patched(self, *, whole: bool) -> Iterator[tuple[str, Any, str, Any, Any]]:
        """Title, namespace, name, former value and present value of each function that is another one now, or is gone."""
        spaces = _spaces()[: None if whole else len(_CALLED)]
        for (title, space), was in zip(spaces, self.functions, strict=False):
            found = vars(space)
            if found == was:  # compares by identity first
                continue
            for name, value in was.items():
                now = found.get(name, _ABSENT)
                if now is not value and _computes(value) and not _own(value, now):
                    yield title, space, name, value, now
            for name in found.keys() - was.keys():
                if _computes(found[name]) and _hides(space, name, found[name]):
                    yield title, space, name, _ABSENT, found[name]


_OWN = frozenset(
    {
        "PYTEST_CURRENT_TEST",
        "TORCHINDUCTOR_CACHE_DIR",
        "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
        "SKIP_MEGASCALE_PJRT_CLIENT",
    }
)
"""Variables that pytest, torch and torch_xla set while they run."""
_AT_LOAD = ("KMP_",)
"""What begins so is read when an OpenMP library is loaded; packages set it when they are imported first, scikit-learn for one."""
_WRAPPERS = ("torch/_compile.py", "torch/_dynamo/mutation_guard.py")
"""Files of the functions that dynamo, when it is used first, puts around some of torch's: they compute nothing."""
_AROUND = ("torch/_dynamo/eval_frame.py", "torch/optim/optimizer.py")
"""Files of the functions that dynamo puts around optimizers when it is used first, and torch around `step` when the first one is made."""
_ABSENT = object()
"""In place of a function that a namespace does not hold: a method that is inherited, or one that was deleted."""
_PRODUCTS = "precision of products"
_NOT_JUDGING = frozenset({_PRODUCTS, *config_modules.CONFIGS})
"""Settings that are slow to read, and no matter for FP64."""


def _fault(name: str, expected: str, got: str) -> Fault:
    return Fault(FaultKind.STATE, name, expected=expected, got=got)


def _moded(
    name: str, was: tuple[Any, ...], now: tuple[Any, ...], write: Callable[[tuple[Any, ...]], object]
) -> Iterator[_Change]:
    if len(was) != len(now) or any(a is not b for a, b in zip(was, now, strict=True)):
        names = (", ".join(type(mode).__name__ for mode in found) or "none" for found in (was, now))
        yield _Change(_fault(name, *names), functools.partial(write, was), functools.partial(write, now))


def _dispatch_modes() -> tuple[Any, ...]:
    return tuple(torch_names.get_current_dispatch_mode_stack())


def _set_dispatch_modes(value: tuple[Any, ...]) -> None:
    for _ in _dispatch_modes():
        torch_names.pop_dispatch_mode()
    for mode in value:
        torch_names.push_dispatch_mode(mode)
    if not value:
        _set_dispatch_flags(dict.fromkeys(_dispatch_flags(), False))


def _dispatch_flags() -> dict[str, bool]:
    # Kept beside the stack, by a mode's `with`: while they are set, dynamo compiles nothing and says nothing.
    return {name: value for name, value in vars(torch_names.python_dispatch).items() if name.startswith("_is_in_")}


def _set_dispatch_flags(value: Mapping[str, bool]) -> None:
    for name, one in value.items():
        setattr(torch_names.python_dispatch, name, one)


def _function_modes() -> tuple[Any, ...]:
    stack = range(torch_names.function_modes())
    return tuple(torch_names.function_mode_at(level) for level in stack)


def _set_function_modes(value: tuple[Any, ...]) -> None:
    for _ in _function_modes():
        torch_names.pop_function_mode()
    for mode in value:
        torch_names.push_function_mode(mode)


def _set_functions(values: list[tuple[Any, str, Any]]) -> None:
    for space, name, value in values:
        if value is _ABSENT:
            delattr(space, name)
        else:
            setattr(space, name, value)


def _set_variables(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _default_device() -> Any:
    context = getattr(torch_names.GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _leave_inference(value: bool) -> None:  # noqa: FBT001 - as it was read
    # There is no setter: a guard sets the mode as long as it lives.
    _GUARDS.append(torch_names.InferenceMode(value))


_GUARDS: list[Any] = []


def _flushes() -> bool:
    # There is a setter alone. NumPy's scalars compute in this thread, whatever modes of torch are active.
    return float(np.float64(2.0**-1060) * np.float64(0.5)) == 0.0


def _autocast(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _set_autocast(kind: str, value: tuple[bool, torch.dtype]) -> None:
    torch.set_autocast_enabled(kind, value[0])
    torch.set_autocast_dtype(kind, value[1])


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _set_nesting(value: int) -> None:
    # Weights that were cast are kept until the outermost autocast ends: with one that never does, they become stale.
    while _nesting() > value:
        torch.autocast_decrement_nesting()
    while _nesting() < value:
        torch.autocast_increment_nesting()
    torch.clear_autocast_cache()


_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")


def _attention() -> tuple[bool, ...]:
    return tuple(getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _ATTENTION)


def _set_attention(value: tuple[bool, ...]) -> None:
    for name, enabled in zip(_ATTENTION, value, strict=True):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(enabled)


_FILLED = "fill_uninitialized_memory"  # torch's annotations leave it out


def _deterministic() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        getattr(torch.utils.deterministic, _FILLED),
    )


def _set_deterministic(value: tuple[bool, bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])
    setattr(torch.utils.deterministic, _FILLED, value[2])


_CUDNN = ("enabled", "benchmark", "deterministic")


def _cudnn() -> tuple[bool, ...]:
    return tuple(getattr(torch.backends.cudnn, name) for name in _CUDNN)


def _set_cudnn(value: tuple[bool, ...]) -> None:
    for name, one in zip(_CUDNN, value, strict=True):
        setattr(torch.backends.cudnn, name, one)


def _hooks() -> tuple[dict[Any, Any], ...]:
    return tuple(dict(hooks) for hooks in _HOOKS)


def _set_hooks(value: tuple[dict[Any, Any], ...]) -> None:
    for hooks, was in zip(_HOOKS, value, strict=True):
        hooks.clear()
        hooks.update(was)


_HOOKS: tuple[dict[Any, Any], ...] = (
    torch_names.optimizer_pre_hooks,
    torch_names.optimizer_post_hooks,
    *(value for name, value in vars(module_hooks).items() if name.startswith("_global_") and isinstance(value, dict)),
)
"""Hooks of all optimizers and of all modules."""


def _saved_hooks() -> Any:
    return torch_names.saved_tensor_hooks(True)  # noqa: FBT003 - torch's own signature


def _set_saved_hooks(value: Any) -> None:
    while (now := _saved_hooks()) is not None and now != value:
        torch_names.pop_saved_tensor_hooks()
    if now != value:
        torch_names.push_saved_tensor_hooks(*value)


def _own_kernels() -> set[str]:
    """Names of the kernels that torch's modules register when they are imported, which many are when something is compiled."""
    spaces = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("torch.")]
    libraries = (value for space in spaces for value in space.values() if type(value) is torch.library.Library)
    return {name for library in libraries for name in vars(library)["_op_impls"]}


def _unregister(kernels: set[str]) -> None:
    # Nothing lists the libraries, and each unregisters all that it has registered.
    for one in gc.get_objects():
        if issubclass(type(one), torch.library.Library) and kernels & vars(one)["_op_impls"]:
            one._destroy()  # noqa: SLF001 - torch lets go of a library in no other way


def _rounding_mode() -> int:
    return getattr(ctypes.pythonapi, "fegetround", lambda: 0)()


def _set_rounding_mode(value: int) -> None:
    ctypes.pythonapi.fesetround(value)


def _set_interop(value: int) -> None:
    with contextlib.suppress(RuntimeError):  # once the threads run, their number is what it is
        torch.set_num_interop_threads(value)


_SETTINGS: tuple[Setting, ...] = (
    ("flags of dispatch modes", _dispatch_flags, _set_dispatch_flags),
    ("inference mode", torch.is_inference_mode_enabled, _leave_inference),
    ("grad mode", torch.is_grad_enabled, torch_names.set_grad_mode),
    ("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("default device", _default_device, torch.set_default_device),
    *(
        (f"autocast on {kind}", functools.partial(_autocast, kind), functools.partial(_set_autocast, kind))
        for kind in AUTOCAST
    ),
    ("autocast's cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    ("autocast's nesting", _nesting, _set_nesting),
    ("deterministic algorithms", _deterministic, _set_deterministic),
    ("flush-denormal", _flushes, torch.set_flush_denormal),
    ("rounding mode", _rounding_mode, _set_rounding_mode),
    ("mkldnn", torch_names.mkldnn_enabled, torch_names.set_mkldnn_enabled),
    ("cudnn", _cudnn, _set_cudnn),
    ("threads", torch.get_num_threads, torch.set_num_threads),
    ("threads between operators", torch.get_num_interop_threads, _set_interop),
    ("threads of autograd", torch_names.autograd_multithreading, torch_names.set_autograd_multithreading),
    ("attention kernels", _attention, _set_attention),
    ("fast path of attention", torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    (_PRODUCTS, strict.read_state, strict.write_state),
    ("anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    ("saved-tensor hooks", _saved_hooks, _set_saved_hooks),
    ("hooks of all modules or optimizers", _hooks, _set_hooks),
    *(
        (name, functools.partial(config_modules.changed, name), functools.partial(config_modules.change, name))
        for name in config_modules.CONFIGS
    ),
)


_CALLED: Mapping[str, Any] = {
    "torch": torch,
    "torch.nn.functional": functional,
    "torch.Tensor": torch.Tensor,
    "torch.autograd": torch.autograd,
    "torch.linalg": torch.linalg,
    "torch.special": torch.special,
    "torch.fft": torch.fft,
    "torch._C._nn": torch_names.compiled_functions,
    "numpy": np,
}
"""Namespaces of functions that a judge calls."""
_FAMILIES = ("torch.nn.", "torch.optim.", "torch.autograd.", "torch.amp.", "torch.cpu.amp.", "torch.cuda.amp.")
"""What the names of further modules begin with: their functions may be patched, and the methods of their classes."""


@functools.cache
def _spaces() -> tuple[tuple[str, Any], ...]:
    """Namespaces in which functions may be patched, by title; those of `_CALLED` come first."""
    modules = {name: module for name, module in sys.modules.items() if f"{name}.".startswith(_FAMILIES)}
    classes = {
        f"{value.__module__}.{value.__qualname__}": value
        for module in modules.values()
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__.startswith(_FAMILIES)
    }
    return tuple((dict(_CALLED) | {"torch.ops.aten": torch.ops.aten} | modules | classes).items())


def _computes(value: Any) -> bool:
    """Whether it is a function, method or class, and not state that a namespace holds."""
    return callable(value) or isinstance(value, (types.GetSetDescriptorType, property, staticmethod, classmethod))


def _hides(space: Any, name: str, value: Any) -> bool:
    """Whether a function that was added is used in place of an inherited one, or of an operator of torch."""
    if space is torch.ops.aten:  # it adds operators when they are asked for
        return not isinstance(value, torch_names.OpOverloadPacket)
    bases = space.__mro__[1:] if isinstance(space, type) else ()
    inherited = next((vars(base)[name] for base in bases if name in vars(base)), _ABSENT)
    return inherited is not _ABSENT and not _own(inherited, value)


def _own(was: Any, now: Any) -> bool:
    """Whether torch itself has put another one there: a default dtype's storage, and what dynamo is not to trace."""
    return was is torch.FloatStorage or _file(now).endswith(_WRAPPERS) or _within(now) is _within(was)


def _within(value: Any) -> Any:
    """The function that torch has put another one around, if it has."""
    while _file(value).endswith(_AROUND):
        inner = getattr(value, "_torchdynamo_orig_callable", None) or getattr(value, "__wrapped__", None)
        if inner is None:
            break
        value = inner
    return value


def _file(value: Any) -> str:
    return str(getattr(getattr(value, "__code__", None), "co_filename", ""))


def _differing(was: Any, now: Any) -> tuple[Any, Any]:
    """The parts of two values that differ."""
    if is_dataclass(was) and type(was) is type(now):
        was, now = astuple(was), astuple(now)  # type: ignore[arg-type]  # instances, as both are of the type
    if isinstance(was, tuple) and isinstance(now, tuple) and len(was) == len(now):
        parts = [_differing(a, b) for a, b in zip(was, now, strict=True) if a != b]
        return parts[0] if len(parts) == 1 else (tuple(a for a, _ in parts), tuple(b for _, b in parts))
    return was, now


def _folder() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - as it was given
    except OSError:
        return None


def _brief(value: Any) -> str:
    text = _ADDRESS.sub("", str([*value.values()] if isinstance(value, dict) else value))
    return text if len(text) <= 80 else f"{text[:77]}..."


def _listed(names: list[str]) -> str:
    more = len(names) - MOST
    return ", ".join(names[:MOST]) + (f" and {more} more" if more > 0 else "")
