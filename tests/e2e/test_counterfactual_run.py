"""Counterfactual credit on the built-in model: a solo arm, and trees whose turns are compared with their siblings."""

from __future__ import annotations

import json

import pytest

import cothink


def team(roles, **workflow):
    seats = {r: {"policy": r, "system": s, "max_tokens": 12} for r, s in roles.items()}
    return {
        "team": {"workflow": workflow, "roles": seats},
        "policies": {r: {"model": "builtin:tiny", "learning_rate": 1e-4} for r in roles},
        "tasks": {"train": {"name": "wordsums", "levels": [1, 2], "count": 8}},
    }


def ran(tmp_path, tree, **stage):
    sizes = {"steps": 1, "tasks_per_step": 4, "filter": "none", "unfinished": "keep"}
    stage = {"kind": "rl", **sizes, **stage}
    folder = cothink.run({"name": "x", "output": str(tmp_path), **tree, "stages": [stage]}).folder
    (figures,) = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    rows = (folder / "episodes" / "00-rl" / "000001.jsonl").read_text().splitlines()
    return figures, [json.loads(row) for row in rows]


def test_a_solo_arm_is_played_and_paid(tmp_path):
    """credit §6.6: the guide's rewards carry the bonus, the solver's do not."""
    tree = team({"meta": "Plan.", "reasoning": "Follow the plan."}, name="rema", max_turns=1)
    credit = {"name": "ccpo_solo", "guide": "meta", "bonus": "continuous", "strength": 0.5}
    found, rows = ran(tmp_path, tree, episodes_per_task=4, credit=credit)
    assert found["solo/gain"] == pytest.approx(found["accuracy"] - found["solo/accuracy"])
    assert found["tokens_total"] > found["tokens"]  # the solo arm's tokens are spent as well
    bonus = [s["value"] for row in rows for s in row["rewards"] if s["name"] == "counterfactual"]
    assert len(bonus) == len(rows) == 16
    gain = sum(bonus) / len(bonus)  # .5 * (R - b) / 2 on -1 and 1 is .5 times the gain in accuracy
    assert gain == pytest.approx(0.5 * found["solo/gain"])
    for row in rows:
        returns = {t["role"]: t["return"] for t in row["turns"]}
        given = next(s["value"] for s in row["rewards"] if s["name"] == "counterfactual")
        assert returns["meta"] == pytest.approx(returns["reasoning"] + given)


@pytest.mark.parametrize("credit", ["c3_suffix", "vine"])
def test_a_trees_turns_are_compared_with_their_siblings(tmp_path, credit):
    """credit §6.7, §6.8: 2 generators, each with 2 verifiers, each with one refiner, which is no choice."""
    prompts = {"generator": "Answer.", "verifier": "Check.", "refiner": "Refine."}
    tree = team(prompts, name="malt", prompts="words", branching=[2, 2, 1], max_context=640)
    rewards = [{"name": "mine:length", "role": "refiner", "to": "team"}]
    (tmp_path / "mine.py").write_text(
        "def length(task, turn, episode) -> float | None:\n    return float(sum(turn.completion.output_ids) % 7)\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        _, rows = ran(tmp_path, tree, episodes_per_task=1, credit=credit, rewards=rewards)
    advantages = []
    for row in rows:
        turns = {t["id"]: t for t in row["turns"]}
        for t in turns.values():
            beside = [s["return"] for s in turns.values() if s["parents"] == t["parents"] and s["id"] != t["id"]]
            if t["role"] == "refiner":
                want = turns[t["parents"][0]]["advantage"] if credit == "c3_suffix" else None
            else:
                want = (t["return"] - sum(beside)) * (1.0 if credit == "c3_suffix" else 0.5)
            assert t["advantage"] == (None if want is None else pytest.approx(want))
            advantages.append(t["advantage"])
    assert any(advantages)
