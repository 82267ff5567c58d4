"""Stored trees as text (malt §10), on the tree of the paper's figure (O1), without a model."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from cothink import show, store
from cothink.engines import scripted
from cothink.resolve import bind, resolve
from cothink.stages.collect import grades
from cothink.team import Job, play
from cothink.types import Role, Task
from cothink.workflows import malt

LEAVES = {(0, 0): 2, (0, 1): 1, (0, 2): 2, (1, 0): 1, (1, 1): 0, (1, 2): 1, (2, 0): 2, (2, 1): 0, (2, 2): 3}
"""Right leaves under each critique of the figure."""


@pytest.fixture
def figure(tmp_path):
    """A store that holds the tree of the figure, of a question whose answer is 1."""
    seats = {name: Role(name, "p", text) for name, text in malt.roles(prompts="words").items()}

    def reply(call):
        name, text = call.messages[0].content, call.messages[-1].content
        if name == "Answer.":
            return [f"g{k}\nFinal Answer: 2" for k in range(3)]
        g = text[text.index("Answer:\ng") + 9]
        if name == "Check.":
            return [f"v{g}{k}" for k in range(3)]
        v = text[text.index("Verification:\nv") + 16]
        right = LEAVES[int(g), int(v)]
        return [f"Final Answer: {1 if k < right else 9}" for k in range(3)]

    made = store.Store(tmp_path / "s", {"round": 0, "split": "train", "workflow": {"branching": [3, 3, 3]}})
    task = Task("t/1", "What is\none?", "1", {"kind": "number"})
    book = made.book(task, lambda role: False)
    workflow = bind(resolve("workflow", "malt"), {"branching": [3, 3, 3]}, "workflow")
    job = Job(task, "t/1#0", 1, memory=book)
    (episode,) = asyncio.run(play([job], workflow, seats, {"p": scripted.engine(reply)})).episodes
    book.close(episode.finish, asyncio.run(grades(episode)))
    made.close()
    return tmp_path / "s"


def test_row34_one_task_shows_values_labels_and_answers(figure):
    text = list(show.lines(figure, "t/1"))
    assert text[:5] == [
        "t/1, round 0, split train",
        "  What is",
        "  one?",
        "  gold: 1",
        "0 generator: 5/9 good; says 2 (wrong)",
    ]
    turns = [line for line in text if ": " in line and "|" not in line and "/" in line.partition(":")[2]]
    assert [line.split(";")[0] for line in turns if line[0] != " " and "generator" in line] == [
        "0 generator: 5/9 good", "1 generator: 2/9 bad", "2 generator: 5/9 good"]  # fmt: skip
    critics = [line.strip().split(";")[0] for line in turns if "verifier" in line]
    assert critics == [
        "3 verifier: 2/3 good", "4 verifier: 1/3 bad", "5 verifier: 2/3 good", "6 verifier: 1/3 bad",
        "7 verifier: 0/3 bad", "8 verifier: 1/3 bad", "9 verifier: 2/3 good", "10 verifier: 0/3 bad",
        "11 verifier: 3/3 good",
    ]  # fmt: skip
    assert "  3 verifier: 2/3 good; no answer (unparsable)" in text and "    | v00" in text
    assert "    12 refiner: 1/1 good; says 1 (right)" in text and "    14 refiner: 0/1 bad; says 9 (wrong)" in text


def test_a_list_of_tasks_and_other_rules(figure):
    (line,) = show.lines(figure)
    counts = "generator 2 good 1 bad, verifier 4 good 5 bad, refiner 12 good 15 bad"
    assert line == f"t/1: gold 1, values 5/9 2/9 5/9; {counts}"
    (strict,) = show.lines(figure, theta="2/3")
    assert "generator 0 good 3 bad, verifier 1 good 8 bad" in strict
    (own,) = show.lines(figure, own=True)
    assert "values 0 0 0; generator 0 good 3 bad" in own


def test_what_is_not_there_is_said(figure, tmp_path):
    with pytest.raises(show.ShowError, match="nothing about the task 't/2'"):
        list(show.lines(figure, "t/2"))
    with pytest.raises(show.ShowError, match="neither trees nor episodes"):
        list(show.lines(tmp_path / "nowhere"))
    with pytest.raises(show.ShowError, match="is no number"):
        list(show.lines(figure, theta="half"))


def test_a_run_folder_with_episodes_of_an_evaluation(made_run, made_episode, tmp_path):
    row = made_episode("t1", ("meta", "add"), ("reasoning", "so\n\\boxed{4}"))
    folder = made_run(tmp_path / "run", episodes={"00-before/000000": [row]})
    assert list(show.lines(folder)) == ["t1 in 00-before/000000: gold 4, right, 2 turns"]
    text = list(show.lines(folder, "t1"))
    assert text[0] == "t1#0 in 00-before/000000: right (finished)"
    assert text[-3:] == ["1 reasoning (answers 0): 2 tokens, return 1", "  | so", "  | \\boxed{4}"]


def test_the_command_needs_no_torch(figure):
    program = (
        "import sys; from cothink.cli import app; app(['show', sys.argv[1], '--task', 't/1'], standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program, str(figure)], capture_output=True, text=True)
    assert done.returncode == 0 and "0 generator: 5/9 good" in done.stdout, done.stderr
    assert json.loads((figure / "header.json").read_text())["round"] == 0
