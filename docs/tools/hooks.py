"""Hooks of MkDocs: the pages link files of the repository as they stand there, and these links work in the site too.

A page or file outside of docs/ that a page links becomes a part of the site, at the same path; a folder becomes a page
that lists its files. README.md is the first page. Nothing else changes: a page in docs/ is shown as it is written.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).resolve().parent.parent.parent
HOME = "README.md"
"""The repository's page that is the first page of the site."""
LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
FENCE = re.compile(r"^ *(```|~~~)")
ELSEWHERE = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")
"""An address that a page loads something from."""
_HIDDEN = re.compile(r"(^|/)(\.|__pycache__)")


class OutsideError(Exception):
    """A page links what is not in the repository, or loads something from elsewhere."""


def place(path: str) -> str:
    """Map paths of files in the repository to their paths on the site.

    A folder without a page of its own has its list at ``index.md``.
    """
    if path == HOME:
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if not (ROOT / path).is_dir():
        return path
    return f"{path}/README.md" if (ROOT / path / "README.md").is_file() else f"{path}/index.md"


def targets(markdown: str, source: str) -> Iterator[str]:
    """Paths, in the repository, of what a page links; addresses and places on the page itself are left out.

    Args:
        markdown: Text of the page.
        source: Its path in the repository.
    """
    for part, fenced in _parts(markdown):
        if not fenced:
            for found in LINK.finditer(part):
                target = _target(found[0], source)
                if target is not None:
                    yield target


def rewritten(markdown: str, source: str) -> str:
    """The text of a page with its links as the site needs them.

    Args:
        markdown: Text of the page.
        source: Its path in the repository.
    """
    folder = posixpath.dirname(place(source))

    def link(found: re.Match[str]) -> str:
        target = _target(found[0], source)
        if target is None:
            return found[0]
        _, hash_, anchor = found[0].partition("#")
        return posixpath.relpath(place(target), folder or ".") + hash_ + anchor

    return "".join(part if fenced else LINK.sub(link, part) for part, fenced in _parts(markdown))


def linked(pages: Iterable[str]) -> list[str]:
    """Paths of all that these pages link outside of docs/, and what the pages among it link in turn.

    Raises:
        OutsideError: A link leads nowhere.
    """
    seen: set[str] = set()
    waiting = list(pages)
    while waiting:
        page = waiting.pop()
        for target in targets((ROOT / page).read_text(encoding="utf-8"), page):
            if target in seen or target.startswith("docs/"):
                continue
            if target.startswith("..") or not (ROOT / target).exists():
                raise OutsideError(f"{page} links {target}, which the repository does not have")
            seen.add(target)
            if (ROOT / target).is_dir():
                waiting += [readme] if (ROOT / (readme := f"{target}/README.md")).is_file() else []
                seen.update(_files(target))
            elif target.endswith(".md"):
                waiting.append(target)
    return sorted(seen)


def listing(folder: str) -> str:
    """A page that lists the files of a folder of the repository."""
    rows = [f"- [{posixpath.relpath(path, folder)}]({posixpath.relpath(path, folder)})" for path in _files(folder)]
    return "\n".join([f"# {folder}", "", *rows, ""])


def _files(folder: str) -> list[str]:
    found = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*") if path.is_file())
    return [path for path in found if not _HIDDEN.search(path)]


def _target(link: str, source: str) -> str | None:
    """The path in the repository that a link of a page leads to; None for an address or a place on the page itself."""
    path = link.partition("#")[0]
    if not path or re.match(r"[a-z]+:", path):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path))


def _parts(markdown: str) -> Iterator[tuple[str, bool]]:
    """The lines of a page, and whether each is inside of a block of code."""
    fence = ""
    for line in markdown.splitlines(keepends=True):
        mark = FENCE.match(line)
        inside = bool(fence or mark)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1] == fence:
            fence = ""
        yield line, inside


def on_config(config: Any) -> Any:
    """Anchors as GitHub makes them, so that a link to a heading is right in both."""
    from pymdownx.slugs import slugify

    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Bring in what pages link from outside of docs/."""
    from mkdocs.structure.files import File, InclusionLevel

    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages() if not file.src_uri.startswith("tools/")]
    for path in dict.fromkeys((HOME, *linked((HOME, *pages)))):
        whole, uri = ROOT / path, place(path)
        if not whole.is_dir():
            files.append(File.generated(config, uri, abs_src_path=str(whole)))
        elif uri.endswith("index.md"):
            files.append(File.generated(config, uri, content=listing(path), inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as the site needs them."""
    uri, made = page.file.src_uri, page.file.generated_by
    if made and page.file.abs_src_path is None:
        return markdown  # a list, whose links are right
    return rewritten(markdown, HOME if uri == "index.md" else uri if made else f"docs/{uri}")


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Check that a page loads nothing from elsewhere.

    Raises:
        OutsideError: It does.
    """
    if found := ELSEWHERE.findall(output):
        raise OutsideError(f"{page.file.src_uri} loads {found[0]}: the site must work without a network")
    return output
