"""The order of packages, the names of things, and that what is registered is found: by reading the source."""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import accelcheck
from accelcheck.core.registry import discover
from accelcheck.devices.base import FEATURES
from accelcheck.expectations.ledger import Ledger

PACKAGE = Path(accelcheck.__file__).parent
GUIDE = PACKAGE.parent / "CONTRIBUTING.md"
MODULES = {
    ".".join(("accelcheck", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
LEVELS = (
    {"core"},
    {"expectations"},
    {"devices"},
    {"workloads"},
    {"measure"},
    {"verify"},
    {"techniques"},
    {"checks"},
    {"suite"},
    {"report"},
    {"explain"},
    {"plugin"},
    {"experiments", "selftest"},
    {"commands", "api"},
    {"cli"},
    {"__main__"},
)
"""Packages import only from themselves and those before them. The package itself, with its version, is below all."""
RANK = {name: rank for rank, names in enumerate(LEVELS) for name in names}
BY_DEVICE = {
    ("measure/kernels.py", "device_type == 'cuda'"): "torch.profiler has an activity of its own for CUDA",
    ("measure/gate.py", "case.device == 'cpu'"): "a record has the name of its device, and the device may be absent",
    ("workloads/custom.py", "device_type not in _PROJECTIONS"): "a cache by type",
    ("workloads/custom.py", "_PROJECTIONS[device_type]"): "the same cache",
}
"""Branches on a device's name or type, outside of `accelcheck.devices`, with the reason."""

OLD_WORDS = {
    "crew", "crews", "desk", "desks", "brought", "publish", "publishes", "published", "setup", "agents", "rounds",
}  # fmt: skip
"""Words that names no longer use: each meant something else than the field means by it."""
KEPT = {
    ("plugin/benchmark.py", "rounds"): "an argument of pytest-benchmark's `pedantic`",
    ("workloads/custom.py", "setup_context"): "a method that torch.autograd.Function calls",
    ("verify/own_gradients.py", "setup_context"): "the same method",
    ("techniques/fused/_swish.py", "setup_context"): "an argument of torch.library's register_autograd",
    ("workloads/derivatives.py", "setup_context"): "the same method",
    ("experiments/claims/catalogue.py", "published"): "a field of claims.toml: what an article publishes",
    ("experiments/claims/report.py", "published"): "the same field",
    ("report/html/experiments.py", "published"): "the same field, in the file of results",
}
"""Identifiers with one of these words in its ordinary meaning, or from a library, with the reason."""


def package_of(module: str) -> str:
    """The package below accelcheck (or the module on top) that a module belongs to; empty for accelcheck itself."""
    return (*module.split("."), "")[1]


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: expected an absolute import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield from (name for name in ([whole] if whole in MODULES else [node.module or ""]) if name in MODULES)


def named(path: Path) -> Iterator[str]:
    """The modules of accelcheck that a module imports by a text: `discover` and `import_module` of a literal."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in {"discover", "import_module"}:
            first = node.args[0]
            if isinstance(first, ast.Constant) and str(first.value) in MODULES:
                yield str(first.value)


def upward(module: str, names: set[str]) -> list[str]:
    own = package_of(module)
    others = {name: package_of(name) for name in names}
    return sorted(name for name, other in others.items() if other and other != own and RANK[other] >= RANK[own])


def test_every_package_has_its_place_in_the_order() -> None:
    assert {package_of(name) for name in MODULES} - {""} == set(RANK)


@pytest.mark.parametrize("module", [name for name in MODULES if name != "accelcheck"])
def test_imports_only_go_down(module: str) -> None:
    assert upward(module, set(imported(MODULES[module])) | set(named(MODULES[module]))) == []


def test_an_import_that_goes_up_is_found(tmp_path: Path) -> None:
    path = tmp_path / "late.py"
    path.write_text(
        "if TYPE_CHECKING:\n    from accelcheck.cli import main\n"
        "def late():\n    from accelcheck.plugin import hooks\n    import_module('accelcheck.report')\n"
    )
    assert set(imported(path)) == {"accelcheck.cli", "accelcheck.plugin.hooks"}
    assert upward("accelcheck.report.late", set(imported(path))) == ["accelcheck.cli", "accelcheck.plugin.hooks"]
    assert upward("accelcheck.commands.late", set(imported(path))) == ["accelcheck.cli"]
    assert set(named(path)) == {"accelcheck.report"}


def test_nothing_inside_imports_the_public_interface() -> None:
    assert [name for name, path in MODULES.items() if "accelcheck.api" in imported(path)] == []


def test_no_modules_import_each_other_not_even_for_annotations() -> None:
    graph = {name: set(imported(path)) - {name} for name, path in MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def by_name_of_device(source: str) -> list[str]:
    """Comparisons of a device's name or type with a literal or constant, and look-ups by it, tensors' devices aside."""
    device = re.compile(
        r"(?:(?:self|trial|own|self\.trial)\.)?device\.(?:name|type)|(?:self\.)?device_type|case\.device"
    )

    def table(node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id.isupper()

    def literal(node: ast.expr) -> bool:
        parts = node.elts if isinstance(node, (ast.Set, ast.Tuple, ast.List)) else [node]
        return table(node) or all(isinstance(part, ast.Constant) for part in parts)

    wrong = []
    for node in ast.walk(ast.parse(source)):
        parts: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            parts = [part for part in (node.left, *node.comparators) if not literal(part)]
            parts = parts if len(parts) <= len(node.comparators) else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and table(node.func.value):
            parts = node.args
        elif isinstance(node, ast.Subscript) and table(node.value):
            parts = [node.slice]
        if any(device.fullmatch(ast.unparse(part)) for part in parts):
            wrong.append(ast.unparse(node))
    return wrong


@pytest.mark.slow
def test_what_a_device_can_do_is_asked_by_its_features_not_by_its_name() -> None:
    branches = {
        (path.relative_to(PACKAGE).as_posix(), text)
        for name, path in MODULES.items()
        if package_of(name) != "devices"
        for text in by_name_of_device(path.read_text("utf-8"))
    }
    assert branches == set(BY_DEVICE)


@pytest.mark.parametrize(
    ("code", "branches"),
    [
        ("device.type == 'cuda'", True),
        ("self.device.name != 'rocm'", True),
        ("trial.device.type in {'cpu', 'xla'}", True),
        ("device.type not in TYPES", True),
        ("OPERATORS.get(device.type)", True),
        ("OPERATORS[device.type]", True),
        ("device.has('host')", False),
        ("tensor.device.type == 'cpu'", False),
        ("tensor.device.type == device.type", False),
        ("device.type in fused()", False),
    ],
)
def test_a_branch_on_the_name_or_type_of_a_device_is_found(code: str, branches: bool) -> None:
    assert bool(by_name_of_device(code)) is branches


def test_every_feature_that_is_asked_for_is_one() -> None:
    asked = {
        str(node.args[0].value)
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "has"
        if isinstance(node.args[0], ast.Constant)
    }
    assert asked
    assert asked <= set(FEATURES)


def test_no_two_public_classes_share_a_name() -> None:
    places = defaultdict(list)
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def words(identifier: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)]


def outdated(identifier: str) -> bool:
    """Returns True where a name has a given-up word; ``round`` alone is torch's and Python's."""
    if words(identifier) == ["elastic", "agents"] or identifier.startswith("pytest_"):
        return False
    parts = words(identifier)
    return bool(OLD_WORDS & set(parts)) or (parts[:1] == ["round"] and identifier[0].isupper())


def identifiers() -> set[tuple[str, str]]:
    """Every name in the source, with its file: of modules, classes, functions, arguments, variables and attributes."""
    names = set()
    for path in MODULES.values():
        place = path.relative_to(PACKAGE).as_posix()
        names |= {(place, part) for part in path.relative_to(PACKAGE).with_suffix("").parts}
        with path.open("rb") as file:
            names |= {(place, t.string) for t in tokenize.tokenize(file.readline) if t.type == tokenize.NAME}
    return names


@pytest.mark.slow
def test_no_name_has_a_word_that_was_given_up() -> None:
    assert {pair for pair in identifiers() if outdated(pair[1])} == set(KEPT)


@pytest.mark.parametrize("name", ["RankCrew", "timing_rounds", "RoundResult", "setup", "agents", "brought"])
def test_a_word_that_was_given_up_is_found(name: str) -> None:
    assert outdated(name)


@pytest.mark.parametrize(
    "name", ["round", "Rounding", "StraightThroughRound", "elastic_agents", "ElasticAgents", "pytest_runtest_setup"]
)
def test_a_word_in_its_own_meaning_is_kept(name: str) -> None:
    assert not outdated(name)


@pytest.mark.parametrize("package", [name for name, path in MODULES.items() if path.name == "__init__.py"])
def test_every_package_says_what_lives_in_it_and_what_does_not(package: str) -> None:
    text = ast.get_docstring(ast.parse(MODULES[package].read_text("utf-8"))) or ""
    assert len(re.findall(r"[.?!](?=\s|$)", text)) >= 2, f"{package}: expected two sentences, got {text!r}"


@pytest.mark.parametrize(
    "package",
    [name for name, path in MODULES.items() if name.startswith("accelcheck.techniques") and path.name == "__init__.py"],
)
def test_techniques_in_any_package_are_found(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one_more.py").write_text("TECHNIQUES = ('one more',)")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "__init__.py").write_text("")
    (tmp_path / "inner" / "another.py").write_text("TECHNIQUES = ('another',)")
    module = importlib.import_module(package)
    monkeypatch.setattr(module, "__path__", [*module.__path__, str(tmp_path)])
    try:
        discovered = discover("accelcheck.techniques", "TECHNIQUES")
    finally:
        for name in ("one_more", "inner", "inner.another"):
            sys.modules.pop(f"{package}.{name}", None)
            vars(module).pop(name, None)
    assert {"one more", "another"} <= {thing for thing in discovered if isinstance(thing, str)}


def test_every_module_that_defines_techniques_is_found() -> None:
    discovered = {id(technique) for technique in discover("accelcheck.techniques", "TECHNIQUES")}
    assigned = re.compile(r"^TECHNIQUES\b", re.MULTILINE)
    defining = [
        name
        for name, path in MODULES.items()
        if name.startswith("accelcheck.techniques") and assigned.search(path.read_text("utf-8"))
    ]
    assert len(defining) > 30
    assert dict.fromkeys(defining, True) == {
        name: all(id(technique) in discovered for technique in importlib.import_module(name).TECHNIQUES)
        for name in defining
    }


def test_the_guide_has_every_package_and_the_order_of_imports() -> None:
    guide = GUIDE.read_text("utf-8")
    listed = set(re.findall(r"^\| `accelcheck/(\w+)(?:\.py|/)` \|", guide, re.MULTILINE))
    assert listed == set(RANK)
    order = re.search(r"^`__main__`(.+?)`core`\.", guide, re.MULTILINE | re.DOTALL)
    assert order is not None
    assert [set(re.findall(r"`(\w+)`", part)) for part in order[0].split(">")] == list(reversed(LEVELS))


def test_the_entry_of_a_ledger_in_the_guide_is_one(tmp_path: Path) -> None:
    match = re.search(
        r"^```toml\n(.*?)^```$", (GUIDE.parent / "docs" / "ledger.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    assert match is not None
    (tmp_path / "ledger.toml").write_text(match[1])
    assert len(Ledger.load((tmp_path / "ledger.toml",)).entries) == 1


EXPRESSIONS = {
    "expectations/chips.py": "versions, and names of architectures",
    "report/assessment.py": "globs of case ids",
    "report/assessment_table.py": "markup in any text",
    "report/console.py": "places where a line may break",
    "report/ledger_check.py": "globs of case ids",
    "report/ledger_stubs.py": "numbers in the text of an exception",
    "report/markdown.py": "backquotes in any text",
    "report/package/archive.py": "names of files",
    "report/package/packing.py": "names of files",
    "report/quality.py": "links in a file of answers",
    "report/signatures.py": "texts of exceptions, and stacks",
    "selftest/faults/sowing.py": "source code in which a fault is planted",
}
"""Modules that read records and use regular expressions, with what these match: no text of accelcheck."""


def test_no_text_of_a_fault_is_read_by_a_regular_expression() -> None:
    root = Path(accelcheck.__file__).parent
    using = {
        str(path.relative_to(root))
        for package in ("expectations", "report", "selftest")
        for path in (root / package).rglob("*.py")
        if re.search(r"^(?:import re|from re import .*)$", path.read_text("utf-8"), re.MULTILINE)
    }
    assert using == set(EXPRESSIONS)
