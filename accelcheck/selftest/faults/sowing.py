"""Ways to plant in a function that a technique calls, a graph that it compiles, or the text of a generated kernel."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any
from unittest import mock

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import fx

    from accelcheck.devices.base import Device


def in_cpp(device: Device) -> Capability:
    """Devices for which inductor generates C++, which `kernel_text` changes."""
    if not device.has("inductor-cpp"):
        return unsupported(Code.NO_BACKEND, f"inductor generates no C++ for {device.name}")
    return SUPPORTED


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


@contextlib.contextmanager
def fresh_code(*plants: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter `plants` with temporary compiler caches, so that no later case finds a faulty kernel."""
    from accelcheck.devices.torch_names import fresh_inductor_cache

    with fresh_inductor_cache(), contextlib.ExitStack() as held:
        for plant in plants:
            held.enter_context(plant)
        yield


@contextlib.contextmanager
def kernel_text(pattern: str, edit: Callable[[re.Match[str]], str], most: int = 0) -> Iterator[None]:
    """Edit the C++ text that inductor generates for kernels of the CPU, while active.

    Args:
        pattern: Regular expression of the text to replace.
        edit: Function from a match to its replacement.
        most: Number of matches per kernel that are replaced; 0 for all.

    Raises:
        LookupError: No kernel had such a text.
    """
    from accelcheck.devices.torch_names import AsyncCompile

    edited = 0

    def wrong(plain: Callable[..., Any], compiler: Any, types: list[str], text: str) -> Any:
        nonlocal edited
        text, times = re.subn(pattern, edit, text, count=most)
        edited += times
        return plain(compiler, types, text)

    with fresh_code(swapped(AsyncCompile, "cpp_pybinding", wrong)):
        yield
    if not edited:
        raise LookupError(f"nothing planted: no generated kernel has a text like {pattern!r}")


@contextlib.contextmanager
def graph_pass(edit: Callable[[fx.Graph], int]) -> Iterator[None]:
    """Edit inductor's graphs after its own passes, just before they are lowered to kernels, while active.

    Args:
        edit: Function that changes a graph of ATen operators in place, and returns the number of changed nodes.

    Raises:
        LookupError: It changed no graph.
    """
    from accelcheck.devices.torch_names import inductor_config as config

    edited = 0

    def changed(graph: fx.Graph) -> None:
        nonlocal edited
        edited += edit(graph)

    with fresh_code(config.patch(post_grad_custom_post_pass=changed)):
        yield
    if not edited:
        raise LookupError("nothing planted: no graph that inductor compiled has such a node")


@contextlib.contextmanager
def exported(edit: Callable[[fx.Graph], int]) -> Iterator[None]:
    """Edit the programs that ``torch.export.export`` returns while active, see `graph_pass`."""
    import torch

    edited = 0

    def wrong(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal edited
        program = plain(*args, **kwargs)
        edited += edit(program.graph_module.graph)
        program.graph_module.recompile()
        return program

    with swapped(torch.export, "export", wrong):
        yield
    if not edited:
        raise LookupError("nothing planted: no exported graph has such a node")


def calls_of(graph: fx.Graph, *names: str) -> list[fx.Node]:
    """The nodes that call an ATen operator of these names, such as ``linear``, in order."""
    return [
        node
        for node in graph.nodes
        if node.op == "call_function" and str(node.target).partition(".")[2].partition(".")[0] in names
    ]


def with_argument(name: str, index: int, value: Any, which: int = -1) -> Callable[[fx.Graph], int]:
    """An edit that gives a call of an operator another argument; none in graphs without such a call.

    Args:
        name: Name of the operator, as in `calls_of`.
        index: Position of the argument.
        value: New argument; a function is called with the old one.
        which: Index of the call.
    """

    def edit(graph: fx.Graph) -> int:
        calls = calls_of(graph, name)
        if not calls:
            return 0
        node = calls[which]
        old = node.args[index] if index < len(node.args) else None
        new = value(old) if callable(value) else value
        node.args = (*node.args[:index], new, *node.args[index + 1 :])
        return 1

    return edit


def without_call(name: str, which: int = -1) -> Callable[[fx.Graph], int]:
    """An edit that replaces the result of a call of an operator by its first operand."""

    def edit(graph: fx.Graph) -> int:
        calls = calls_of(graph, name)
        if not calls:
            return 0
        node = calls[which]
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.erase_node(node)
        return 1

    return edit
