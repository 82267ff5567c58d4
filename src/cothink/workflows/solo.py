"""`solo`: one agent, one chain of thought (the ReMA paper's VRP)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cothink.types import FINISHED, TRUNCATED, Finish, Task

if TYPE_CHECKING:
    from cothink.team import Team

ROLES = {
    "solver": (
        "You are an expert at solving problems. Work through the question step by step and check each step. "
        "Finish with the final answer inside \\boxed{}."
    )
}


def turns(**options: object) -> int:
    """Expected turns per role in one episode."""
    return 1


async def run(task: Task, team: Team, *, stop_on_truncation: bool = False) -> Finish:
    """The solver answers the question once; its whole text is graded.

    `stop_on_truncation` closes an answer that hit the token limit as `truncated` instead of `finished`.
    """
    turn = await team.chat("solver").say(task.question)
    cut = stop_on_truncation and turn.completion.finish_reason == "length"
    return Finish(TRUNCATED if cut else FINISHED, turn.text, turn.id)
