"""What mkdocs does beside rendering docs/: records of the repository become pages, links to sources become text."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

RECORDS = ("EXPERIMENTS.md", "DECISIONS.md")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#:]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the records, which lie beside docs/."""
    for name in RECORDS:
        text = (Path(config["docs_dir"]).parent / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are in the repository, made to fit the site."""
    here = page.file.src_uri if page.file.src_uri in RECORDS else f"docs/{page.file.src_uri}"

    def fitted(found: re.Match[str]) -> str:
        image, text, target, anchor = found[1], found[2], found[3], found[4] or ""
        there = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        inside = there.removeprefix("docs/")
        if inside == there and there not in RECORDS:
            return text
        return f"{image}[{text}]({posixpath.relpath(inside, posixpath.dirname(page.file.src_uri) or '.')}{anchor})"

    return LINK.sub(fitted, markdown)
