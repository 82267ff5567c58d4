"""The CPU twins of the ReMA recipes run, cut down to seconds, and the arms that comments offer are loadable."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

import cothink

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = [
    "tasks.train.count=6",
    "tasks.test.count=2",
    "tasks.hard.count=2",
    "stages.2.steps=2",
    "stages.2.tasks_per_step=3",
]
WIDE = ["stages.2.filter={low: 0.0, high: 0.99}", "stages.2.schedule.filter_plays=4"]


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("name", "more"), [("single", WIDE), ("vrp", []), ("mrp", [])])
def test_the_single_turn_twins_run(name, more, tmp_path):
    """rema §7 rows 39 and 43, R1: ReMA by phases, VRP_RL and MRP_RL."""
    done = cothink.run(RECIPES / f"rema-{name}-tiny.yaml", [*SMALL, *more], out=tmp_path / "run")
    assert set(done.results) == {"before", "before-hard", "after", "after-hard"}
    rows = metrics(done.folder)
    assert len(rows) == 2 and all(r["tokens_total"] > 0 for r in rows)
    assert ("phase/kept" in rows[0]) == (name == "single")


def test_the_single_turn_twins_spend_the_same_on_the_same_data():
    twins = [cothink.Recipe.load(RECIPES / f"rema-{name}-tiny.yaml") for name in ("single", "vrp", "mrp")]
    stages = [next(s for s in recipe.stages if s.kind == "rl") for recipe in twins]
    for key in ("token_budget", "tasks_per_step", "episodes_per_task", "updates_per_step", "estimator", "loss"):
        assert len({repr(getattr(stage, key)) for stage in stages}) == 1, key
    assert all(recipe.tasks == twins[0].tasks for recipe in twins)
    whole = sum(role.max_tokens for role in twins[0].team.roles.values())
    assert [r.max_tokens for recipe in twins[1:] for r in recipe.team.roles.values()] == [whole] * 2


def arms(name):
    """arm -> overrides, from the comment lines `#   ARM   key=value ...` of a recipe."""
    found: dict[str, list[str]] = {}
    for line in (RECIPES / f"{name}.yaml").read_text().splitlines():
        match = re.fullmatch(r"#   (\S.*?)  +(\S.*)", line) or re.fullmatch(r"#( {10,})(\S.*)", line)
        if not match:
            continue
        arm, text = match[1].strip() or list(found)[-1], match[2]
        settings = [] if text == "as written" else shlex.split(text.replace("MODEL", "some/model"))
        found.setdefault(arm, []).extend(settings)
    return found


@pytest.mark.parametrize("size", ["paper", "tiny"])
def test_the_arms_of_the_ablation_load(size):
    """rema §7 row 43, R8: turn ratio, token ratio, turn ratio with separate policies."""
    name = f"rema-multi-ablation-{size}"
    found = arms(name)
    assert len(found) == (4 if size == "paper" else 3)
    loaded = {arm: cothink.Recipe.load(RECIPES / f"{name}.yaml", settings) for arm, settings in found.items()}
    turn, token, separate = (loaded[arm] for arm in (next(iter(found)), "token ratio", "separate weights"))
    assert (turn.stages[1].loss.options["ratio"], token.stages[1].loss.options["ratio"]) == ("turn_geo", "token")
    assert separate.stages[1].schedule.model_dump()["first"] == "meta" and len(separate.policies) == 2
    assert all(r.stages[1].updates_per_step >= 2 for r in loaded.values())


def test_the_tiny_ablation_runs_with_separate_weights(tmp_path):
    small = [
        "tasks.train.count=4", "tasks.test.count=2", "stages.1.steps=1", "stages.1.tasks_per_step=2",
        "stages.1.episodes_per_task=4", "team.workflow.max_turns=2",
    ]  # fmt: skip
    settings = arms("rema-multi-ablation-tiny")["separate weights"]
    done = cothink.run(RECIPES / "rema-multi-ablation-tiny.yaml", [*settings, *small], out=tmp_path / "run")
    (row,) = metrics(done.folder)
    assert "meta/updates" in row and "reasoning/updates" not in row
