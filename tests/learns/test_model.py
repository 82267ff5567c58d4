"""A two-layer model learns on a CPU in seconds: the reward it is trained on rises, through the whole path."""

from __future__ import annotations

import json
import sys
import types

import cothink


def test_reward_rises(tiny_folder, tmp_path, monkeypatch):
    module = types.ModuleType("parity_rewards")

    def even(task, turn, episode):
        """Share of even token ids: about half at the start, 1 at best."""
        ids = turn.completion.output_ids
        return sum(i % 2 == 0 for i in ids) / len(ids)

    even.__module__ = "parity_rewards"
    module.even = even
    monkeypatch.setitem(sys.modules, "parity_rewards", module)
    recipe = {
        "name": "parity",
        "output": str(tmp_path),
        "team": {"workflow": "solo", "roles": {"solver": {"policy": "p", "system": "go", "max_tokens": 8}}},
        "policies": {"p": {"model": str(tiny_folder), "learning_rate": 1e-2, "weight_decay": 0.0}},
        "tasks": {name: {"name": "wordsums", "levels": 1, "count": 20} for name in ("train", "test")},
        "stages": [
            {"kind": "evaluate", "on": "test", "limit": 1},
            {
                "kind": "rl", "steps": 12, "tasks_per_step": 4, "episodes_per_task": 8, "filter": "none",
                "rewards": [{"name": "parity_rewards:even"}],
            },
        ],
    }  # fmt: skip
    folder = cothink.run(recipe).folder
    rewards = [json.loads(line)["reward"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rewards[0] < 0.6 and min(rewards[-3:]) > 0.8, rewards
