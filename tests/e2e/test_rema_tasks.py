"""The CPU twins of R2, R4 and R5 from recipe to report, cut down to a few steps on the built-in model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cothink
from cothink import plots

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = {
    "rema-consistency-tiny": [
        "stages.1.steps=2", "stages.1.tasks_per_step=2", "tasks.test.count=8", "tasks.train.count=40",
    ],
    "rema-judge-tiny": [
        "stages.0.data.count=40", "stages.0.held_out=8", "stages.2.steps=2", "stages.2.tasks_per_step=2",
        "stages.2.filter=none", "~stages.2.oversample_max", "tasks.test.count=4", "tasks.train.count=40",
    ],
    "rema-json-tiny": [
        "stages.0.data.count=40", "stages.0.held_out=8", "stages.2.steps=2", "stages.2.tasks_per_step=2",
        "stages.2.filter=none", "~stages.2.oversample_max", "tasks.test.count=8", "tasks.train.count=40",
        "team.workflow.constrain=false",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_row43_a_twin_runs(name, tmp_path):
    """rema §7 row 43."""
    done = cothink.run(RECIPES / f"{name}.yaml", SMALL[name], out=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward" in row]
    assert len(steps) == 2 and "after" in done.results
    wanted = {"rema-judge-tiny": "judge", "rema-json-tiny": "actions", "rema-consistency-tiny": "consistency"}[name]
    # Reasoning learns first, from its own answers; the planner's reward is there all the same.
    assert all(f"reward/{wanted}.plan" in row and row["reasoning/updates"] == 1 for row in steps)
    if name == "rema-consistency-tiny":
        assert steps[0]["samples"] == 2 * 4 * (1 + 4)  # rows x plays x (a plan and its four siblings)
    if name == "rema-json-tiny":
        chosen = [f"action/{action}/count" for action in ("DECOMPOSE", "REWRITE", "EMPTY", "INVALID")]
        assert all(sum(row[key] for key in chosen) == row["episodes"] for row in steps)
        assert "action/EMPTY/level" in plots.of_run(tmp_path, ["action/*/level"])
    assert "<svg" in plots.of_run(tmp_path, ["reward/*"])
