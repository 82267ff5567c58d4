"""Off-policy correction in a real step: the engine samples in bfloat16, the trainer computes in float32."""

from __future__ import annotations

import json

import cothink


def test_a_coarse_engine_is_corrected(tmp_path):
    """credit §3.8, §6.10: the factor's share and the mismatch are logged, and the step is taken."""
    recipe = {
        "name": "coarse",
        "output": str(tmp_path),
        "team": {
            "workflow": {"name": "rema", "max_turns": 1},
            "roles": {
                "meta": {"policy": "one", "system": "Plan.", "max_tokens": 12},
                "reasoning": {"policy": "one", "system": "Follow the plan.", "max_tokens": 12},
            },
        },
        "policies": {"one": {"model": "builtin:tiny", "learning_rate": 1e-4}},
        "engine": {"name": "local", "dtype": "bfloat16"},
        "tasks": {"train": {"name": "wordsums", "levels": [1, 2], "count": 4}},
        "stages": [
            {"kind": "rl", "steps": 1, "tasks_per_step": 2, "episodes_per_task": 4, "filter": "none",
             "updates_per_step": 2, "kl_stop": None, "rewards": ["format.boxed", "answer.base"],
             "loss": {"offpolicy": "mis_token", "rho_min": 0.995, "rho_max": 1.005}}
        ],
    }  # fmt: skip
    folder = cothink.run(recipe).folder
    (found,) = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    assert found["one/engine_gap_max"] > 1e-4 and 0 < found["one/mismatch"] < 1e-2
    assert 0.9 < found["one/ess_fraction"] < 1
    assert 0 < found["one/offpolicy_fraction"] < 1 and found["one/updates"] == 2
