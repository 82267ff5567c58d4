"""The real path on a real instruct model: SmolLM2 from its PyPI package, GSM8K questions, one LoRA adapter per role."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cothink

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_few_real_steps(data_root, tmp_path, monkeypatch):
    monkeypatch.setenv("COTHINK_DATA", str(data_root))
    small = ["stages.0.steps=2", "stages.0.tasks_per_step=2", "stages.0.episodes_per_task=2", "stages.1.limit=4"]
    done = cothink.run(ROOT / "recipes" / "rema-gsm8k-smollm2.yaml", small, out=tmp_path / "run")
    rows = [json.loads(line) for line in (done.folder / "metrics.jsonl").read_text().splitlines()]
    assert [("reasoning/updates" in r, "meta/updates" in r) for r in rows] == [(True, False), (False, True)]
    gaps = [v for r in rows for k, v in r.items() if k.endswith("engine_gap_max")]
    assert len(gaps) == 2 and max(gaps) < 1e-3
    assert done.results["after"]["n"] == 4
    (place,) = (done.folder / "checkpoints").iterdir()
    assert (place / "meta" / "adapter_model.safetensors").exists()
    assert (place / "reasoning" / "adapter_config.json").exists()


@pytest.mark.slow
def test_the_converted_model_speaks_english():
    from cothink import models

    folder = models.fetch("smollm2")
    recipe = {
        "name": "hello",
        "team": {"workflow": "solo", "roles": {"solver": {"policy": "p", "system": "You are helpful.",
                                                           "temperature": 0.0, "max_tokens": 24}}},
        "policies": {"p": {"model": str(folder)}},
        "tasks": {"test": {"name": "wordsums", "split": "test"}},
        "stages": [{"kind": "evaluate", "on": "test"}],
    }  # fmt: skip
    said = cothink.load_team(recipe).solve("What is the capital of France?").text
    assert "Paris" in said
