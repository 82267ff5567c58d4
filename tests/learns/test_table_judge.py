"""A softmax table learns to judge pairs and to choose JSON actions, through the real rl stage and the real rewards."""

from __future__ import annotations

import asyncio
import json

from cothink.engines.table import engine
from cothink.recipe import Recipe
from cothink.resolve import bind, resolve
from cothink.session import Session
from cothink.stages.actions import by_action
from cothink.stages.playing import play_tasks
from cothink.stages.rl import rl
from cothink.types import Task


def learned(workflow, rewards, tasks, actions):
    """Accuracy before and after 40 steps of the stage, and the episodes played after."""
    roles = {"meta": "m", "reasoning": "r"}
    tree = {
        "name": "t",
        "seed": 3,
        "team": {"workflow": workflow, "roles": {r: {"policy": p, "system": r} for r, p in roles.items()}},
        "policies": {p: {"model": "table"} for p in roles.values()},
        "tasks": {"train": {"name": "wordsums", "count": 5}},
        "stages": [
            {"kind": "rl", "steps": 40, "tasks_per_step": 4, "episodes_per_task": 8, "filter": "none",
             "unfinished": "zero", "rewards": rewards, "credit": "broadcast"}
        ],
    }  # fmt: skip
    recipe = Recipe.load(tree)
    table = engine(dict.fromkeys("mr", actions), learning_rate=20.0)
    run = bind(resolve("workflow", recipe.team.workflow.name), recipe.team.workflow.options, "team.workflow")
    engines = dict.fromkeys(table.policies, table)
    session = Session(recipe, recipe.roles(), run, dict(table.policies), engines, {"train": tasks})

    def played(seed):
        episodes = asyncio.run(play_tasks(session, tasks, 25, seed)).episodes
        return sum(e.accuracy or 0.0 for e in episodes) / len(episodes), episodes

    before, _ = played("before")
    asyncio.run(rl(session, recipe.stages[0], 0))
    after, episodes = played("after")
    return before, after, episodes


def test_judging_is_learned_and_the_planner_stops_giving_verdicts():
    """rema §7 rows 15, 34."""
    tasks = [
        Task(f"t{k}", f"q{k}", "AB"[k % 2], {"kind": "verdict", "answer_a": f"a{k}", "answer_b": f"b{k}"})
        for k in range(4)
    ]

    def actions(messages):
        if messages[0].content == "meta":
            return ["check the sums", "plainly [[A]]", "plainly [[B]]"]
        return ["[[A]]", "[[B]]", "[[A]] and [[B]]", "none"]

    rewards = [{"name": "judge.verdict", "role": "reasoning"}, {"name": "judge.plan", "role": "meta"}]
    before, after, episodes = learned({"name": "judge"}, rewards, tasks, actions)
    assert before < 0.4 and after > 0.8
    assert sum("[[" in e.turns[0].text for e in episodes) / len(episodes) < 0.1


def test_actions_follow_the_difficulty_that_makes_them_worth_it():
    """rema §7 rows 15, 33: easy questions need no plan, hard ones are only solved after DECOMPOSE."""
    tasks = [Task(f"t{k}", f"q{k} level {1 + 4 * (k % 2)}", "5", {"level": 1 + 4 * (k % 2)}) for k in range(4)]
    plans = [json.dumps({"action": a, "output": o}) for a, o in (("DECOMPOSE", "step"), ("EMPTY", ""))]

    def actions(messages):
        if messages[0].content == "meta":
            return [*plans, "no JSON", plans[0][:-3]]
        solvable = ("level 1" in messages[1].content) != ("Instruction" in messages[1].content)
        return ["\\boxed{5}"] if solvable else ["\\boxed{6}"]

    rewards = [{"name": "answer.base", "role": "reasoning"}, {"name": "actions.plan", "role": "meta"}]
    workflow = {"name": "rema", "max_turns": 1, "actions": True}
    before, after, episodes = learned(workflow, rewards, tasks, actions)
    found = by_action(episodes)
    assert before < 0.7 and after > 0.9
    assert found["DECOMPOSE"]["level"] > 4.5 and found["EMPTY"]["level"] < 1.5 and found["INVALID"]["share"] < 0.1
