"""`plan_solve`: one agent writes a plan and then its solution in one output (the ReMA paper's MRP)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cothink.types import FINISHED, TRUNCATED, Finish, Task

if TYPE_CHECKING:
    from cothink.team import Team

ROLES = {
    "solver": (
        "You are an expert at solving problems. First write a short high-level plan, worded as an instruction to "
        "yourself. Then follow your plan, showing every step. Finish with the final answer inside \\boxed{}."
    )
}


def turns(**options: object) -> int:
    """Expected turns per role in one episode."""
    return 1


async def run(task: Task, team: Team, *, stop_on_truncation: bool = False) -> Finish:
    """The solver plans and solves in one answer; the whole text is graded, so the last box counts.

    `stop_on_truncation` closes an answer that hit the token limit as `truncated` instead of `finished`.
    """
    turn = await team.chat("solver").say(task.question)
    cut = stop_on_truncation and turn.completion.finish_reason == "length"
    return Finish(TRUNCATED if cut else FINISHED, turn.text, turn.id)
