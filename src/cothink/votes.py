"""Choosing one of several answers, for workflows and evaluations: a vote of equal answers, or a judge role.

The vote: texts that state no answer do not vote, answers that the task's verifier takes for equal are one answer, most
votes win, and on a tie the answer that was given first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from cothink.stats import majority
from cothink.types import Task, Turn
from cothink.verify import acompare, exact, extract, kind_of

if TYPE_CHECKING:
    from cothink.team import Team

By = Literal["vote", "judge"]

JUDGE = (
    "You are an impartial judge. You read a question and several numbered answers to it. Check the reasoning of each, "
    "and choose the one that is most likely right. Ignore the order of the answers, their length and their style. "
    "Give a short reason, and finish with the number of your choice inside \\boxed{}."
)
"""System prompt of a judge role."""

_CHOICE = re.compile(r"\\boxed\{\s*(?:answer\s*)?#?([0-9]{1,4})\s*\}", re.IGNORECASE)


class Chosen(NamedTuple):
    """The winner of a choice, and the judge's turn where a judge was asked."""

    turn: Turn
    judge: Turn | None = None


def answer_of(task: Task, text: str) -> str | None:
    """The answer that `text` states, as the task's verifier reads it; None where it would call the text unparsable."""
    kind = kind_of(task)
    found = extract(text, kind, choices=task.meta.get("choices"))
    if found is not None and kind == "number" and exact.number(found) is None:
        return None
    return found


async def classes(task: Task, answers: Sequence[str | None]) -> list[int | None]:
    """Which answers are equal: the place of the first answer that each one equals; None for None.

    Answers appended later never change the classes of the earlier ones.
    """
    found: list[int | None] = []
    leaders: list[int] = []
    for place, answer in enumerate(answers):
        if answer is None:
            found.append(None)
            continue
        for first in leaders:
            if await _same(task, str(answers[first]), answer):
                found.append(first)
                break
        else:
            leaders.append(place)
            found.append(place)
    return found


async def _same(task: Task, one: str, two: str) -> bool:
    kind = kind_of(task)
    if one == two or exact.same_spelling(one, two):
        return True
    # A generated task's scorer grades answers against its own gold only.
    kind = "text" if kind == "gym" else kind
    return (await acompare(kind, one, two, choices=task.meta.get("choices"))).right


async def vote(task: Task, turns: Sequence[Turn]) -> Turn | None:
    """The first of `turns` that states the answer most of them state; None when nobody states one."""
    place = majority(await classes(task, [answer_of(task, turn.text) for turn in turns]))
    return None if place is None else turns[place]


async def choose(
    task: Task, team: Team, turns: Sequence[Turn], by: By, *, after: Sequence[Turn] = (), round: int = 0
) -> Chosen:
    """One of `turns` by a vote, or by the role `judge`; where the judge names no answer, the vote decides.

    A judge's `text` is the number it chose, and empty where it chose none, so that void judge turns count those.
    `after` are further turns the judge's turn comes after. Nobody states an answer: the first turn.
    """
    judge: Turn | None = None
    if by == "judge" and len(turns) > 1:
        numbered = "\n\n".join(f"Answer {k}:\n{turn.text}" for k, turn in enumerate(turns, 1))
        text = f"Question:\n{task.question}\n\n{numbered}"
        chat = team.chat("judge")
        judge = await chat.say(text, after=[*turns, *after], show=lambda said: named(said, len(turns)), round=round)
        if judge.text:
            return Chosen(turns[int(judge.text) - 1], judge)
    return Chosen(await vote(task, turns) or turns[0], judge)


def named(text: str, count: int) -> str:
    """The number in the last box of a judge's text if it is one of 1..count, else nothing."""
    found = _CHOICE.findall(text)
    return str(int(found[-1])) if found and 1 <= int(found[-1]) <= count else ""
