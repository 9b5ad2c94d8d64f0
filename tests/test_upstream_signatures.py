"""Stubs of upstream functions agree with the stored signatures, which are read without an import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from upstream_signatures import PACKAGES, extracted, signature, stored, unlike_upstream

PACKED = "hopper/flash_attn_interface.py:flash_attn_qkvpacked_func"
SOURCE = """
from . import _defaults
SIZE, OTHER = 3, 4
LIMIT = 7
def scaled(x: "Tensor", size: int = _defaults.SIZE, *, kind=Kind.PLAIN, **more: object) -> None: ...
class Session:
    def run(self, names, feed=None): ...
"""


def test_every_name_has_a_stored_signature() -> None:
    for package, files in PACKAGES.items():
        names = {f"{path}:{name}" for path, listed in files.items() for name in listed}
        assert stored()["packages"][package]["signatures"].keys() == names
        assert all(signature(package, name) for name in names)


def right(qkv: Any, softmax_scale: Any, causal: Any = False, *, window_size: Any = (-1, -1)) -> None: ...
def placeholders(_: Any, __: Any = None) -> None: ...
def renamed(packed: Any) -> None: ...
def reordered(qkv: Any, causal: Any = False) -> None: ...
def other_default(qkv: Any, softmax_scale: Any = None, causal: Any = True) -> None: ...
def unknown_option(qkv: Any, *, dropout_p: Any = 0.0) -> None: ...
def takes_anything(qkv: Any, **options: Any) -> None: ...
def lacks_the_input() -> None: ...


@pytest.mark.parametrize("stub", [right, placeholders])
def test_a_stub_may_have_fewer_parameters_and_require_more(stub: Callable[..., Any]) -> None:
    assert unlike_upstream("flash-attn", PACKED, stub) == []


@pytest.mark.parametrize(
    "stub",
    [renamed, reordered, other_default, unknown_option, takes_anything, lacks_the_input],
    ids=lambda stub: stub.__name__,
)
def test_a_stub_that_differs_is_named_with_the_date(stub: Callable[..., Any]) -> None:
    lines = unlike_upstream("flash-attn", PACKED, stub)
    assert lines
    assert all(stored()["compared"] in line for line in lines)


def test_signatures_are_read_from_source() -> None:
    files = {"package/main.py": SOURCE, "package/_defaults.py": "SIZE = 5"}
    assert dict(extracted(files.__getitem__, "package/main.py", ("scaled", "Session.run", "LIMIT"))) == {
        "package/main.py:scaled": "x, size=5, *, kind=..., **more",
        "package/main.py:Session.run": "names, feed=None",
        "package/main.py:LIMIT": "value=7",
    }


def test_a_name_that_a_package_no_longer_has_is_an_error() -> None:
    with pytest.raises(KeyError):
        dict(extracted({"main.py": SOURCE}.__getitem__, "main.py", ("gone",)))
