"""HTML from text nobody trusts: everything a model, a data set or a file name says is shown, and nothing of it acts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from math import isfinite

# Control codes (terminals obey them), overrides of the writing direction, and halves of surrogate pairs (no UTF-8).
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def visible(text: str) -> str:
    """The text with control codes, direction overrides and lone surrogates written out."""
    return _HIDDEN.sub(_written, text)


def _written(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)  # the pictures of control codes
    return "\u2421" if code == 0x7F else f"\u27e8U+{code:04X}\u27e9"


def text(value: object) -> str:
    """A value as HTML text, also safe inside a quoted attribute."""
    return escape(visible(str(value)), quote=True)


def shortened(value: str, most: int) -> tuple[str, int]:
    """The text, or its beginning and end, and how many characters are left out between."""
    if len(value) <= most:
        return value, 0
    head = most * 3 // 4
    tail = most - head
    return f"{value[:head]}\n[... {len(value) - most:,} characters left out ...]\n{value[-tail:]}", len(value) - most


def first_line(value: str, most: int = 110) -> str:
    """The beginning of a text on one line."""
    line = " ".join(value[: 4 * most].split())
    return line if len(line) <= most else line[: most - 1] + "\u2026"


def table(head: Sequence[str], rows: Iterable[Sequence[object]], look: str = "") -> str:
    """A table that scrolls sideways where the page is narrow; cells that look like numbers stand to the right."""
    names = "".join(f"<th>{text(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="wide {look}"><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>'


LONG = 30
"""Characters from which on a cell keeps room for its text on narrow screens."""
_NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?( ?%)?( \[[^\]]*\])?")


def _cell(value: object) -> str:
    shown = "" if value is None else number(value) if isinstance(value, float) and isfinite(value) else str(value)
    look = "n" if _NUMBER.fullmatch(shown) else "long" if len(shown) > LONG else ""
    return f'<td class="{look}">{text(shown)}</td>' if look else f"<td>{text(shown)}</td>"


def number(value: float) -> str:
    """Four significant digits; whole numbers in full."""
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.4g}"


def signed(value: float) -> str:
    """`+0.25`."""
    return f"{value:+.3g}" if value else "0"


def fold(summary: str, body: str, *, open: bool = False) -> str:
    """A part that opens on a click; `summary` is plain text."""
    return f"<details{' open' if open else ''}><summary>{text(summary)}</summary>{body}</details>"
