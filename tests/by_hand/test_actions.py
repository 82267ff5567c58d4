"""JSON actions (spec/rema.md 6.1): what is valid, what the reasoner reads, and which action goes with which level."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from xml.etree import ElementTree

import pytest

from cothink import plots
from cothink.actions import SCHEMA, Action, read
from cothink.engines.scripted import engine as scripted
from cothink.record import RunError
from cothink.stages.actions import by_action, figures
from cothink.team import Job, play
from cothink.types import Completion, Episode, Finish, Role, Task, Turn
from cothink.workflows import rema

TASK = Task("t", "What is 2 + 3?", "5")
EMPTY, SPLIT = '{"action": "EMPTY", "output": ""}', '{"action": "DECOMPOSE", "output": "What is 2?"}'


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (EMPTY, Action("EMPTY", "")),
        (' {"action":"REWRITE","output":"Add 2 to 3."}\n', Action("REWRITE", "Add 2 to 3.")),
        (SPLIT + " done", None),
        ('{"output": "", "action": "EMPTY"}', None),
        ('{"action": "EMPTY", "output": "", "why": ""}', None),
        ('{"action": "EMPTY", "action": "EMPTY", "output": ""}', None),
        ('{"action": "EMPTY", "output": "something"}', None),
        ('{"action": "DECOMPOSE", "output": ""}', None),
        ('{"action": "SOLVE", "output": "x"}', None),
        ('{"action": "REWRITE", "output": ["x"]}', None),
        ('{"action": ["EMPTY"], "output": ""}', None),
        ('[["action", "EMPTY"], ["output", ""]]', None),
        ("null", None),
        ("[" * 100_000, None),
    ],
)
def test_only_one_shape_is_an_action(text, found):
    assert read(text) == found


def discuss(plan, finish="stop", constrain=False, **options):
    replies = [Completion(plan, finish_reason=finish), "\\boxed{5}"]
    engine = scripted(replies)
    seats = {n: Role(n, "p", s) for n, s in {"meta": "M", "reasoning": "R"}.items()}
    run = partial(rema.run, max_turns=1, actions=True, constrain=constrain, **options)
    (episode,) = asyncio.run(play([Job(TASK, "e", 1)], run, seats, {"p": engine})).episodes
    return episode, engine.calls


@pytest.mark.parametrize(
    ("plan", "finish", "read_by_reasoning"),
    [
        (SPLIT, "stop", "Question:\nWhat is 2 + 3?\n\nInstruction:\nWhat is 2?"),
        ('{"action": "REWRITE", "output": "Add."}', "stop", "Question:\nWhat is 2 + 3?\n\nInstruction:\nAdd."),
        (EMPTY, "stop", "What is 2 + 3?"),
        ("no JSON", "stop", "What is 2 + 3?"),
        ('{"action": "DECOMPOSE", "output": "What', "length", "What is 2 + 3?"),  # cut, and play goes on
    ],
)
def test_row33_what_reasoning_reads_of_an_action(plan, finish, read_by_reasoning):
    """rema §7 row 33."""
    episode, calls = discuss(plan, finish)
    assert [m.content for m in calls[1].messages] == ["R", read_by_reasoning]
    assert (episode.finish.reason, episode.finish.text) == ("finished", "\\boxed{5}")
    assert episode.turns[0].text == plan


def test_only_the_planner_is_held_to_the_schema():
    _, (meta, reasoning) = discuss(EMPTY, constrain=True)
    assert (meta.sampling.schema, reasoning.sampling.schema) == (SCHEMA, None)
    _, (meta, _) = discuss(EMPTY)
    assert meta.sampling.schema is None


def toy(*plans):
    """(level, text) of each plan."""
    for k, (level, text) in enumerate(plans):
        task = Task(f"t{k}", "q", "1", {} if level is None else {"level": level})
        plan = Turn("0", (), "meta", "p", Completion(text, (1,), (2,)), text)
        answer = Turn("1", ("0",), "reasoning", "p", Completion(EMPTY, (1,), (2,)), EMPTY)  # no plan, whatever it says
        yield Episode(f"e{k}", task, (plan, answer), Finish("finished", "", "1"))


def test_row33_difficulty_by_action_on_a_toy_log():
    """rema §7 row 33: null where an action was never chosen."""
    found = by_action(toy((1, EMPTY), ("Level 2", EMPTY), (5, SPLIT), (3, "junk"), (None, EMPTY)))
    assert found == {
        "DECOMPOSE": {"level": 5.0, "share": 0.2, "count": 1},
        "REWRITE": {"level": None, "share": 0.0, "count": 0},
        "EMPTY": {"level": 1.5, "share": 0.6, "count": 3},
        "INVALID": {"level": 3.0, "share": 0.2, "count": 1},
    }
    assert by_action([])["EMPTY"] == {"level": None, "share": None, "count": 0}
    assert figures(toy((1, EMPTY)))["action/REWRITE/level"] is None


def test_the_curves_of_a_run_are_an_svg_with_gaps(tmp_path):
    logs = [toy((1, EMPTY), (4, SPLIT)), toy((2, EMPTY)), toy((3, EMPTY), (5, SPLIT))]
    rows = [{"stage": 1, "step": k + 1, "time": 0.0, "reward": 0.5, **figures(log)} for k, log in enumerate(logs)]
    rows.append({"stage": 2, "step": 1, "time": 0.0, **figures(toy((4, EMPTY)))})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    root = ElementTree.fromstring(plots.of_run(tmp_path, ["action/*/level"]))
    curves = [e.get("d") for e in root.iter("{http://www.w3.org/2000/svg}path") if e.get("stroke-width") == "2"]
    texts = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "action/EMPTY/level" in texts and "reward" not in texts
    assert len(curves) == 3  # DECOMPOSE twice, a dot on each side of its gap; EMPTY once, through both stages
    assert sum(c.endswith("h0") for c in curves) == 2 and max(c.count("L") for c in curves) == 3
    assert any(c.endswith("704.0,108.0") for c in curves)  # step 4 of 4: right edge; level 4 of 1 to 5
    with pytest.raises(RunError, match=r"no metric .* matches rewart; did you mean .reward."):
        plots.of_run(tmp_path, ["rewart"])
    with pytest.raises(RunError, match=r"has no metrics\.jsonl"):
        plots.of_run(tmp_path / "none", ["*"])
