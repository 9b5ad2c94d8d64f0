"""Private names of torch, in one module and found on demand; a missing one is named and fails no family."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import pytest
from fault_harness import Planted, seeded, verdict_of

import accelcheck
from accelcheck.core.case import Verdict
from accelcheck.devices import torch_names
from accelcheck.devices.torch_names import NAMES, UnknownTorchError

if TYPE_CHECKING:
    from accelcheck.verify.oracle import Store
    from accelcheck.workloads.base import Program

ROOT = Path(accelcheck.__file__).parent
NAME = "lookup_backend"


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> str:
    """A name that this torch does not have; the message about it."""
    monkeypatch.setattr(torch_names, "NAMES", MappingProxyType({**NAMES, NAME: ("torch._dynamo", "no_such_name")}))
    return (
        r"accelcheck does not know this torch \(2\.\S+\): torch\._dynamo\.no_such_name is gone; "
        r"accelcheck supports torch 2\.9 to 2\.15"
    )


def test_this_torch_has_every_name() -> None:
    assert torch_names.gone() == []


def test_names_and_places_are_those_of_the_annotations() -> None:
    assert NAMES["counters"] == ("torch._dynamo.utils", "counters")
    assert NAMES["scaled_mm"] == ("torch", "_scaled_mm")
    assert all(module.partition(".")[0] == "torch" for module, _ in NAMES.values())
    assert not {"annotations", "ast", "MappingProxyType"} & NAMES.keys()


def test_a_name_that_is_gone_is_named_with_the_releases_that_have_it(removed: str) -> None:
    with pytest.raises(UnknownTorchError, match=removed):
        torch_names.lookup_backend("inductor")
    (reason,) = torch_names.gone()
    assert re.fullmatch(removed, reason)


def test_a_case_that_needs_it_is_unavailable_and_does_not_fail(removed: str, store: Store) -> None:
    def needs(program: Program) -> None:
        program.extras["backend"] = torch_names.lookup_backend("inductor")

    record = verdict_of(store, Planted(needs), seeded("mlp"))
    assert (record.verdict, record.code) == (Verdict.UNAVAILABLE, "wrong-version")
    assert re.search(removed, record.why)
    assert verdict_of(store, Planted(lambda _: None), seeded("mlp")).verdict is Verdict.PASS


def test_a_module_that_is_gone_is_no_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_names, "NAMES", MappingProxyType({"counters": ("torch._no_such_module", "counters")}))
    with pytest.raises(UnknownTorchError, match=r"torch\._no_such_module\.counters is gone"):
        _ = torch_names.counters


def test_other_names_are_no_attributes() -> None:
    assert not hasattr(torch_names, "anything_else")


def test_the_module_imports_no_torch() -> None:
    code = "import sys, accelcheck.devices.torch_names; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(ROOT.rglob("*.py")) if path.name != "torch_names.py"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_private_names_of_torch_are_in_one_module(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            words = [*(node.module or "").split("."), *(name.name for name in node.names)]
        elif isinstance(node, ast.Attribute):
            words = ast.unparse(node).split(".") if re.fullmatch(r"torch(\.\w+)+", ast.unparse(node)) else []
        else:
            continue
        hidden = [word for word in words if word.startswith("_") and not word.startswith("__")]
        assert not hidden or ".ops." in f".{'.'.join(words)}." or words[-1] == "_sleep", (
            f"{path.name}:{node.lineno}: {words}"
        )
