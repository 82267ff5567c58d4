"""The verdict of a judge of two answers: `[[A]]` or `[[B]]`."""

from __future__ import annotations

import re

from cothink.verify.extract import MAX_TEXT

_MARKER = re.compile(r"\[\[([AB])\]\]")


def has_verdict(text: str) -> bool:
    """Whether any verdict marker occurs: the test for a plan that judges by itself."""
    return _MARKER.search(text) is not None


def find_verdict(text: str) -> str | None:
    """The side that a text names, `A` or `B`; None unless exactly one kind of marker occurs, however often."""
    found = set(_MARKER.findall(text[-MAX_TEXT:]))
    return found.pop() if len(found) == 1 else None
