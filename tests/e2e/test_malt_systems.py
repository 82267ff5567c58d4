"""MALT teams on the built-in model (malt §10): untrained roles, STaR between sft and dpo, what a run leaves."""

from __future__ import annotations

import asyncio
import copy
import json

import pytest
import torch

import cothink
from cothink import store
from cothink.record import RunError
from cothink.session import assemble
from cothink.stages.evaluate import evaluate
from cothink.stages.untrained import untrained

NAMES = ("generator", "verifier", "refiner")
RECIPE = {
    "name": "systems",
    "team": {"workflow": {"name": "malt", "prompts": "words", "max_context": 512},
             "roles": {name: {"policy": name, "max_tokens": 48, "temperature": 0.7} for name in NAMES}},
    "policies": {name: {"model": "builtin:tiny", "lora_r": 2} for name in NAMES},
    "tasks": {"test": {"name": "wordsums", "split": "test", "levels": 2, "count": 6}},
    "stages": [
        {"kind": "evaluate", "label": "SA", "episodes_per_task": 3,
         "workflow": {"name": "malt", "order": ["generator"]}},
        {"kind": "evaluate", "label": "MA", "episodes_per_task": 3, "baseline": "SA"},
    ],
}  # fmt: skip


def texts(session, index=1):
    rows = asyncio.run(evaluate_rows(session, index))
    return [[turn["text"] for turn in row["turns"]] for row in rows]


async def evaluate_rows(session, index):
    from cothink.stages import evaluate as stage

    found = {}
    original = stage._measured

    async def keeping(*args):
        values, rows = await original(*args)
        found["rows"] = rows
        return values, rows

    stage._measured = keeping
    try:
        await evaluate(session, session.recipe.stages[index], index)
    finally:
        stage._measured = original
    return found["rows"]


@pytest.mark.parametrize("adapters", [True, False], ids=["adapters", "whole models"])
def test_row29_an_untrained_role_in_a_trained_team(adapters):
    recipe = copy.deepcopy(RECIPE)
    recipe["stages"] = [{"kind": "evaluate", "limit": 3}, {"kind": "evaluate", "limit": 3, "label": "b",
                                                           "untrained": ["verifier", "refiner"]}]  # fmt: skip
    if not adapters:
        recipe["policies"] = {name: {"model": "builtin:tiny"} for name in NAMES}
    session = assemble(cothink.Recipe.load(recipe))
    base = texts(session, 0)
    assert texts(session, 1) == base, "nobody has learned yet"
    torch.manual_seed(0)
    with torch.no_grad():
        for name in ("verifier", "refiner"):
            policy = session.policies[name]
            for weight in policy.parameters():
                weight.add_(torch.randn_like(weight) * (0.3 if adapters else 0.05))
            policy.version += 1
    learned = {name: [w.clone() for w in session.policies[name].parameters()] for name in NAMES}
    changed = texts(session, 0)
    assert changed != base and [row[0] for row in changed] == [row[0] for row in base]
    assert texts(session, 1) == base
    assert texts(session, 0) == changed, "the team has its own weights again"
    for name in NAMES:
        assert all(torch.equal(a, b) for a, b in zip(learned[name], session.policies[name].parameters(), strict=True))
        assert session.policies[name].version == (name != "generator")
    with pytest.raises(KeyboardInterrupt), untrained(session, ["verifier"]):
        assert session.policies["verifier"].version == 0
        raise KeyboardInterrupt
    assert session.policies["verifier"].version == 1


def test_a_run_of_several_systems_leaves_one_comparison(tmp_path):
    done = cothink.run(RECIPE, out=tmp_path / "run")
    assert {"SA", "MA"} == set(done.results)
    page = (tmp_path / "run" / "comparison.md").read_text()
    for words in ("| no vote |", "| vote of 3 | SA - MA |", "| MA | vote, from SA |", "| MA | 2 verifier |", "## Cost"):
        assert words in page, words
    values = done.results["MA"]
    assert values["calls"] == 6 * 9 and values["distinct_prompt_tokens"] < values["prompt_tokens"]
    assert sum(part["prompt_tokens"] for part in values["roles"].values()) == values["prompt_tokens"]
    again = cothink.compare([f"trained={tmp_path / 'run'}", RECIPE], limit=1)
    assert set(again["systems"]) == {"trained", "systems"}
    other = copy.deepcopy(RECIPE)
    other["name"] = "other"
    other["team"]["roles"]["verifier"]["system"] = "Solve."
    with pytest.raises(RunError, match="give the role 'verifier' different prompts"):
        cothink.compare([RECIPE, other], limit=1)


def test_row31_star_is_the_team_after_sft(tmp_path):
    recipe = copy.deepcopy(RECIPE)
    recipe["tasks"]["train"] = {"name": "wordsums", "levels": 2, "count": 8}
    recipe["tasks"]["test"]["count"] = 2
    for seat in recipe["team"]["roles"].values():
        seat["temperature"] = 1.0
    short = {"data": "tree", "max_steps": 1}
    recipe["stages"] = [
        {"kind": "collect", "on": "train", "branching": [3, 3, 2]},
        {"kind": "sft", **short},
        {"kind": "evaluate", "label": "STaR"},
        {"kind": "dpo", **short},
        {"kind": "evaluate", "label": "MALT", "baseline": "STaR"},
        {"kind": "evaluate", "label": "base", "untrained": list(NAMES)},
    ]
    folder = cothink.run(recipe, out=tmp_path / "run").folder
    spoke = {}
    for place in sorted((folder / "episodes").glob("*/000000.jsonl")):
        rows = [json.loads(line) for line in place.read_text().splitlines()]
        spoke[place.parent.name.partition("-")[2]] = {t["role"]: t["version"] for row in rows for t in row["turns"]}
    assert spoke["STaR"] == {"generator": 1, "verifier": 1, "refiner": 1}
    assert spoke["MALT"] == {"generator": 1, "verifier": 2, "refiner": 2}, "the generator keeps what sft taught it"
    assert spoke["base"] == dict.fromkeys(NAMES, 0)
    (tree, *_) = store.load(folder / "trees" / "00-collect")
    assert {t.completion.version for t in tree.episode.turns} == {0}
