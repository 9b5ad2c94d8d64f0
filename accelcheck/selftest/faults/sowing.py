"""Ways to plant in a function that a technique calls, a graph that it compiles, or the text of a generated kernel."""

import contextlib
import functools
import pkgutil
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias
from unittest import mock

from torch import fx

from accelcheck.core.capability import Code
from accelcheck.devices import torch_names
from accelcheck.selftest.faults.base import where

Around: TypeAlias = "Callable[[float], AbstractContextManager[None]]"
"""Maker of a fault's context, its `around`."""

in_cpp = where(lambda device: device.has("inductor-cpp"), "inductor generates no C++ for {}", Code.NO_BACKEND)
"""Devices for which inductor generates C++, which `kernel_text` changes."""


@contextlib.contextmanager
def swapped(owner: Any, name: str, wrong: Callable[..., Any]) -> Iterator[None]:
    """Replace calls of an attribute of a class or module by ``wrong(plain, *args, **kwargs)`` while active.

    Args:
        owner: Class or module that callers look the attribute up in.
        name: Name of a function or method.
        wrong: Function that gets the plain one first.

    Raises:
        LookupError: Nothing has called it: the fault was not planted.
    """
    plain, calls = getattr(owner, name), []

    def called(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return wrong(plain, *args, **kwargs)

    with mock.patch.object(owner, name, called):
        yield
    if not calls:
        raise LookupError(f"nothing planted: expected calls of {owner.__name__}.{name}, there were none")


def replacing(owner: Any, name: str) -> Callable[[Callable[..., Any]], Around]:
    """A decorator that makes the `wrong` of `swapped` a fault's `around`; an owner by its name is imported late."""

    def decorate(wrong: Callable[..., Any]) -> Around:
        @functools.wraps(wrong)
        def around(strength: float) -> AbstractContextManager[None]:
            return swapped(pkgutil.resolve_name(owner) if isinstance(owner, str) else owner, name, wrong)

        return around

    return decorate


@contextlib.contextmanager
def fresh_code(*plants: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter `plants` with temporary compiler caches, so that no later case finds a faulty kernel."""
    with torch_names.fresh_inductor_cache(), contextlib.ExitStack() as held:
        for plant in plants:
            held.enter_context(plant)
        yield


@contextlib.contextmanager
def _editing(plant: Callable[[list[int]], AbstractContextManager[Any]], absent: str, strength: float) -> Iterator[None]:
    """Enter a plant that notes its numbers of edits, and raise a `LookupError` afterwards where it edited nothing."""
    edits: list[int] = []
    with plant(edits):
        yield
    if not any(edits):
        raise LookupError(f"nothing planted: {absent}")


def kernel_text(pattern: str, edit: Callable[[re.Match[str]], str], most: int = 0) -> Around:
    """Edit the C++ text that inductor generates for kernels of the CPU, while active.

    Args:
        pattern: Regular expression of the text to replace; without such a text in a kernel, a `LookupError` follows.
        edit: Function from a match to its replacement.
        most: Number of matches per kernel that are replaced; 0 for all.
    """

    def plant(edits: list[int]) -> AbstractContextManager[None]:
        def wrong(plain: Callable[..., Any], compiler: Any, types: list[str], text: str) -> Any:
            text, times = re.subn(pattern, edit, text, count=most)
            edits.append(times)
            return plain(compiler, types, text)

        return fresh_code(swapped(torch_names.AsyncCompile, "cpp_pybinding", wrong))

    return functools.partial(_editing, plant, f"no generated kernel has a text like {pattern!r}")


def graph_pass(edit: Callable[[fx.Graph], int]) -> Around:
    """Edit inductor's graphs after its own passes, just before they are lowered to kernels, while active.

    Args:
        edit: Function that changes a graph of ATen operators in place, and returns the number of changed nodes; a
            `LookupError` where it changes no graph.
    """

    def plant(edits: list[int]) -> AbstractContextManager[None]:
        note = {"post_grad_custom_post_pass": lambda graph: edits.append(edit(graph))}
        return fresh_code(torch_names.inductor_config.patch(note))

    return functools.partial(_editing, plant, "no graph that inductor compiled has such a node")


def exported(edit: Callable[[fx.Graph], int]) -> Around:
    """Edit the programs that ``torch.export.export`` returns while active, see `graph_pass`."""
    import torch

    def plant(edits: list[int]) -> AbstractContextManager[None]:
        def wrong(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            program = plain(*args, **kwargs)
            edits.append(edit(program.graph_module.graph))
            program.graph_module.recompile()
            return program

        return swapped(torch.export, "export", wrong)

    return functools.partial(_editing, plant, "no exported graph has such a node")


def calls_of(graph: fx.Graph, *names: str) -> list[fx.Node]:
    """The nodes that call an ATen operator of these names, such as ``linear``, in order."""
    return [
        node
        for node in graph.nodes
        if node.op == "call_function" and str(node.target).partition(".")[2].partition(".")[0] in names
    ]


def with_argument(name: str, index: int, value: Any) -> Callable[[fx.Graph], int]:
    """An edit that gives the last call of an operator another argument; none in graphs without a call."""

    def edit(graph: fx.Graph) -> int:
        calls = calls_of(graph, name)[-1:]
        for node in calls:
            node.args = (*node.args[:index], value, *node.args[index + 1 :])
        return len(calls)

    return edit


def without_call(name: str) -> Callable[[fx.Graph], int]:
    """An edit that replaces the result of the last call of an operator by its first operand."""

    def edit(graph: fx.Graph) -> int:
        calls = calls_of(graph, name)[-1:]
        for node in calls:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
        return len(calls)

    return edit
