"""A recipe that trains with vLLM as its engine, from check to result."""

import json
from pathlib import Path

import pytest

import cothink

RECIPE = """
name: short
team:
  workflow: {name: rema, max_turns: 1}
  roles:
    meta: {policy: meta, system: "Plan.", max_tokens: 16}
    reasoning: {policy: reasoning, system: "Follow the plan.", max_tokens: 24}
policies:
  meta: {model: "builtin:tiny", learning_rate: 1.0e-3, lora_r: 8}
  reasoning: {model: "builtin:tiny", learning_rate: 1.0e-3, lora_r: 8}
engine: {name: vllm, max_rows: 64, cache_gib: 0.25}
tasks: {train: {name: wordsums, levels: [2, 3]}, test: {name: wordsums, split: test, levels: [2, 3], count: 8}}
stages:
  - {kind: rl, steps: 3, tasks_per_step: 4, episodes_per_task: 4, filter: none, preset: stable_v0}
  - {kind: evaluate, on: test}
"""
SHARED = (
    "team.roles.reasoning.policy=meta",
    "policies={meta: {model: 'builtin:tiny', learning_rate: 2.0e-4}}",
)


@pytest.mark.parametrize("changes", [(), SHARED], ids=["two adapters", "full weights"])
def test_a_team_learns_from_what_vllm_sampled(tmp_path, changes):
    recipe = tmp_path / "short.yaml"
    recipe.write_text(RECIPE)
    done = cothink.run(recipe, changes, out=tmp_path / "run")
    rows = [json.loads(line) for line in Path(done.folder, "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "seconds_learn" in row]
    assert len(steps) == 3
    gaps = [value for row in steps for key, value in row.items() if key.endswith("/engine_gap_max")]
    # Sampled with the weights of each step itself: with those of the step before, the gap would be 1000 times as large.
    assert len(gaps) >= 2 and 0 < max(gaps) < 1e-4
    assert sum(row.get("meta/updates", 0) for row in steps) >= 2


def test_greedy_transcripts_of_a_team_are_those_of_the_local_engine(tmp_path):
    """The same seed and recipe through both engines: every turn of every episode, token by token."""
    recipe = tmp_path / "short.yaml"
    recipe.write_text(RECIPE)
    changes = ["~stages.0", "stages.0.temperature=0", "tasks.test.count=16", "~tasks.train"]
    changes += [f"~policies.{name}.learning_rate" for name in ("meta", "reasoning")]

    def turns(out, *more):
        folder = cothink.run(recipe, [*changes, *more], out=tmp_path / out).folder
        rows = [
            json.loads(line) for file in folder.glob("episodes/*/*.jsonl") for line in file.read_text().splitlines()
        ]
        return {
            (row["id"], t["id"]): (t["text"], t["tokens"], t["finish_reason"]) for row in rows for t in row["turns"]
        }

    with_vllm = turns("vllm")
    assert len(with_vllm) == 32 and with_vllm == turns("local", "engine=local")
