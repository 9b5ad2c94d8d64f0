"""Global state that decides what torch computes in this process: read, compared, and restored.

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
"""Device types whose autocast state is read."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
MOST = 5
"""Most changed functions or variables named in a line."""


Setting = tuple[str, Callable[[], Any], Callable[[Any], object]]
"""Global setting: its name, its reader, and its writer."""


@dataclass(frozen=True, slots=True)
class _Change:
    """Changed part of the state: its fault, and functions that restore the former and the present value."""

    fault: Fault
    undo: Callable[[], object]
    redo: Callable[[], object]


@dataclass(frozen=True, eq=False)
class GlobalState:
    """Global state of this process and thread at one moment.

    Attributes:
        values: Value of each setting, in the order of `_SETTINGS`.
        functions: Functions of torch's and NumPy's namespaces, by name.
        folder: Working folder; None where it does not exist any more.
        dispatch_modes, function_modes: Active modes, the innermost last.
        kernels: Names of the kernels that Python code has registered for operators.
        generators: Random number generators, restored without a fault: most cases seed them.
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
        """Reads everything, in about 1 ms."""
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
        """Restores all that differs, and returns a fault for each such part.

        Names only added to a namespace, as by an import, give no fault.
        """
        faults = []
        for change in self._changes():
            faults.append(change.fault)
            change.undo()
        self.generators.restore()
        return faults

    def differences(self) -> list[Fault]:
        """Faults of all parts that differ; restores nothing."""
        return [change.fault for change in self._changes()]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restores the state that decides FP64 results on the CPU inside a context, and the present state after it."""
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
        """Yields changes one after the other: the previous one is undone before the next is looked for."""
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
        """Yields new kernels of torch's operators, without redoing them: a library does not keep its functions."""
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
            fault = _fault("working folder", self.folder, str(folder))
            redo = functools.partial(os.chdir, folder or os.sep)
            yield _Change(fault, functools.partial(os.chdir, self.folder), redo)

    def _patched(self, *, whole: bool) -> Iterator[tuple[str, Any, str, Any, Any]]:
        """Title, namespace, name, former value and present value of each function that was replaced or removed."""
        spaces = _spaces()[: None if whole else len(_CALLED)]
        for (title, space), was in zip(spaces, self.functions, strict=False):
            present = vars(space)
            if present == was:  # compares by identity first
                continue
            for name, value in was.items():
                now = present.get(name, _ABSENT)
                if now is not value and _computes(value) and not _own(value, now):
                    yield title, space, name, value, now
            for name in present.keys() - was.keys():
                if _computes(present[name]) and _hides(space, name, present[name]):
                    yield title, space, name, _ABSENT, present[name]


_OWN = frozenset(
    "PYTEST_CURRENT_TEST TORCHINDUCTOR_CACHE_DIR _TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR "
    "SKIP_MEGASCALE_PJRT_CLIENT".split()
)
"""Variables that pytest, torch and torch_xla set while they run."""
_AT_LOAD = ("KMP_",)
"""Prefix of variables that an OpenMP library reads when loaded; packages, such as scikit-learn, set them on import."""
_WRAPPERS = ("torch/_compile.py", "torch/_dynamo/mutation_guard.py")
"""Files of wrappers that dynamo puts around torch's functions on first use: they compute nothing."""
_AROUND = ("torch/_dynamo/eval_frame.py", "torch/optim/optimizer.py")
"""Files of wrappers that dynamo puts around optimizers on first use, and torch around the first optimizer's `step`."""
_ABSENT = object()
"""Placeholder for a function that a namespace does not hold: an inherited or deleted one."""
_PRODUCTS = "precision of products"
_NOT_JUDGING = frozenset({_PRODUCTS, *config_modules.CONFIGS})
"""Settings that are slow to read, and irrelevant to FP64."""


def _fault(name: str, expected: str, got: str) -> Fault:
    return Fault(FaultKind.STATE, name, expected=expected, got=got)


def _moded(
    name: str, was: tuple[Any, ...], now: tuple[Any, ...], write: Callable[[tuple[Any, ...]], object]
) -> Iterator[_Change]:
    if len(was) != len(now) or any(a is not b for a, b in zip(was, now, strict=True)):
        names = (", ".join(type(mode).__name__ for mode in modes) or "none" for modes in (was, now))
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
    # A mode's `with` sets them beside the stack: while they are set, dynamo silently compiles nothing.
    return {name: value for name, value in vars(torch_names.python_dispatch).items() if name.startswith("_is_in_")}


def _set_dispatch_flags(value: Mapping[str, bool]) -> None:
    for name, flag in value.items():
        setattr(torch_names.python_dispatch, name, flag)


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
    # There is no setter: a guard sets the mode while it lives.
    _GUARDS.append(torch_names.InferenceMode(value))


_GUARDS: list[Any] = []


def _flushes() -> bool:
    # torch has only a setter. NumPy's scalars compute in this thread, whatever modes of torch are active.
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
    # Cast weights are cached until the outermost autocast ends: with one that never does, they become stale.
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


def _set_cudnn(value: tuple[bool, ...]) -> None:
    for name, setting in zip(_CUDNN, value, strict=True):
        setattr(torch.backends.cudnn, name, setting)


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
    """Names of the kernels that torch's modules register on import, many of them during a compilation."""
    spaces = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("torch.")]
    libraries = (value for space in spaces for value in space.values() if type(value) is torch.library.Library)
    return {name for library in libraries for name in vars(library)["_op_impls"]}


def _unregister(kernels: set[str]) -> None:
    # Nothing lists the libraries, and each unregisters all that it has registered.
    for instance in gc.get_objects():
        if issubclass(type(instance), torch.library.Library) and kernels & vars(instance)["_op_impls"]:
            instance._destroy()  # noqa: SLF001 - torch releases a library in no other way


def _set_interop(value: int) -> None:
    with contextlib.suppress(RuntimeError):  # running threads cannot change their number
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
    ("rounding mode", getattr(ctypes.pythonapi, "fegetround", int), getattr(ctypes.pythonapi, "fesetround", int)),
    ("mkldnn", torch_names.mkldnn_enabled, torch_names.set_mkldnn_enabled),
    ("cudnn", lambda: tuple(getattr(torch.backends.cudnn, name) for name in _CUDNN), _set_cudnn),
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
"""Prefixes of further modules: their functions, and the methods of their classes, may be patched."""


@functools.cache
def _spaces() -> tuple[tuple[str, Any], ...]:
    """Namespaces with functions that may be patched, by title; those of `_CALLED` come first."""
    modules = {name: module for name, module in sys.modules.items() if f"{name}.".startswith(_FAMILIES)}
    classes = {
        f"{value.__module__}.{value.__qualname__}": value
        for module in modules.values()
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__.startswith(_FAMILIES)
    }
    return tuple((dict(_CALLED) | {"torch.ops.aten": torch.ops.aten} | modules | classes).items())


def _computes(value: Any) -> bool:
    """True for a function, method or class, False for state in a namespace."""
    return callable(value) or isinstance(value, (types.GetSetDescriptorType, property, staticmethod, classmethod))


def _hides(space: Any, name: str, value: Any) -> bool:
    """True if an added function replaces an inherited one, or an operator of torch."""
    if space is torch.ops.aten:  # it adds operators when they are asked for
        return not isinstance(value, torch_names.OpOverloadPacket)
    bases = space.__mro__[1:] if isinstance(space, type) else ()
    inherited = next((vars(base)[name] for base in bases if name in vars(base)), _ABSENT)
    return inherited is not _ABSENT and not _own(inherited, value)


def _own(was: Any, now: Any) -> bool:
    """True if torch itself replaced a function: a default dtype's storage, or one that dynamo must not trace."""
    return was is torch.FloatStorage or _file(now).endswith(_WRAPPERS) or _within(now) is _within(was)


def _within(value: Any) -> Any:
    """Innermost function below torch's wrappers."""
    while _file(value).endswith(_AROUND):
        inner = getattr(value, "_torchdynamo_orig_callable", None) or getattr(value, "__wrapped__", None)
        if inner is None:
            break
        value = inner
    return value


def _file(value: Any) -> str:
    return str(getattr(getattr(value, "__code__", None), "co_filename", ""))


def _differing(was: Any, now: Any) -> tuple[Any, Any]:
    """Differing parts of two values."""
    if is_dataclass(was) and type(was) is type(now):
        was, now = astuple(was), astuple(now)  # type: ignore[arg-type]  # instances, as both are of the type
    if isinstance(was, tuple) and isinstance(now, tuple) and len(was) == len(now):
        parts = [_differing(a, b) for a, b in zip(was, now, strict=True) if a != b]
        return parts[0] if len(parts) == 1 else (tuple(a for a, _ in parts), tuple(b for _, b in parts))
    return was, now


def _folder() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - text, as os.chdir had it
    except OSError:
        return None


def _brief(value: Any) -> str:
    text = _ADDRESS.sub("", str([*value.values()] if isinstance(value, dict) else value))
    return text if len(text) <= 80 else f"{text[:77]}..."


def _listed(names: list[str]) -> str:
    more = len(names) - MOST
    return ", ".join(names[:MOST]) + (f" and {more} more" if more > 0 else "")
