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
