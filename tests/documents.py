"""The documents for people, taken apart: fenced blocks, inline code, links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "runbooks/README.md")

_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    document: str
    line: int
    language: str
    marks: tuple[str, ...]
    """Further words of the opening fence, for the tests: ``long``, ``serve``, ``exit=1``, ``exact``."""
    text: str

    @property
    def where(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def exit_status(self) -> int:
        """What the block's commands end with."""
        return next((int(mark.removeprefix("exit=")) for mark in self.marks if mark.startswith("exit=")), 0)

    def commands(self) -> list[str]:
        """Its lines, those that end with a backslash joined with the next one."""
        lines = re.sub(r"\\\n\s*", " ", self.text).splitlines()
        return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str) -> list[Block]:
    text = text_of(document)
    found = []
    for match in _FENCE.finditer(text):
        words = match[1].split()
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(document, line, words[0] if words else "", tuple(words[1:]), match[2]))
    assert text.count("```") == 2 * len(found), f"{document}: a fence is not closed"
    return found


def prose(document: str) -> str:
    """The text without its fenced blocks."""
    return _FENCE.sub("", text_of(document))


def code_spans(document: str) -> list[str]:
    """What stands between single backticks in the prose."""
    return re.findall(r"`([^`\n]+)`", prose(document))


def links(document: str) -> list[str]:
    return re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(document))
