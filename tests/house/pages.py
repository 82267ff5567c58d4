"""The pages a reader follows, cut into what can be run: README.md and docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
SAVED = re.compile(r"[Ss]ave as `([\w./]+)`[^`]*$")


class Block(NamedTuple):
    """A fenced block; `file` is the name under which the text before it says to save it."""

    language: str
    text: str
    file: str | None


def name_of(page: Path) -> str:
    """A page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for fence in FENCE.finditer(text):
        saved = SAVED.search(text[: fence.start()].rstrip())
        found.append(Block(fence[1], fence[2], saved[1] if saved else None))
    return [b for b in found if language in (None, b.language)]


def commands(block: Block) -> list[str]:
    """The command lines of a bash block."""
    lines = [line.strip() for line in block.text.splitlines()]
    return [part for line in lines if line and not line.startswith("#") for part in line.split(" && ")]
