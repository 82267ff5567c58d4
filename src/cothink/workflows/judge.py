"""`judge`: which of two answers is better? Alone (VRP), plan first (MRP), or as a team (arXiv 2503.09501)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from cothink.types import CONTEXT_EXCEEDED, FINISHED, TRUNCATED, Finish, PlayError, Task, TaskTooLong, Turn

if TYPE_CHECKING:
    from cothink.team import Team

Form = Literal["vrp", "mrp", "rema"]

NEEDS = ("answer_a", "answer_b")
"""What a task's meta must hold."""

_FAIR = (
    "Weigh how helpful, relevant, accurate, thorough, original and detailed each answer is. Do not let the order of "
    "the answers, their length or the names in them influence you."
)
_VERDICT = "end with your verdict: [[A]] if answer A is better, [[B]] if answer B is better"
_JUDGE = "You are an impartial judge. You read a question and two answers to it, A and B, and decide which is better."
PROMPTS = {
    "vrp": {"judge": f"{_JUDGE} {_FAIR} Give a short reason, then {_VERDICT}."},
    "mrp": {
        "judge": (
            f"{_JUDGE} {_FAIR} First write a plan between <plan> and </plan>: what a good answer to this question must "
            "do and how you will check it, with a reference answer of your own if that helps. Then carry out the plan "
            f"on both answers and {_VERDICT}."
        )
    },
    "rema": {
        "meta": (
            "You prepare the judging of two answers to a question. You see the question only. Write a plan for the "
            "judge: what a good answer must get right, which checks to make and in which order. You may work out a "
            "reference answer. Do not give a verdict: you have not seen the answers."
        ),
        "reasoning": (
            f"{_JUDGE} You are also given an evaluation plan. Carry it out step by step on both answers without "
            f"copying it. {_FAIR} Then {_VERDICT}."
        ),
    },
}


def roles(*, form: Form = "rema", **options: object) -> dict[str, str]:
    """Role name -> default system prompt."""
    return PROMPTS[form]


def turns(**options: object) -> int:
    """Expected turns per role in one episode."""
    return 1


async def run(
    task: Task, team: Team, *, form: Form = "rema", max_context: int = 8192, stop_on_truncation: bool = True
) -> Finish:
    """The judge's text is graded: it must hold exactly one kind of verdict marker.

    `vrp`: one role reads question and answers. `mrp`: it writes a plan first, in the same output. `rema`: meta plans
    from the question alone, reasoning reads question, answers and plan. `max_context` is the longest prompt, in tokens;
    `stop_on_truncation` closes the episode when a turn hits its token limit.
    """
    for key in (k for k in NEEDS if k not in task.meta):
        raise PlayError(
            f"task {task.id} has no {key}: the workflow judge needs pairs, such as tasks {{name: judgebench}}"
        )
    pair = f"Question:\n{task.question}\n\nAnswer A:\n{task.meta['answer_a']}\n\nAnswer B:\n{task.meta['answer_b']}"
    first, text = ("meta", task.question) if form == "rema" else ("judge", pair)
    chat = team.chat(first)
    if len(chat.prompt(text)) > max_context:
        raise TaskTooLong(f"task {task.id}: {first}'s prompt is longer than max_context={max_context}")
    turn = await chat.say(text)
    cut = stop_on_truncation and turn.completion.finish_reason == "length"
    if form != "rema":
        return _close(TRUNCATED if cut else FINISHED, turn)
    chat, text = team.chat("reasoning"), f"{pair}\n\nEvaluation plan:\n{turn.text}"
    if cut or len(chat.prompt(text)) > max_context:
        return _close(TRUNCATED if cut else CONTEXT_EXCEEDED, team.placeholder("reasoning", after=turn))
    turn = await chat.say(text)
    cut = stop_on_truncation and turn.completion.finish_reason == "length"
    return _close(TRUNCATED if cut else FINISHED, turn)


def _close(reason: str, turn: Turn) -> Finish:
    return Finish(reason, turn.text, turn.id)
