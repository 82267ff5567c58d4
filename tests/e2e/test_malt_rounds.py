"""MALT in rounds and online, on the built-in model (malt §10 rows 18, 24, 35 and 36): who spoke, what was learned."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("trl")

import cothink
import cothink.session
from cothink import store
from cothink.resolve import RecipeError

NAMES = ("generator", "verifier", "refiner")
SHORT = {"learning_rate": 3e-4, "warmup_steps": 0}
TREES = {"kind": "collect", "on": "train", "branching": [3, 3, 2]}


def recipe(stages, **team):
    rate = {"learning_rate": 1e-4} if any(stage["kind"] == "rl" for stage in stages) else {}
    return {
        "name": "rounds",
        "team": {"workflow": {"name": "malt", "prompts": "words", "max_context": 512, **team},
                 "roles": {name: {"policy": name, "max_tokens": 48} for name in NAMES}},
        "policies": {name: {"model": "builtin:tiny", "lora_r": 4, **rate} for name in NAMES},
        "tasks": {"train": {"name": "wordsums", "levels": [1, 2], "count": 6}},
        "stages": stages,
    }  # fmt: skip


def figures(folder):
    found = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["stage"], []).append(row)
    return found


def test_two_rounds_from_the_base_then_online(tmp_path):
    """Row 35: round 2 is collected with the weights of round 1, has its own theta, and feeds the online stage."""
    by_round = {"name": "tree", "theta_by_round": [0.4, 0.6]}
    taught = {"max_steps": 2, "rows_per_step": 4, **SHORT}
    preferred = {"kind": "dpo", "max_steps": 2, "pairs_per_step": 4, "beta": 0.5, **SHORT}
    done = cothink.run(
        recipe([
            TREES,
            {"kind": "sft", "data": by_round, **taught},
            {**preferred, "data": by_round},
            TREES,
            {"kind": "sft", "data": {**by_round, "earlier": True}, "start": "base", **taught},
            {**preferred, "data": by_round, "roles": ["generator", "verifier", "refiner"]},
            {"kind": "rl", "steps": 1, "tasks_per_step": 4, "episodes_per_task": 1, "filter": "none",
             "rewards": [{"name": "answer.leaf", "role": "refiner", "to": "team"}],
             "estimator": {"name": "dr_grpo", "scope": "prefix"}},
        ], branching=[2, 2, 2]),
        out=tmp_path / "run",
    )  # fmt: skip
    folder = done.folder
    one, two = (store.load(folder / "trees" / f"{k:02d}-collect") for k in (0, 3))
    versions = [{t.role: t.completion.version for tree in part for t in tree.episode.turns} for part in (one, two)]
    assert versions == [dict.fromkeys(NAMES, 0), {"generator": 1, "verifier": 2, "refiner": 2}]
    assert {t.round for t in one} == {0} and {t.round for t in two} == {1}
    weights = [tree.origin["verifier"]["weights"] for tree in (one[0], two[0])]
    assert weights == ["base", "stage02-step000004"]

    rows = {k: [json.loads(x) for f in sorted((folder / kind).glob(f"{k:02d}-*")) for x in f.read_text().splitlines()]
            for k, kind in ((1, "examples"), (2, "pairs"), (4, "examples"), (5, "pairs"))}  # fmt: skip
    thetas = {k: {(r["round"], r["theta"]) for r in part} for k, part in rows.items()}
    assert thetas == {1: {(0, "0.4")}, 2: {(0, "0.4")}, 4: {(0, "0.4"), (1, "0.6")}, 5: {(1, "0.6")}}
    assert {r["role"] for r in rows[2]} == {"verifier", "refiner"} and {r["role"] for r in rows[5]} == set(NAMES)
    end = cothink.session.assemble(cothink.Recipe.load(done.folder / "recipe.yaml"), with_tasks=False)
    eos = end.policies["verifier"].tokenizer.eos_token_id
    for row in rows[1]:  # row 20: the completion's tokens are learned, its end token too, and nothing else
        at = len(row["prompt_ids"])
        assert row["labels"] == [-100] * at + row["completion_ids"] and row["input_ids"][:at] == row["prompt_ids"]
        assert row["stop_reasons"] == "stop" and row["labels"][-1] == eos and row["label"] is True
    for row in rows[5]:
        assert row["path"][0]["role"] == "generator" if row["role"] != "generator" else row["path"] == []
        assert len(row["ref_checkpoint_hash"]) == 32 and row["prompt_template_hash"] and row["base_model"]

    logged = figures(folder)
    for stage in (2, 5):
        first = next(line for line in logged[stage] if any(k.endswith("/margin") for k in line))
        name = next(k for k in first if k.endswith("/margin")).partition("/")[0]
        assert first[f"{name}/loss"] == pytest.approx(0.6931, abs=2e-3)
    online = logged[6][-1]
    assert online["samples"] == 4 * (2 + 4 + 8) and all(online[f"{n}/engine_gap_max"] < 1e-3 for n in NAMES)
    played = [json.loads(x) for x in (folder / "episodes" / "06-rl" / "000001.jsonl").read_text().splitlines()]
    for row in played:
        turns = {t["id"]: t for t in row["turns"]}
        for t in turns.values():
            below = [c["return"] for c in turns.values() if t["id"] in c["parents"]]
            assert not below or t["return"] == pytest.approx(sum(below) / len(below))
            beside = [s["return"] for s in turns.values() if s["parents"] == t["parents"]]
            assert t["advantage"] == pytest.approx(t["return"] - sum(beside) / len(beside))


def test_it_learns_what_the_trees_say(tmp_path):
    """Row 36, O17: sft makes the good turns of each role likelier, dpo lets the chosen ones gain on the rejected."""
    tree = recipe([
        {**TREES, "branching": [3, 3, 2]},
        {"kind": "sft", "data": "tree", "max_steps": 4, "rows_per_step": 8, **SHORT},
        {"kind": "dpo", "roles": NAMES, "max_steps": 8, "pairs_per_step": 4, **SHORT},
    ])  # fmt: skip
    for policy in tree["policies"].values():
        del policy["lora_r"]
    done = cothink.run(tree, out=tmp_path / "run")
    logged = figures(done.folder)
    for name in NAMES:
        mine = [line for line in logged[1] if f"{name}/nll" in line]
        before = next(line[f"{name}/nll_before"] for line in logged[1] if f"{name}/nll_before" in line)
        assert mine[-1][f"{name}/nll"] < before
        last = [line for line in logged[2] if f"{name}/margin" in line][-1]
        assert last[f"{name}/margin"] > 0.05 and last[f"{name}/chosen_change"] > last[f"{name}/rejected_change"]
        assert last[f"{name}/loss"] < 0.68 and last[f"{name}/pair_accuracy"] > 0.6
    card = json.loads((done.folder / "cards" / "02-dpo.json").read_text())
    assert {name: facts["trained_pairs"] > 0 for name, facts in card["roles"].items()} == dict.fromkeys(NAMES, True)
    assert "| pairs |" in (done.folder / "cards" / "02-dpo.md").read_text()


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([{"kind": "dpo", "max_steps": 1}], "no collect stage before it whose trees it could learn from"),
        ([TREES, {"kind": "dpo", "max_steps": 1, "data": "wordsums"}], "dpo learns from pairs of collected trees"),
        ([TREES, {"kind": "dpo", "max_steps": 1, "data": {"name": "tree", "sft_source": "all_positive"}}],
         "unknown option 'sft_source'"),
        ([TREES, {"kind": "dpo", "max_steps": 1, "pairs_per_step": 4, "microbatch_pairs": 3}],
         "3 pairs at a time do not make 4 pairs a step"),
        ([TREES, {"kind": "dpo", "max_steps": 1, "data": {"name": "tree", "min_gap": 0.4}}],
         "min_gap: NUMBER go together"),
        ([TREES, {"kind": "sft", "max_steps": 1, "data": {"name": "tree", "theta": 0.4, "theta_by_round": [0.5]}}],
         "stages.1.data: tree: theta does nothing beside theta_by_round"),
        ([TREES, {"kind": "dpo"}], "neither epochs nor max_steps"),
        ([TREES, {"kind": "dpo", "max_steps": 1, "label_smoothing": 0.5}], "less than 0.5"),
    ],
)  # fmt: skip
def test_what_a_dpo_stage_may_not_say(stages, words):
    with pytest.raises(RecipeError) as found:
        cothink.Recipe.load(recipe(stages))
    assert words in str(found.value)


def test_a_preference_without_sft_is_warned_about_and_full_weights_have_no_second_adapter():
    from cothink import rules

    tree = recipe([TREES, {"kind": "dpo", "max_steps": 1}])
    assert "W19" in rules.findings(cothink.Recipe.load(tree)).codes
    taught = [TREES, {"kind": "sft", "data": "tree", "max_steps": 1}, {"kind": "dpo", "max_steps": 1}]
    assert "W19" not in rules.findings(cothink.Recipe.load({**tree, "stages": taught})).codes
    taught[2] = {**taught[2], "adapter_scale": 0.2}
    whole = {name: {"model": "builtin:tiny"} for name in NAMES}
    with pytest.raises(RecipeError, match="there is no adapter to stack another one on"):
        cothink.Recipe.load({**tree, "stages": taught, "policies": whole})
