"""MALT's node values as rewards of the online stage: a softmax table learns all three roles (malt §10 row 35, O7)."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = r"""
import asyncio, sys
from cothink.engines.table import engine
from cothink.recipe import Recipe
from cothink.session import Session
from cothink.stages.rl import rl
from cothink.resolve import bind, resolve
from cothink.types import Task
from cothink.stages.playing import play_tasks

names = ("generator", "verifier", "refiner")
recipe = Recipe.load({
    "name": "t", "seed": 3,
    "team": {"workflow": {"name": "malt", "branching": [3, 2, 2]},
             "roles": {n: {"policy": n, "system": n} for n in names}},
    "policies": {n: {"model": "table"} for n in names},
    "tasks": {"train": {"name": "wordsums", "count": 5}},
    "stages": [{"kind": "rl", "steps": 40, "tasks_per_step": 4, "episodes_per_task": 2, "filter": "none",
                "rewards": [{"name": "answer.leaf", "role": "refiner", "to": "team"}],
                "estimator": {"name": "dr_grpo", "scope": "prefix"}}],
})
tasks = [Task(f"t{k}", f"q{k}", str(k)) for k in range(4)]

def actions(messages):
    # One answer of the generator can be saved, by a verifier that says so and a refiner that listens.
    system, said = messages[0].content, messages[-1].content
    if system == "generator":
        return [f"plan {k}" for k in range(4)]
    known = [k for k in range(4) if f"q{k}" in said and f"plan {k}" in said]
    if system == "verifier":
        return ["look again", "fine"]
    return ["Final Answer: %d" % known[0], "Final Answer: 98"] if known and "again" in said else ["Final Answer: 99"]

table = engine({n: actions for n in names}, learning_rate=20.0)
run = bind(resolve("workflow", "malt"), {"branching": [3, 2, 2]}, "team.workflow")
line = bind(resolve("workflow", "malt"), {}, "team.workflow")
engines = dict.fromkeys(table.policies, table)
session = Session(recipe, recipe.roles(), run, dict(table.policies), engines, {"train": tasks})

def accuracy(seed):
    episodes = asyncio.run(play_tasks(session, tasks, 25, seed, workflow=line)).episodes
    return sum(e.accuracy for e in episodes) / len(episodes)

before = accuracy("before")
asyncio.run(rl(session, recipe.stages[0], 0))
print(before, accuracy("after"))
assert "torch" not in sys.modules
"""


def test_a_table_learns_the_tree_online():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    before, after = map(float, done.stdout.split())
    assert before < 0.2 and after > 0.8, f"{before:.2f} -> {after:.2f}"
