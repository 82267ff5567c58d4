"""Workflows on the scripted engine: message lists and the termination state machine (spec/rema.md 1.2, 2)."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from cothink.engines.scripted import engine as scripted
from cothink.team import Job, play
from cothink.types import FINISH_CODES, Completion, PlayError, Role, Sampling, Task
from cothink.workflows import plan_solve, rema, solo

TASK = Task("t0", "What is 2 + 3?", "5")


def perform(workflow, script, roles, **options):
    engine = scripted(script)
    seats = {n: Role(n, "p", s, sampling=Sampling(max_tokens=9)) for n, s in roles.items()}
    played = asyncio.run(play([Job(TASK, "e", 1)], partial(workflow, **options), seats, {"p": engine}))
    return played, engine


def discuss(script, **options):
    played, engine = perform(rema.run, script, {"meta": "M", "reasoning": "R"}, **({"max_turns": 3} | options))
    return played.episodes[0], engine


def cut(text):
    return Completion(text, finish_reason="length")


def lists(engine, system):
    """(role, content) of each prompt that starts with this system message."""
    return [[(m.role, m.content) for m in c.messages] for c in engine.calls if c.messages[0].content == system]


@pytest.mark.parametrize("workflow", [solo, plan_solve])
def test_row1_one_agent_one_call(workflow):
    played, engine = perform(workflow.run, ["\\boxed{4} no, \\boxed{5}"], workflow.ROLES)
    (episode,) = played.episodes
    assert lists(engine, workflow.ROLES["solver"]) == [[("system", workflow.ROLES["solver"]), ("user", TASK.question)]]
    assert episode.finish.text == "\\boxed{4} no, \\boxed{5}" and episode.finish.reason == "finished"


def test_row2_single_turn_lists():
    episode, engine = discuss(["add them", "\\boxed{5}"], max_turns=1)
    assert lists(engine, "M") == [[("system", "M"), ("user", TASK.question)]]
    (reasoning,) = lists(engine, "R")
    assert reasoning == [("system", "R"), ("user", "Question:\nWhat is 2 + 3?\n\nInstruction:\nadd them")]
    assert [t.parents for t in episode.turns] == [(), ("0",)]


def test_row3_multi_turn_lists():
    episode, engine = discuss(["m1", "y1", "m2", "y2", "m3 [FINISH]", "y3"])
    x, first = TASK.question, f"Question:\n{TASK.question}\n\nInstruction:\nm1"
    meta, reasoning = lists(engine, "M"), lists(engine, "R")
    assert meta[-1] == [
        ("system", "M"), ("user", x), ("assistant", "m1"), ("user", "y1"), ("assistant", "m2"), ("user", "y2"),
    ]  # fmt: skip
    assert reasoning[-1] == [
        ("system", "R"), ("user", first), ("assistant", "y1"), ("user", "m2"), ("assistant", "y2"),
        ("user", "m3 [FINISH]"),
    ]  # fmt: skip
    assert [len(m) for m in meta] == [len(m) for m in reasoning] == [2, 4, 6]  # 2t messages before round t
    assert [t.parents for t in episode.turns] == [(), ("0",), ("1",), ("2",), ("3",), ("4",)]
    assert [t.round for t in episode.turns] == [0, 0, 1, 1, 2, 2]


def test_row4_three_roles_from_configuration_alone():
    played, engine = perform(
        rema.run,
        ["plan", "check it", "4", "plan again", "done [FINISH]", "5"],
        {"meta": "M", "critic": "C", "reasoning": "R"},
        order=["meta", "critic", "reasoning"],
        finisher="critic",
        max_turns=5,
    )
    (episode,) = played.episodes
    assert (episode.finish.reason, episode.finish.text) == ("finished", "5")
    assert [t.role for t in episode.turns] == ["meta", "critic", "reasoning"] * 2
    assert lists(engine, "R")[0][1] == ("user", f"Question:\n{TASK.question}\n\nInstruction:\nplan\n\ncheck it")
    assert lists(engine, "M")[1][-1] == ("user", "check it\n\n4")


SCENARIOS = {
    # name: script, options, reason, rounds, graded text
    "a": (["m [FINISH]", "y"], {}, "finished", 1, "y"),
    "b": (["m1", "y1  [FINISH] more", "m2 [FINISH]", "y2"], {}, "finished", 2, "y2"),
    "c": (["m1", "y1", cut("m2")], {}, "truncated", 2, ""),
    "d": (["m1", "y1", "m2 [FINISH]", cut("y2")], {}, "truncated", 2, "y2"),
    "e": (["m1", "y1", "m2", "y2"], {"max_context": 5}, "context_exceeded", 2, "y2"),
    "g": (["m1", "y1", "m2", "y2", "m3", "y3"], {}, "max_turns", 3, "y3"),
    "h": (["m1", "y1", cut("m2"), "y2", "m3 [FINISH]", "y3"], {"stop_on_truncation": False}, "finished", 3, "y3"),
    "i": (["m [FINISH]", "y"], {"max_turns": 1}, "finished", 1, "y"),
    "j": (["", "y1", "m2 [FINISH]", "y2"], {}, "finished", 2, "y2"),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_rows5to7_termination(name):
    script, options, reason, rounds, graded = SCENARIOS[name]
    episode, _ = discuss(script, **options)
    assert (episode.finish.reason, episode.finish.text) == (reason, graded)
    assert 1 + max(t.round for t in episode.turns) == rounds
    assert episode.finish.turn == episode.turns[-1].id


def test_scenario_b_the_tag_of_the_reasoner_is_cut_from_what_meta_sees():
    episode, engine = discuss(["m1", "y1  [FINISH] more", "m2 [FINISH]", "y2"])
    assert episode.turns[1].completion.text == "y1  [FINISH]"  # generation stopped there, its own row keeps it
    assert lists(engine, "M")[1][-1] == ("user", "y1")
    assert lists(engine, "R")[1][2] == ("assistant", "y1  [FINISH]")
    assert all(c.sampling.stop == ("[FINISH]",) for c in engine.calls)


def test_scenario_c_the_reasoner_gets_an_empty_turn_without_tokens():
    episode, _ = discuss(["m1", "y1", cut("m2")])
    dummy = episode.turns[-1]
    assert (dummy.role, dummy.text, dummy.completion.output_ids, dummy.round) == ("reasoning", "", (), 1)
    assert dummy.completion.finish_reason == "void" and dummy.parents == ("2",)


class Long:
    """An InternCodec whose prompts look longer for one role from one prompt on."""

    def __init__(self, system, lengths):
        from cothink.chat import InternCodec

        self.inner, self.system, self.lengths = InternCodec(), system, lengths
        self.stop_ids, self.stop_strings, self.decode = (), (), self.inner.decode

    def start(self, messages):
        return self._pad(messages, self.inner.start(messages))

    def grow(self, messages, ids):
        grown = self.inner.grow(messages, ids)
        return grown._replace(ids=self._pad(messages, grown.ids))

    def _pad(self, messages, ids):
        extra = self.lengths if messages[0].content == self.system and len(messages) >= 6 else 0
        return (*ids, *([0] * extra))


@pytest.mark.parametrize(("system", "turns", "graded"), [("M", 4, "y2"), ("R", 6, "")])
def test_scenarios_e_and_f_context_before_round_three(system, turns, graded):
    engine = scripted(["m1", "y1", "m2", "y2", "m3", "y3"], Long(system, 1000))
    seats = {n: Role(n, "p", s) for n, s in {"meta": "M", "reasoning": "R"}.items()}
    run = partial(rema.run, max_turns=3, max_context=100)
    (episode,) = asyncio.run(play([Job(TASK, "e", 1)], run, seats, {"p": engine})).episodes
    assert (episode.finish.reason, episode.finish.text) == ("context_exceeded", graded)
    assert len(episode.turns) == turns  # f: m3 is kept and trainable, y3 an empty placeholder
    assert FINISH_CODES[episode.finish.reason] == 2


def test_round_one_overflow_rejects_the_task_and_the_run_goes_on():
    long = Task("long", "x", "1")
    engine = scripted(lambda call: "y [FINISH]")
    seats = {n: Role(n, "p", "S" if n == "meta" else "") for n in ("meta", "reasoning")}

    async def fits_short(task, team):
        return await rema.run(task, team, max_turns=2, max_context=1 if task.id == "long" else 50)

    jobs = [Job(long, "a", 1), Job(TASK, "b", 1)]
    played = asyncio.run(play(jobs, fits_short, seats, {"p": engine}))
    assert [e.task.id for e in played.episodes] == ["t0"]
    assert [(f.task, f.kind) for f in played.failures] == [("long", "overlong_task")]


def test_a_finisher_outside_the_order_is_an_error():
    with pytest.raises(PlayError, match="finisher"):
        discuss(["m", "y"], finisher="boss")
