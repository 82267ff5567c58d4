"""Which checkpoints a run keeps, and under which names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cothink.record import Run, RunError, last_checkpoint


class Weights:
    """A policy that saves one word."""

    def __init__(self):
        self.word = ""

    def save(self, folder):
        (folder / "word.txt").write_text(self.word)


def names(run):
    return sorted(p.name for p in run.checkpoints.iterdir())


def state(step, **progress):
    return {"stage": 0, "step": step, "progress": progress}


def test_a_second_state_of_one_step_never_replaces_the_first_in_place(tmp_path):
    """rema §7 row 42: a filter that ends at the step of a checkpoint is saved beside it."""
    run, p = Run(tmp_path / "run", "name: x\n", 0), Weights()
    run.checkpoint({"p": p}, state(4))
    run.checkpoint({"p": p}, state(4, kept=["a"]))
    assert names(run) == ["stage00-step000004", "stage00-step000004-1"]
    assert last_checkpoint(run.folder) == run.checkpoints / "stage00-step000004-1"
    run.checkpoint({"p": p}, state(4, kept=["a"]))  # nothing new: nothing written
    assert names(run) == ["stage00-step000004", "stage00-step000004-1"]
    run.checkpoint({"p": p}, state(5))
    assert names(run) == ["stage00-step000004-1", "stage00-step000005"]


def test_good_states_stay_while_they_are_named(tmp_path):
    run, p = Run(tmp_path / "run", "name: x\n", 0), Weights()
    for step, kept in enumerate(([], [1], [1, 2], [], []), 1):
        p.word = str(step)
        run.checkpoint({"p": p}, state(step), [f"stage00-step{k:06d}" for k in kept])
        if step == 3:
            assert names(run) == [f"stage00-step{k:06d}" for k in (1, 2, 3)]
    assert names(run) == ["stage00-step000004", "stage00-step000005"]
    assert (run.checkpoints / "stage00-step000005" / "word.txt").read_text() == "5"


def test_a_stopped_run_says_why_it_is_not_resumed(tmp_path):
    """rema §7 row 40."""
    run = Run(tmp_path / "run", "name: x\n", 0)
    run.stop({"step": 7, "what": "void/meta: meta/void rose by 0.3 (limit 0.2)"})
    run.close()
    with pytest.raises(RunError, match=r"stopped this run at step 7: void/meta: .*delete .*stopped\.json to go on"):
        Run(tmp_path / "run", "name: x\n", 0)
    assert json.loads((tmp_path / "run" / "stopped.json").read_text())["step"] == 7
    (tmp_path / "run" / "stopped.json").unlink()
    Run(tmp_path / "run", "name: x\n", 0).close()


def test_a_folder_with_a_checkpoint_and_no_recipe_is_refused(tmp_path):
    run = Run(tmp_path / "run", "name: x\n", 0)
    run.checkpoint({"p": Weights()}, state(1))
    run.close()
    (run.folder / "recipe.yaml").unlink()
    with pytest.raises(RunError, match=r"holds a checkpoint and no recipe\.yaml"):
        Run(run.folder, "name: x\n", 0)


@pytest.fixture
def saved(tmp_path):
    """A closed run with two checkpoints, of the steps 3 and 6."""
    run, p = Run(tmp_path / "run", "name: x\n", 0), Weights()
    for step in (3, 6):
        p.word = f"weights {step}"
        run.metrics(0, step, {"loss": 1.0})
        run.checkpoint({"p": p}, state(step))
    run.close()
    return run.folder


def _cut(path):
    path.write_text(path.read_text()[:-1])


def _flip(path):
    path.write_text(path.read_text().replace("6", "7"))


DAMAGE = {
    "word.txt has 8 bytes instead of 9": ("word.txt", _cut),
    "word.txt holds something else than what was written": ("word.txt", _flip),
    "word.txt is missing": ("word.txt", Path.unlink),
    "its seal.json cannot be read": ("seal.json", _cut),
    "it is not there": (".", shutil.rmtree),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(saved, what):
    name, harm = DAMAGE[what]
    harm(saved / "checkpoints/stage00-step000006" / name)
    with pytest.raises(RunError, match=f"stage00-step000006 is damaged: {what}"):
        last_checkpoint(saved)
    run = Run(saved, "name: x\n", 0)
    assert run.notes[0].startswith(f"checkpoint stage00-step000006 is damaged: {what}")
    assert run.notes[1:] == ["going back to checkpoint stage00-step000003"]
    assert (run.state["step"], run.place, names(run)) == (
        3,
        run.checkpoints / "stage00-step000003",
        ["stage00-step000003"],
    )
    rows = [json.loads(line) for line in (saved / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [3]  # what came after it will be written again
    run.close()
    assert last_checkpoint(saved) == run.place


def test_nothing_to_go_back_to_is_said(saved):
    for place in (saved / "checkpoints").iterdir():
        _cut(place / "word.txt")
    with pytest.raises(RunError, match="there is no other to go back to: delete"):
        Run(saved, "name: x\n", 0)


def test_a_folder_belongs_to_one_process(saved):
    run = Run(saved, "name: x\n", 0)
    code = "import sys; from cothink.record import Run; Run(__import__('pathlib').Path(sys.argv[1]), 'name: x\\n', 0)"
    other = subprocess.run([sys.executable, "-c", code, str(saved)], capture_output=True, text=True)
    assert other.returncode == 1 and f"another process ({os.getpid()}) works in {saved}: wait" in other.stderr
    run.close()
    assert subprocess.run([sys.executable, "-c", code, str(saved)], capture_output=True).returncode == 0


def test_half_a_checkpoint_is_swept_away(saved):
    (saved / "checkpoints/stage00-step000009.part").mkdir()
    run = Run(saved, "name: x\n", 0)
    assert names(run) == ["stage00-step000003", "stage00-step000006"] and not run.notes
    run.close()
