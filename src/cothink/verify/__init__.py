"""Is this answer right? `verify(kind, gold, text)` says right, wrong, unparsable or error, and never raises.

Kinds: `number` (exact rationals), `letter` (an option), `text` (words), `math` (equivalent expressions), `verdict` (the
better of two answers, `[[A]]` or `[[B]]`), `gym` (reasoning-gym's own score) and `auto` (a gold that is a plain number
is a `number`, else `math`). What needs no algebra is decided here and now; the rest goes to processes that are killed
when an item exceeds its time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from cothink.types import Task
from cothink.verify import exact
from cothink.verify import extract as _extract
from cothink.verify.exact import Choices
from cothink.verify.extract import Found, has_answer_format, has_box, last_box
from cothink.verify.verdict import find_verdict, has_verdict

if TYPE_CHECKING:
    from cothink.verify.pool import Job

__all__ = [
    "KINDS",
    "Verdict",
    "acompare",
    "averify",
    "averify_task",
    "check_golds",
    "compare",
    "extract",
    "find_verdict",
    "grade",
    "grade_file",
    "has_answer_format",
    "has_box",
    "has_verdict",
    "kind_of",
    "last_box",
    "verify",
    "verify_task",
]

KINDS = ("math", "number", "letter", "text", "verdict", "gym", "auto")
TIMEOUT = 2.0
"""Seconds of wall clock one item may cost, counted from when it starts."""
GOLD_TIMEOUT = 10.0
"""The same for a gold checked before training: it is not hostile, and a busy machine must not make it look wrong."""
MAX_ANSWER = 2_000
"""Longest extracted answer that is compared at all."""
MAX_DEPTH = 20
"""Deepest nesting of brackets that is compared at all: parsers recurse."""

Word = Literal["right", "wrong", "unparsable", "error"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The grade of one text. `unparsable`: no answer was found; `error`: it could not be graded (time, memory, input).

    Only `right` earns a reward; the others are told apart so that they can be counted.
    """

    verdict: Word
    seconds: float = 0.0
    answer: str | None = None
    detail: str = ""

    @property
    def right(self) -> bool:
        """Whether the answer is right."""
        return self.verdict == "right"


def verify(
    kind: str,
    gold: Any,
    text: str,
    *,
    strict: bool = True,
    timeout: float = TIMEOUT,
    choices: Choices | None = None,
    gym: Mapping[str, Any] | None = None,
) -> Verdict:
    r"""Grade the answer that `text` states.

    Strict reads only a `\boxed{}` or what follows `Final Answer:`; lenient also a bare answer, a trailing expression or
    the last number. `choices` are the options of a `letter`, by letter or in order; `gym` is such a Task's meta entry.
    """
    return _finish(_decide(kind, gold, text, strict, choices, gym), timeout)


async def averify(
    kind: str,
    gold: Any,
    text: str,
    *,
    strict: bool = True,
    timeout: float = TIMEOUT,
    choices: Choices | None = None,
    gym: Mapping[str, Any] | None = None,
) -> Verdict:
    """As `verify`, without blocking the event loop."""
    return await _afinish(_decide(kind, gold, text, strict, choices, gym), timeout)


def compare(kind: str, gold: Any, answer: str, *, timeout: float = TIMEOUT, choices: Choices | None = None) -> Verdict:
    """Grade an answer that is already extracted; with another answer as `gold`, whether two answers are the same."""
    return _finish(_decide(kind, gold, Found(answer, "marked"), True, choices, None), timeout)


async def acompare(
    kind: str, gold: Any, answer: str, *, timeout: float = TIMEOUT, choices: Choices | None = None
) -> Verdict:
    """As `compare`, without blocking the event loop."""
    return await _afinish(_decide(kind, gold, Found(answer, "marked"), True, choices, None), timeout)


def kind_of(task: Task) -> str:
    """The kind of a Task: its `meta["kind"]`, else `auto`."""
    return str(task.meta.get("kind", "auto"))


def verify_task(task: Task, text: str, *, strict: bool = True, timeout: float = TIMEOUT) -> Verdict:
    """Grade `text` as an answer to `task`."""
    meta = task.meta
    found = _decide(kind_of(task), task.answer, text, strict, meta.get("choices"), meta.get("gym"))
    return _finish(found, timeout)


async def averify_task(task: Task, text: str, *, strict: bool = True, timeout: float = TIMEOUT) -> Verdict:
    """As `verify_task`, without blocking the event loop."""
    meta = task.meta
    found = _decide(kind_of(task), task.answer, text, strict, meta.get("choices"), meta.get("gym"))
    return await _afinish(found, timeout)


def extract(text: str, kind: str = "auto", strict: bool = True, choices: Choices | None = None) -> str | None:
    """The answer that `text` states, in its shortest spelling (`$1,200.` is `1200`, `(d) mall` is `D`), or None."""
    if kind == "verdict":
        return find_verdict(text)
    found = _extract.locate(text, strict)
    if found is None:
        return None
    if kind == "letter":
        return _letter(found, choices)
    if kind == "text":
        return found.text.splitlines()[-1].strip() if found.how == "prose" else found.text
    answer = exact.last_number(found.text) if found.how == "prose" else found.text
    if answer is None or kind not in ("number", "auto"):
        return answer
    value = exact.number(answer)
    return answer if value is None else exact.show(value)


def grade(kind: str, gold: Any, text: str, *, timeout: float = TIMEOUT, choices: Choices | None = None) -> Verdict:
    """`verify`, lenient: for people and files that pass bare answers."""
    return verify(kind, gold, text, strict=False, timeout=timeout, choices=choices)


def grade_file(in_path: str, out_path: str, *, timeout: float = TIMEOUT) -> dict[str, int]:
    """Grade JSONL rows `{kind, gold, text}` into rows `{row, verdict, seconds, answer, detail}`; see `verify.files`."""
    from cothink.verify.files import grade_file as grade_rows

    return grade_rows(in_path, out_path, timeout=timeout)


def check_golds(tasks: Iterable[Task], *, timeout: float = GOLD_TIMEOUT) -> list[str]:
    """One line for each Task whose gold answer is not right against itself: run it before training."""
    from cothink.verify.files import check_golds as check

    return check(tasks, timeout=timeout)


def _finish(found: Verdict | Job, timeout: float) -> Verdict:
    if isinstance(found, Verdict):
        return found
    from cothink.verify import pool

    return _verdict(found, *pool.run(found, timeout))


async def _afinish(found: Verdict | Job, timeout: float) -> Verdict:
    if isinstance(found, Verdict):
        return found
    from cothink.verify import pool

    return _verdict(found, *await pool.arun(found, timeout))


def _verdict(job: Job, word: Any, answer: str | None, detail: str, seconds: float) -> Verdict:
    return Verdict(word, round(seconds, 4), answer or job.args[-1], detail)


def _decide(
    kind: str, gold: Any, text: str | Found, strict: bool, choices: Choices | None, gym: Mapping[str, Any] | None
) -> Verdict | Job:
    """A verdict where none of it needs algebra, else the job for the pool."""
    began = time.perf_counter()
    try:
        found = _grade(kind, _gold(gold), text, strict, choices, gym)
    except _Unfit as error:
        found = Verdict("error", detail=str(error))
    if isinstance(found, Verdict):
        return Verdict(found.verdict, round(time.perf_counter() - began, 4), found.answer, found.detail)
    return found


def _grade(
    kind: str, gold: str, text: str | Found, strict: bool, choices: Choices | None, gym: Mapping[str, Any] | None
) -> Verdict | Job:
    if kind not in KINDS:
        raise _Unfit(f"unknown kind {kind!r}; write one of {', '.join(KINDS)}")
    if not isinstance(text, str | Found):
        raise _Unfit(f"the text to grade is a {type(text).__name__}; write a string")
    if kind == "verdict":
        return _grade_verdict(gold, text)
    found = _extract.locate(text, strict) if isinstance(text, str) else text
    if found is None:
        return Verdict("unparsable", detail=r"no \boxed{} and no 'Final Answer:'" if strict else "the text is empty")
    if kind == "letter":
        return _grade_letter(gold, found, choices)
    if kind == "text":
        return _grade_text(gold, found)
    if kind == "gym":
        return _grade_gym(gold, found, gym)
    return _grade_number(kind, gold, found)


def _grade_verdict(gold: str, text: str | Found) -> Verdict:
    if gold not in ("A", "B"):
        raise _Unfit(f"the gold verdict is {gold[:80]!r}; write A or B")
    said = text.text if isinstance(text, Found) else find_verdict(text)
    if said not in ("A", "B"):
        return Verdict("unparsable", detail="not exactly one kind of verdict marker, [[A]] or [[B]]")
    return Verdict("right" if said == gold else "wrong", answer=said)


def _grade_letter(gold: str, found: Found, choices: Choices | None) -> Verdict:
    wanted, got = exact.letter(gold, choices), _letter(found, choices)
    if wanted is None:
        raise _Unfit(f"the gold answer {gold[:80]!r} is not an option letter")
    if got is None:
        return Verdict("unparsable", answer=found.text[:200], detail="no single option letter")
    return Verdict("right" if got == wanted else "wrong", answer=got)


def _letter(found: Found, choices: Choices | None) -> str | None:
    if found.how == "prose":
        return exact.letter_in_prose(found.text, choices) or exact.letter(found.text, choices)
    return exact.letter(found.text, choices)


def _grade_text(gold: str, found: Found) -> Verdict:
    answers = [found.text]
    if found.how == "prose":
        last = found.text.splitlines()[-1]
        answers += [last, last.rpartition(" is ")[2], last.rpartition(":")[2]]
    right = any(exact.fold(answer) == exact.fold(gold) for answer in answers)
    return Verdict("right" if right else "wrong", answer=answers[0][:200])


def _grade_gym(gold: str, found: Found, gym: Mapping[str, Any] | None) -> Job:
    from cothink.verify import pool, worker

    if not gym or "name" not in gym or "index" not in gym:
        raise _Unfit('kind "gym" needs the entry that tasks/gym.py puts in meta["gym"]: name, options, index')
    answer = found.text.splitlines()[-1] if found.how == "prose" else found.text
    recipe = json.dumps({"name": gym["name"], "options": gym.get("options", {})}, sort_keys=True)
    return pool.Job("reasoning_gym", worker.gym, (recipe, int(gym["index"]), gold, answer[:MAX_ANSWER]))


def _grade_number(kind: str, gold: str, found: Found) -> Verdict | Job:
    wanted = exact.plain_number(gold)
    if kind == "number" and wanted is None:
        raise _Unfit(f"the gold answer {gold[:80]!r} is not a number")
    if found.how == "prose" and kind != "math":
        answer = exact.last_number(found.text)
        if answer is None and wanted is not None:
            return Verdict("unparsable", detail="no number in the text")
        if answer is not None and wanted is not None:
            found = Found(answer, "whole")
    answer = found.text
    if found.how != "prose":
        if exact.same_spelling(gold, answer) or exact.same_option(gold, answer):
            return Verdict("right", answer=answer[:200])
        if (said := _in_other_words(kind, gold, found)) is not None:
            return said
        loose = kind != "math" and wanted is not None
        got = exact.number(answer) if loose else exact.plain_number(answer)
        if wanted is not None and got is not None:
            if wanted == got:
                return Verdict("right", answer=exact.show(got))
            # 50% is both 50 and 1/2, and 1,234 may be a list: only algebra may say these are wrong.
            if "%" not in gold + answer and (loose or "," not in gold + answer):
                return Verdict("wrong", answer=exact.show(got))
        elif loose and _extract.is_prose(answer):
            return Verdict("unparsable", answer=answer[:200], detail="words, and no single number")
    if len(answer) > MAX_ANSWER or _depth(answer) > MAX_DEPTH:
        return Verdict("unparsable", answer=answer[:200], detail="too long or too deeply nested to be an answer")
    from cothink.verify import pool, worker

    return pool.Job("math_verify", worker.maths, (gold, found.how == "prose", answer))


def _in_other_words(kind: str, gold: str, found: Found) -> Verdict | Job | None:
    """What algebra would drop in silence: a relation before a value, a factorial's mark, the base of a number."""
    answer = found.text
    if exact.adds(gold, answer) or exact.adds(answer, gold):
        return Verdict("wrong", answer=answer[:200])
    bases = exact.based(gold), exact.based(answer)
    if bases[0] is not None and bases[1] is not None:
        return Verdict("right" if bases[0] == bases[1] else "wrong", answer=answer)
    if "!" not in gold + answer:
        return None
    worked = exact.factorials(gold), exact.factorials(answer)
    if worked == (gold, answer):
        return None
    if worked[0] is None or worked[1] is None:  # spelled otherwise than the gold, and no number to compare
        return Verdict("wrong", answer=answer[:200])
    return _grade_number(kind, worked[0], Found(worked[1], found.how))


def _gold(gold: Any) -> str:
    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        raise _Unfit(f"the gold answer is a {type(gold).__name__}; write a string or a number")
    if not str(gold).strip():
        raise _Unfit("the gold answer is empty")
    return str(gold).strip()


def _depth(text: str) -> int:
    depth = deepest = 0
    for char in text:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth -= 1
    return deepest


class _Unfit(ValueError):
    """The item itself cannot be graded; becomes an `error` verdict."""
