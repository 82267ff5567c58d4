# ruff: noqa: E501
"""A softmax table learns each workflow in under a second through the real rl stage; torch is never imported.

Each case runs in a process of its own, so that "no torch" is seen and not assumed.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, sys, time
from cothink.engines.table import engine
from cothink.parts import RL
from cothink.recipe import Recipe
from cothink.session import Session, bound_rewards
from cothink.stages.rl import rl
from cothink.resolve import bind, resolve
from cothink.types import Task
from cothink.stages.playing import play_tasks

workflow, options, roles, schedule = {case!r}
tree = {{
    "name": "t", "seed": 3,
    "team": {{"workflow": {{"name": workflow, **options}}, "roles": {{r: {{"policy": p, "system": r}} for r, p in roles.items()}}}},
    "policies": {{p: {{"model": "table"}} for p in roles.values()}},
    "tasks": {{"train": {{"name": "wordsums", "count": 5}}}},
    "stages": [{{"kind": "rl", "steps": 40, "tasks_per_step": 4, "episodes_per_task": 8, "filter": "none",
                 "unfinished": "zero", "schedule": schedule}}],
}}
recipe = Recipe.load(tree)
# Each task has its own good plan and answer; with a bad plan no answer is right.
tasks = [Task(f"t{{k}}", f"q{{k}}", str(k)) for k in range(4)]

def actions(messages):
    system, said = messages[0].content, messages[-1].content
    if system == "meta":
        return [f"plan {{k}}" + end for k in range(4) for end in (["", " [FINISH]"] if options.get("max_turns", 1) > 1 else [""])]
    if system == "reasoning":
        known = [k for k in range(4) if f"q{{k}}" in messages[1].content and f"plan {{k}}" in said]
        return ["\\\\boxed{{%d}}" % k for k in known] + ["\\\\boxed{{99}}"] if known else ["\\\\boxed{{98}}", "\\\\boxed{{99}}"]
    return ["\\\\boxed{{%d}}" % k for k in range(4)]

table = engine({{p: actions for p in set(roles.values())}}, learning_rate=20.0)
run = bind(resolve("workflow", workflow), recipe.team.workflow.options, "team.workflow")
session = Session(recipe, recipe.roles(), run, dict(table.policies), dict.fromkeys(table.policies, table), {{"train": tasks}})

def accuracy(seed):
    episodes = asyncio.run(play_tasks(session, tasks, 25, seed)).episodes
    return sum(e.accuracy for e in episodes) / len(episodes)

before = accuracy("before")
started = time.perf_counter()
asyncio.run(rl(session, recipe.stages[0], 0))
seconds = time.perf_counter() - started
after = accuracy("after")
assert "torch" not in sys.modules and "transformers" not in sys.modules, "the table must not need torch"
print(before, after, seconds)
"""

PAIR = {"meta": "m", "reasoning": "r"}
CASES = {
    "solo": ("solo", {}, {"solver": "s"}, "joint"),
    "rema separate": ("rema", {"max_turns": 1}, PAIR, "joint"),
    "rema shared": ("rema", {"max_turns": 1}, dict.fromkeys(PAIR, "one"), "joint"),
    "rema alternating": ("rema", {"max_turns": 1}, PAIR, {"name": "alternate", "every": 5, "first": "reasoning"}),
    "rema siblings": ("rema", {"max_turns": 1, "n_solutions": 4}, PAIR, "joint"),
    "rema multi-turn": ("rema", {"max_turns": 2}, PAIR, "joint"),
}


@pytest.mark.parametrize("name", CASES)
def test_table_learns(name):
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(case=CASES[name])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    before, after, seconds = map(float, done.stdout.split())
    assert before < 0.5 and after > 0.8, f"{name}: {before:.2f} -> {after:.2f} in {seconds:.2f} s"
