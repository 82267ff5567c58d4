"""`rerank`: several plans, several solutions of each, one of them chosen (inference for ReMA, arXiv 2503.09501)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from cothink.types import FINISHED, Finish, Task, Turn
from cothink.votes import JUDGE, By, Chosen, choose

if TYPE_CHECKING:
    from cothink.team import Team

# The single-turn prompts of the workflow rema: a team that was trained there is asked in the same words here.
META = (
    "You guide a weaker problem solver. Read the question and write a high-level plan the solver can follow: what "
    "to work out, in which order, and what to watch for. Give the plan only. Never state the answer yourself: a "
    "plan that contains an answer in \\boxed{} is penalised."
)
REASONING = (
    "You are given a question and an instruction on how to solve it. Follow the instruction exactly, show every "
    "step of the work, and finish with the final answer inside \\boxed{}."
)


def roles(*, decide: By = "vote", **options: object) -> dict[str, str]:
    """Role name -> default system prompt."""
    return {"meta": META, "reasoning": REASONING, **({"judge": JUDGE} if decide == "judge" else {})}


def turns(*, plans: int = 4, solutions: int = 4, **options: object) -> int:
    """The most turns a role has in one episode."""
    return plans * solutions


def branches(**options: object) -> bool:
    """Plans are siblings, and so are the solutions of a plan."""
    return True


async def run(
    task: Task,
    team: Team,
    *,
    plans: int = 4,
    solutions: int = 4,
    selection: Literal["flat", "hierarchical"] = "hierarchical",
    decide: By = "vote",
) -> Finish:
    """`plans` plans of meta, `solutions` solutions of reasoning to each; one solution is chosen and graded.

    `flat` chooses among all solutions together, `hierarchical` within each plan and then among the winners. `decide`
    by a vote, or by the role `judge`. A role at temperature 0 speaks once, where all its texts would be equal.
    """
    if plans < 1 or solutions < 1 or plans * solutions < 2:
        raise ValueError(f"rerank: plans={plans}, solutions={solutions}: nothing to choose from; write 2 x 1 or more")
    # A judge's last turn is where the answer's reward lies: it reaches everyone who was read.
    planned = await team.chat("meta").sample(task.question, _draws(team, "meta", plans), after=())
    solved = await asyncio.gather(*(_solve(task, team, plan, solutions) for plan in planned))
    if selection == "flat":
        chosen = await choose(task, team, [turn for group in solved for turn in group], decide, round=1)
    else:
        inside = await asyncio.gather(*(choose(task, team, group, decide, round=1) for group in solved))
        chosen = await _across(task, team, inside, decide)
    return Finish(FINISHED, chosen.turn.text, chosen.turn.id if chosen.judge is None else None)


async def _across(task: Task, team: Team, inside: list[Chosen], decide: By) -> Chosen:
    if len(inside) == 1:
        return inside[0]
    judges = [chosen.judge for chosen in inside if chosen.judge is not None]
    return await choose(task, team, [chosen.turn for chosen in inside], decide, after=judges, round=2)


async def _solve(task: Task, team: Team, plan: Turn, solutions: int) -> list[Turn]:
    text = f"Question:\n{task.question}\n\nInstruction:\n{plan.text}"
    return await team.chat("reasoning").sample(text, _draws(team, "reasoning", solutions), after=plan)


def _draws(team: Team, role: str, n: int) -> int:
    return n if team.roles[role].sampling.temperature > 0 else 1
