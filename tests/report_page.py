"""A report as a parser and its script read it."""

from __future__ import annotations

import base64
import gzip
import html.parser
import json
import re
from typing import Any

VOID = {"meta", "img", "input", "br", "link"}


class Page(html.parser.HTMLParser):
    """Parsed report: tags with their attributes, texts outside of scripts, texts of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open[-1:] == ["script"] else self.words).append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def unpacked(text: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(text)))


def blocks(found: Page) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The index and the details, as the script reads them."""
    data = [text for text in found.scripts if re.fullmatch(r"[A-Za-z0-9+/=]{40,}", text)]
    return unpacked(data[0]), [unpacked(text) for text in data[1:]]
