"""`self_refine`: one agent answers, then criticises and revises its own answer (Self-Refine, arXiv 2303.17651)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cothink.types import CONTEXT_EXCEEDED, FINISHED, TRUNCATED, Finish, Task, TaskTooLong

if TYPE_CHECKING:
    from cothink.team import Team

ROLES = {
    "solver": (
        "You are an expert at solving problems. Work through the question step by step and check each step. "
        "Finish with the final answer inside \\boxed{}."
    )
}
REQUEST = (
    "Now review this solution as a strict reader would. Recompute every step, name each mistake or gap, and say what "
    "has to change. Then write the complete improved solution, with the final answer inside \\boxed{} at its end."
)
"""What the solver is asked in every round after its first answer."""


def turns(*, rounds: int = 1, **options: object) -> int:
    """Turns of the solver in one episode: its answer and the revisions."""
    return 1 + rounds


async def run(
    task: Task,
    team: Team,
    *,
    rounds: int = 1,
    request: str = REQUEST,
    max_context: int = 4096,
    stop_on_truncation: bool = False,
) -> Finish:
    """The solver answers, and revises its answer `rounds` times in the same chat; the last text is graded.

    `max_context` is the longest prompt, in tokens, that it may have; with a longer one the answer so far is graded.
    `stop_on_truncation` closes the episode as `truncated` at the first turn that hits its token limit.
    """
    if rounds < 1:
        raise ValueError(f"self_refine: rounds={rounds}: write 1 or more, or use the workflow solo")
    chat = team.chat("solver")
    if len(chat.prompt(task.question)) > max_context:
        raise TaskTooLong(f"task {task.id}: the question is longer than max_context={max_context}")
    turn = await chat.say(task.question)
    for round in range(1, rounds + 1):
        if stop_on_truncation and turn.completion.finish_reason == "length":
            break
        if len(chat.prompt(request)) > max_context:
            return Finish(CONTEXT_EXCEEDED, turn.text, turn.id)
        turn = await chat.say(request, round=round)
    cut = stop_on_truncation and turn.completion.finish_reason == "length"
    return Finish(TRUNCATED if cut else FINISHED, turn.text, turn.id)
