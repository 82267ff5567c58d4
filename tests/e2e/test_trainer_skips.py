"""Supervised and preference training whose loss or gradient is not finite (docs/faults.md)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")

from safetensors.torch import load_file
from trl.trainer.sft_trainer import SFTTrainer

import cothink
from cothink import models, record
from cothink.finite import TrainingError

RECIPES = Path(__file__).parents[2] / "recipes"
SFT = ["~stages.4", "~stages.3", "~stages.2", "~stages.0", "stages.0.data.count=48", "stages.0.held_out=0",
       "stages.0.rows_per_step=16", "~stages.0.epochs", "~policies.shared.learning_rate",
       "stages.0.max_steps=5", "~tasks.test"]  # fmt: skip


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder, policy="shared"):
    (file,) = (record.last_checkpoint(folder) / policy).glob("*.safetensors")  # type: ignore[operator]
    return load_file(file)


def broken(monkeypatch, trainer, spoil):
    """Changes the loss of a trainer's n-th microbatch, counted from 1."""
    compute, count = trainer.compute_loss, [0]

    def compute_loss(self, *args, **kwargs):
        count[0] += 1
        found = compute(self, *args, **kwargs)
        return (spoil(count[0], found[0]), *found[1:]) if isinstance(found, tuple) else spoil(count[0], found)

    monkeypatch.setattr(trainer, "compute_loss", compute_loss)


def taught(out, *more):
    return cothink.run(RECIPES / "rema-coldstart-tiny.yaml", [*SFT, *more], out=out).folder


@pytest.mark.parametrize(
    "spoil",
    [lambda loss: loss * math.nan, lambda loss: loss + math.inf, lambda loss: (loss - loss.detach()).sqrt() + 1],
)
def test_an_update_of_sft_that_is_not_finite_is_left_out_and_counted(tmp_path, monkeypatch, spoil):
    """A broken loss, an infinite one with a fine gradient, a fine one with a broken gradient (sqrt at 0)."""
    broken(monkeypatch, SFTTrainer, lambda n, loss: spoil(loss) if n == 2 else loss)
    out = taught(tmp_path / "run")
    rows = metrics(out)
    assert [row.get("shared/skipped_updates", 0) for row in rows] == [0, 1, 0, 0, 0]
    assert not (math.isfinite(rows[1]["shared/loss"]) and math.isfinite(rows[1]["shared/gradient_norm"]))
    assert all(math.isfinite(row["shared/loss"]) for row in rows[2:])
    assert all(bool(t.isfinite().all()) for t in weights(out).values())


def test_an_update_that_is_left_out_changes_no_weight(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        broken(patch, SFTTrainer, lambda n, loss: loss * math.nan)
        skipped = weights(taught(tmp_path / "skipped", "stages.0.max_steps=1"))
    (file,) = Path(models.where("builtin:tiny")).glob("*.safetensors")
    begun = load_file(file)
    assert begun.keys() <= skipped.keys() and all(torch.equal(t.float(), skipped[k]) for k, t in begun.items())
    learned = weights(taught(tmp_path / "learned", "stages.0.max_steps=1"))
    assert not all(torch.equal(t.float(), learned[k]) for k, t in begun.items())


def test_sft_that_stays_not_finite_stops_with_a_diagnosis(tmp_path, monkeypatch):
    broken(monkeypatch, SFTTrainer, lambda n, loss: loss * math.inf if n >= 2 else loss)
    with pytest.raises(TrainingError) as caught:
        taught(tmp_path / "run")
    text = str(caught.value)
    assert text.startswith("policy shared: 3 updates in a row had a non-finite loss or gradient; none was applied.")
    assert "The loss is inf: look at the 96 rows it learns from" in text
    rows = metrics(tmp_path / "run")
    assert [row.get("shared/skipped_updates", 0) for row in rows] == [0, 1, 1]


def test_updates_in_a_row_are_counted_anew_after_a_good_one(tmp_path, monkeypatch):
    broken(monkeypatch, SFTTrainer, lambda n, loss: loss * math.nan if n in (1, 2, 4, 5) else loss)
    rows = metrics(taught(tmp_path / "run"))
    assert [row.get("shared/skipped_updates", 0) for row in rows] == [1, 1, 0, 1, 1]
