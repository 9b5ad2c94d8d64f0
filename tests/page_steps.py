"""Reads a page that builds a file in steps: each Python block changes the file. Contains no tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

Definition: TypeAlias = ast.ClassDef | ast.FunctionDef
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """File after a Python block, and the blocks of other languages until the next one, with their languages."""

    tree: ast.Module
    shown: list[tuple[str, str]]

    @property
    def source(self) -> str:
        return ast.unparse(self.tree)


def steps(page: Path) -> list[Step]:
    """The steps of a page, in their order."""
    collected: list[Step] = []
    for language, text in FENCED.findall(page.read_text("utf-8")):
        if language == "python":
            body = [*collected[-1].tree.body] if collected else []
            collected.append(Step(ast.Module(merged(body, ast.parse(text).body), []), []))
        elif collected:
            collected[-1].shown.append((language, text))
    return collected


def merged(body: list[ast.stmt], changes: list[ast.stmt]) -> list[ast.stmt]:
    """Statements with what `changes` adds and replaces: classes by their members, everything else by its name."""
    body = list(body)
    for change in changes:
        place = next(
            (place for place, statement in enumerate(body) if named(statement) == named(change) is not None), None
        )
        if isinstance(change, (ast.Import, ast.ImportFrom)):
            body.insert(1, change)  # behind `from __future__ import annotations`, which is the first
        elif place is None:
            body.append(change)
        elif isinstance(change, ast.ClassDef) and isinstance(old := body[place], ast.ClassDef):
            body[place] = ast.ClassDef(
                old.name, old.bases, old.keywords, merged(old.body, change.body), old.decorator_list
            )
        else:
            body[place] = change
    return body


def named(statement: ast.stmt) -> str | None:
    """Returns the name that a statement defines."""
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
        return statement.name
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return None


def contents(body: list[ast.stmt], inside: str = "") -> Iterator[str]:
    """Everything that statements define and import, a text each, so that order does not matter."""
    for statement in body:
        if isinstance(statement, ast.ImportFrom):
            yield from (f"{inside}from {statement.module} import {alias.name}" for alias in statement.names)
        elif isinstance(statement, ast.ClassDef):
            yield from contents(
                statement.body, f"{inside}{statement.name}({', '.join(map(ast.unparse, statement.bases))}) "
            )
        elif isinstance(statement, ast.If):
            yield from contents(statement.body, f"{inside}if {ast.unparse(statement.test)}: ")
        else:
            yield inside + ast.unparse(statement)
