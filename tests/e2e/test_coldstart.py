"""Cold-start recipes, cut short: supervised training, then reinforcement learning from its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("trl")

import cothink
from cothink import record
from cothink.record import Run

RECIPES = Path(__file__).parents[2] / "recipes"


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_tiny_cold_start_lowers_the_loss_and_rl_starts_from_its_weights(tmp_path):
    """rema §7 rows 35 and 43 (R6, R7)."""
    small = ["stages.1.data.count=96", "stages.1.held_out=16", "stages.1.rows_per_step=16", "stages.3.steps=1",
             "stages.3.tasks_per_step=4", "stages.3.filter=none", "stages.3.checkpoint_every=1",
             *(f"stages.{k}.limit=8" for k in (0, 2, 4))]  # fmt: skip
    done = cothink.run(RECIPES / "rema-coldstart-tiny.yaml", small, out=tmp_path / "r")
    taught = [line for line in metrics(tmp_path / "r") if line["stage"] == 1]
    assert len(taught) == 10 and taught[0]["shared/epoch"] == pytest.approx(0.1)
    for role in ("meta", "reasoning"):
        assert taught[-1][f"{role}/nll"] < taught[0][f"{role}/nll_before"]
        assert taught[0][f"{role}/rows"] == 96
    assert done.results["before"]["n"] == 8 and done.results["taught"] != done.results["before"]
    (learnt,) = [line for line in metrics(tmp_path / "r") if line["stage"] == 3]
    assert learnt["shared/engine_gap_max"] < 1e-3  # the engine samples from the very weights that were taught
    assert json.loads((tmp_path / "r" / "state.json").read_text())["stage"] == 5


def test_a_run_that_died_after_the_cold_start_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    small = ["stages.1.data.count=32", "stages.1.held_out=0", "stages.1.rows_per_step=32", "stages.3.steps=1",
             "stages.3.tasks_per_step=2", "stages.3.episodes_per_task=2", "stages.3.filter=none",
             *(f"stages.{k}.limit=4" for k in (0, 2, 4))]  # fmt: skip
    recipe = RECIPES / "rema-coldstart-tiny.yaml"
    whole = cothink.run(recipe, small, out=tmp_path / "whole")
    write = Run.metrics

    def metrics(self, stage, step, values):
        assert stage < 3, "killed in the first step of the rl stage"
        write(self, stage, step, values)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "metrics", metrics)
        with pytest.raises(AssertionError, match="killed"):
            cothink.run(recipe, small, out=tmp_path / "cut")
    assert record.last_checkpoint(tmp_path / "cut") is not None
    again = cothink.run(recipe, small, out=tmp_path / "cut")
    for label in ("before", "taught", "after"):
        one, two = ({k: v for k, v in r.results[label].items() if k != "seconds"} for r in (whole, again))
        assert one == two


@pytest.mark.parametrize("name", ["rema-fig3-sft-tiny", "rema-fig3-meta-tiny"])
def test_the_arms_of_figure_3_run_in_small(tmp_path, name):
    """rema §7 row 43 (R3): teach, then learn; under meta-thinking only the reasoning role learns by RL."""
    small = ["stages.1.data.count=32", "stages.1.rows_per_step=16", "stages.3.steps=1", "stages.3.tasks_per_step=4",
             "stages.3.filter=none", "~stages.3.oversample_max"]  # fmt: skip
    small += [f"stages.{k}.limit=4" for k in (0, 2, 4)]
    cothink.run(RECIPES / f"{name}.yaml", small, out=tmp_path / "r")
    last = metrics(tmp_path / "r")[-1]
    learning = {key.partition("/")[0] for key in last if key.endswith("/gradient_norm")}
    assert learning == ({"reasoning"} if "meta" in name else {"solver"})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_learns_from_the_real_dialogues(data_root, tmp_path):
    """rema §6.3: a few steps on the public dialogues lower the loss of both roles on dialogues kept out."""
    pytest.importorskip("gguf")
    small = ["~stages.0", "~stages.1", "stages.0.max_steps=12", "stages.0.held_out=2"]
    cothink.run(RECIPES / "rema-coldstart-smollm2.yaml", small, out=tmp_path / "r")
    lines = metrics(tmp_path / "r")
    for role in ("meta", "reasoning"):
        assert lines[-1][f"{role}/nll"] < lines[0][f"{role}/nll_before"] - 0.1
