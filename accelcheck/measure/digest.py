"""Digests of the work of timed cases; a stored baseline applies to the digest that it was measured with.

Functions that the hashed source calls are not followed: after a change to these, remove the baseline.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from accelcheck.workloads.base import Problem


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.memory_format, torch.layout)


def digest(case: str, problem: Problem) -> str:
    """Eight hexadecimal digits of a case's id, module (parts, settings, source), sizes, loss, optimizer and steps."""
    return hashlib.blake2b("\n".join(_facts(case, problem)).encode(), digest_size=4).hexdigest()


def _facts(case: str, problem: Problem) -> Iterator[str]:
    yield case
    yield repr(problem.module)
    classes: dict[type, None] = {}
    for name, module in problem.module.named_modules():
        settings = {key: value for key, value in vars(module).items() if not key.startswith("_") and _plain(value)}
        yield f"{name}: {sorted(settings.items())}"
        classes.update((cls, None) for cls in type(module).__mro__ if not _torchs(cls))
    yield from (_source(cls) for cls in classes)
    # A missing target is a fact too.
    own_target = problem.target if isinstance(problem.target, tuple) else (problem.target,)
    for value in (*problem.inputs, *own_target, *problem.module.parameters(), *problem.module.buffers()):
        yield _called(value)
    yield from (_called(problem.loss), _called(problem.optimizer), str(problem.steps))


def _plain(value: object) -> bool:
    return value is None or isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_plain, value)))


def _called(thing: Any, within: tuple[int, ...] = ()) -> str:
    """Describes a function or object and what is bound to it, without its address, which differs between processes."""
    if _plain(thing):
        return repr(thing)
    if id(thing) in within:
        return "itself"
    if isinstance(thing, Tensor):
        return str((tuple(thing.shape), thing.dtype))
    parts = " ".join(_called(part, (*within, id(thing))) for part in _bound(thing))
    return f"{_source(thing if hasattr(thing, '__qualname__') else type(thing))} {parts}"


def _bound(thing: Any) -> Iterable[Any]:
    """The values that are bound to a function or object: arguments, items, settings, closures."""
    if isinstance(thing, functools.partial):
        return thing.func, thing.args, thing.keywords
    if isinstance(thing, dict):
        return sorted(thing.items(), key=repr)
    if isinstance(thing, (tuple, list)):
        return thing
    if not hasattr(thing, "__qualname__"):
        return [{name: value for name, value in getattr(thing, "__dict__", {}).items() if _plain(value)}]
    if isinstance(thing, type) or _torchs(thing):
        return ()
    cells = [cell.cell_contents for cell in getattr(thing, "__closure__", None) or ()]
    return getattr(thing, "__self__", None), getattr(thing, "__defaults__", None), *cells


def _torchs(thing: Any) -> bool:
    return (thing.__module__ or "builtins").partition(".")[0] in {"torch", "builtins"}


def _source(thing: Any) -> str:
    """Name, and source without comments and layout; the name alone for torch's own, which the version identifies."""
    name = f"{thing.__module__}.{thing.__qualname__}"
    if _torchs(thing):
        return name
    try:
        text = textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):  # made at run time
        return name
    try:
        return f"{name}: {ast.unparse(ast.parse(text))}"
    except SyntaxError:  # a lambda in the middle of a statement
        return f"{name}: {text}"
