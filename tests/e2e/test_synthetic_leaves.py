"""MALT on a real model that solves nothing: a SmolLM2 tree, topped up with right answers, teaches each role."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import synthetic_leaves

import cothink

ROOT = Path(__file__).parents[2]
ROLES = ("generator", "verifier", "refiner")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sft_and_dpo_of_every_role_on_a_topped_up_tree(data_root, tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    from cothink import models

    monkeypatch.setenv("COTHINK_DATA", str(data_root))
    recipe = ROOT / "recipes" / "malt-gsm8k-smollm2.yaml"
    small = ["stages.0.limit=2", "stages.0.branching=[3, 2, 2]"]
    done = cothink.run(recipe, small, out=tmp_path / "trees")
    tokenizer = AutoTokenizer.from_pretrained(models.where("smollm2"))
    topped = tmp_path / "topped"
    made = synthetic_leaves.top_up(
        done.folder / "trees" / "00-collect",
        topped,
        lambda text: [*tokenizer(text)["input_ids"], tokenizer.eos_token_id],
    )
    assert made == 2 * (2 + 1)

    sft = f"{{kind: sft, data: {{name: tree, store: {topped}}}, max_steps: 3, learning_rate: 5.0e-4, rows_per_step: 2}}"
    dpo = (
        f"{{kind: dpo, data: {{name: tree, store: {topped}}}, roles: [generator, verifier, refiner], max_steps: 2, "
        "learning_rate: 1.0e-4, pairs_per_step: 2, microbatch_pairs: 1}"
    )
    run = cothink.run(recipe, [f"stages=[{sft}, {dpo}]"], out=tmp_path / "run")
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    for role in ROLES:
        taught = [row[f"{role}/loss"] for row in rows if row["stage"] == 0 and f"{role}/loss" in row]
        assert taught[-1] < taught[0]
        preferred = [row[f"{role}/loss"] for row in rows if row["stage"] == 1 and f"{role}/loss" in row]
        assert preferred[0] == pytest.approx(math.log(2), abs=1e-3)
