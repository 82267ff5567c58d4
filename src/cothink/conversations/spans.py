"""A worked solution cut into the spans of two speakers, checked against its source: the pure half of `cothink split`.

A teacher copies the solution and tags every span. Nothing of its copy is kept but the places of the cuts: the texts of
the dialogue are slices of the source.
"""

from __future__ import annotations

import re

from cothink.conversations.dialogues import TAG, Dialogue, repaired
from cothink.types import Message

META, REASONING = "meta", "reasoning"
SYSTEM = f"""You cut a worked solution of a mathematics problem into the two voices that can be heard in it.

- {META}: thinking about the work. It sets the next goal, chooses or changes the approach, doubts, checks, notices a \
mistake, goes back, judges the result, decides that the work is done.
- {REASONING}: doing the work. It computes, derives, substitutes, draws the conclusion of a step, states the answer.

Copy the solution from its first word to its last and put every piece of it between tags: <{META}>...</{META}> or \
<{REASONING}>...</{REASONING}>.

Rules:
1. Change nothing. Every word, number and formula stays as it is and in its place; nothing is added, left out, \
corrected or said twice. Hesitations and mistakes stay too.
2. Nothing stands outside the tags, and no tag stands inside another.
3. Keep spans short: begin a new one whenever the voice changes, within a sentence where need be.
4. The first span is {META}. The last span is {REASONING} and holds the final answer.
5. At the end of the last {META} span, where the work is judged to be done, write {TAG}. It is the only thing you add.

Example. The solution "I want the sum, so let me pair the terms. 1+4=5 and 2+3=5, so 10. That looks right. The \
answer is \\boxed{{10}}." becomes:
<{META}>I want the sum, so let me pair the terms.</{META}><{REASONING}>1+4=5 and 2+3=5, so 10.</{REASONING}>\
<{META}>That looks right. {TAG}</{META}><{REASONING}>The answer is \\boxed{{10}}.</{REASONING}>"""

REASONS = {
    "cut": "the teacher's copy hit the token limit",
    "no_spans": "the teacher tagged nothing",
    "changed": "the tagged spans are not the words of the source",
    "starts_with_reasoning": "meta does not speak first",
    "ends_with_meta": "reasoning does not speak last",
    "leak": "meta writes a box",
    "unboxed": "the last reasoning turn has no box",
}
"""Why a solution becomes no dialogue."""

_SPAN = re.compile(f"<({META}|{REASONING})>(.*?)</\\1>", re.DOTALL)


def prompt(question: str, solution: str) -> list[Message]:
    """What the teacher is asked."""
    return [Message("system", SYSTEM), Message("user", f"Problem:\n{question}\n\nSolution:\n{solution}")]


def parse(text: str) -> list[tuple[str, str]]:
    """The (voice, text) spans of a teacher's answer; the finish tag is left out, the dialogue gets its own."""
    return [(voice, inner.replace(TAG, "")) for voice, inner in _SPAN.findall(text)]


def cut(source: str, spans: list[tuple[str, str]]) -> list[tuple[str, str]] | None:
    """The source cut at the borders of the spans, neighbours of one voice merged; None when the words differ.

    Words are compared without white space; the slices have the source's own.
    """
    places = [k for k, letter in enumerate(source) if not letter.isspace()]
    squeezed = "".join(source[k] for k in places)
    if "".join("".join(text.split()) for _, text in spans) != squeezed:
        return None
    merged: list[tuple[str, int, int]] = []
    at = 0
    for voice, text in spans:
        length = len("".join(text.split()))
        if length and merged and merged[-1][0] == voice:
            merged[-1] = (voice, merged[-1][1], at + length)
        elif length:
            merged.append((voice, at, at + length))
        at += length
    return [(voice, source[places[start] : places[end - 1] + 1]) for voice, start, end in merged]


def dialogue(id: str, question: str, solution: str, answer: str, *, complete: bool = True) -> Dialogue | str:
    """The dialogue that a teacher's answer makes of a solution, or the reason (of `REASONS`) why it makes none."""
    if not complete:
        return "cut"
    spans = parse(answer)
    if not spans:
        return "no_spans"
    pieces = cut(solution, spans)
    if pieces is None:
        return "changed"
    if pieces[0][0] != META:
        return "starts_with_reasoning"
    if pieces[-1][0] != REASONING:
        return "ends_with_meta"
    texts = [text for _, text in pieces]
    found, facts = repaired(Dialogue(id, question, tuple(zip(texts[::2], texts[1::2]))))
    return next((fact for fact in ("leak", "unboxed") if fact in facts), found)
