"""`debate`: several agents answer, read one another's answers and answer again (Du et al. 2023, arXiv 2305.14325).

MALT's debate is 3 agents x 3 rounds, ReMA's MAD 2 x 2; a vote or a judge picks one of the last answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cothink.types import CONTEXT_EXCEEDED, FINISHED, Finish, Task, TaskTooLong, Turn
from cothink.votes import JUDGE, By, choose

if TYPE_CHECKING:
    from cothink.team import Chat, Team

SOLVER = (
    "You are an expert at solving problems. Work through the question step by step and check each step. "
    "Finish with the final answer inside \\boxed{}."
)
DEBATER = (
    "You are one of several experts who answer the same question. You read the question, your own last answer and the "
    "answers of the others. Compare them step by step, take over what is right, keep to what you can defend, and "
    "answer the question again in full. Finish with the final answer inside \\boxed{}."
)


def roles(*, rounds: int = 3, decide: By = "vote", **options: object) -> dict[str, str]:
    """Role name -> default system prompt: `solver` speaks in round one, `debater` later, `judge` where it decides."""
    found = {"solver": SOLVER}
    if rounds > 1:
        found["debater"] = DEBATER
    if decide == "judge":
        found["judge"] = JUDGE
    return found


def turns(*, agents: int = 3, rounds: int = 3, **options: object) -> int:
    """The most turns a role has in one episode."""
    return agents * max(1, rounds - 1)


def branches(**options: object) -> bool:
    """The first answers are siblings."""
    return True


async def run(
    task: Task, team: Team, *, agents: int = 3, rounds: int = 3, decide: By = "vote", max_context: int = 4096
) -> Finish:
    """`agents` answers to the question; in each of the other `rounds` every agent reads all last answers.

    A turn's parents are the answers it read, its agent's own first. `decide` by a vote over the last answers, or by
    the role `judge`, who then has the last turn. When a debater's prompt would exceed `max_context` tokens, the
    debate ends and the last complete round decides.
    """
    if agents < 2 or rounds < 1:
        raise ValueError(f"debate: agents={agents}, rounds={rounds}: a debate needs two agents and one round at least")
    opening = team.chat("solver")
    if len(opening.prompt(task.question)) > max_context:
        raise TaskTooLong(f"task {task.id}: the question is longer than max_context={max_context}")
    answers = await opening.sample(task.question, agents, after=())
    chats = [team.chat("debater") for _ in answers] if rounds > 1 else []
    reason = FINISHED
    for round in range(1, rounds):
        texts = [_read(task, answers, k, first=round == 1) for k in range(agents)]
        if any(len(chat.prompt(text)) > max_context for chat, text in zip(chats, texts, strict=True)):
            reason = CONTEXT_EXCEEDED
            break
        answers = await asyncio.gather(*(_answer(chats[k], texts[k], answers, k, round) for k in range(agents)))
    chosen = await choose(task, team, answers, decide, round=rounds)
    # The last word is the judge's: what the answer earns is credited from there, to everyone who was read.
    return Finish(reason, chosen.turn.text, chosen.turn.id if chosen.judge is None else None)


async def _answer(chat: Chat, text: str, answers: Sequence[Turn], k: int, round: int) -> Turn:
    return await chat.say(text, after=[answers[k], *_others(answers, k)], round=round)


def _others(answers: Sequence[Turn], k: int) -> list[Turn]:
    return [turn for place, turn in enumerate(answers) if place != k]


def _read(task: Task, answers: Sequence[Turn], k: int, *, first: bool) -> str:
    """What agent k is told: the others' answers, and at first the question and its own answer as well."""
    others = "\n\n".join(f"Answer of another expert:\n{turn.text}" for turn in _others(answers, k))
    if not first:
        return others
    return f"Question:\n{task.question}\n\nYour answer:\n{answers[k].text}\n\n{others}"
