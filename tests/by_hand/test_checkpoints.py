"""Which checkpoints a run keeps, and under which names."""

from __future__ import annotations

import json

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
    (run.folder / "recipe.yaml").unlink()
    with pytest.raises(RunError, match=r"holds a checkpoint and no recipe\.yaml"):
        Run(run.folder, "name: x\n", 0)
