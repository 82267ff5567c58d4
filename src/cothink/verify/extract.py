"""Where in a text the answer stands: the last box, the last `Final Answer:` marker, or (lenient) its end."""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_TEXT = 65_536
"""Characters of a completion that are read, counted from its end: answers stand there, and junk must stay cheap."""
MAX_WHOLE = 200
"""Longest text that may itself be the answer when nothing marks one."""
MAX_TAIL = 2_000
"""Characters that a lenient search for a trailing expression looks at."""

# Every repetition is bounded or over a class disjoint from what follows: no input makes these slow.
_TOKEN = re.compile(r"\\{1,2}(?:boxed|fbox)\s{0,8}\{|\\.|[{}]", re.DOTALL)
_MARKER = re.compile(r"final\s{1,8}answer(?:\s{1,8}is)?\*{0,4}\s{0,4}:\*{0,4}", re.IGNORECASE)
_BLANK = re.compile(r"\\(?:text|mathrm)\{\s*\}|\\[,;:! ]|[\s${}~.]")
_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{3,}")
_FUNCTIONS = frozenset(
    "sqrt sin cos tan cot sec csc arcsin arccos arctan log exp inf infinity".split()  # noqa: SIM905
)
_FENCES = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"), ("{", "}"))


class Found(NamedTuple):
    """An answer's text and how it was found: `marked` (box or marker), `whole` (all of the text) or `prose`."""

    text: str
    how: str


def has_box(text: str) -> bool:
    r"""Whether any `\boxed` occurs, finished or not: the test for an answer leaked by a planner."""
    return r"\boxed" in text


def has_answer_format(text: str) -> bool:
    """Whether a non-empty balanced box, or a marker with something after it, states an answer."""
    return marked(text) is not None


def last_box(text: str) -> str | None:
    r"""Content of the last non-empty `\boxed{...}` or `\fbox{...}` with balanced braces, or None."""
    found = None
    opened: list[int] = []  # where each open brace's content starts; -1 for an ordinary brace
    for token in _TOKEN.finditer(text):
        word = token.group()
        if word == "}":
            start, end = opened.pop() if opened else -1, token.start()
            if start < 0 or not _BLANK.sub("", text[start : min(end, start + 256)]):
                continue
            # \boxed{x = \boxed{5}} states 5: an inner box that ends the outer one is the answer.
            if found is None or found[0] < start or text[found[1] + 1 : end].strip():
                found = start, end
        elif word[-1] == "{" and word != r"\{":
            opened.append(-1 if word == "{" else token.end())
    return None if found is None else text[found[0] : found[1]]


def marked(text: str) -> str | None:
    """The answer that a marker or a box states, the later of the two; None when neither holds anything."""
    text = text[-MAX_TEXT:]
    end = len(text)
    for marker in reversed(list(_MARKER.finditer(text))):
        segment = text[marker.end() : end]
        if (box := last_box(segment)) is not None:
            return peel(box)
        line = next((line for line in segment.splitlines() if line.strip(" \t*_$")), None)
        if line is not None:
            return peel(line)
        end = marker.start()
    box = last_box(text)
    return None if box is None else peel(box)


def locate(text: str, strict: bool) -> Found | None:
    """The answer's text, or None: strict takes only boxes and markers, lenient also a bare answer or the end."""
    answer = marked(text)
    if answer is not None:
        return Found(answer, "marked")
    bare = text[-MAX_TEXT:].strip()
    if strict or not bare:
        return None
    answer = peel(bare)
    if len(answer) <= MAX_WHOLE and not {"\n", "$"} & set(answer.lstrip("$")) and not is_prose(answer):
        return Found(answer, "whole")
    return Found(bare[-MAX_TAIL:], "prose")


def is_prose(text: str) -> bool:
    """Whether words of three letters or more stand outside LaTeX commands and function names."""
    return any(word.lower() not in _FUNCTIONS for word in _WORD.findall(_COMMAND.sub(" ", text)))


def peel(text: str) -> str:
    """Without outer white space, emphasis, dollar signs, maths brackets and a closing full stop."""
    text = text.strip()
    for _ in range(4):
        before = text
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1].rstrip()
        for left, right in _FENCES:
            inner = text[len(left) : len(text) - len(right)]
            if text.startswith(left) and text.endswith(right) and inner.strip() and left not in inner:
                text = inner.strip()
        if text == before:
            break
    return text


def trailing_maths(text: str) -> tuple[str, int] | None:
    """Content and end of the last `$...$`, or None."""
    end = text.rfind("$")
    start = text.rfind("$", 0, end) if end > 0 else -1
    if start < 0 or not text[start + 1 : end].strip():
        return None
    return text[start + 1 : end].strip(), end
