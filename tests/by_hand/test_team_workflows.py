"""Self-refine, debate, plans x solutions and the vote, on the scripted engine (rema §7 row 39, malt §5 and O12)."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from cothink import checks, votes
from cothink.engines.scripted import engine as scripted
from cothink.team import Job, play
from cothink.types import Completion, Role, Sampling, Task
from cothink.workflows import debate, rema, rerank, self_refine

TASK = Task("t0", "What is 2 + 3?", "5", {"kind": "number"})


def perform(workflow, script, temperature=1.0, **options):
    engine = scripted(script)
    declare = getattr(workflow, "roles", lambda **o: workflow.ROLES)
    seats = {n: Role(n, "p", n, sampling=Sampling(temperature)) for n in declare(**options)}
    played = asyncio.run(play([Job(TASK, "e", 1)], partial(workflow.run, **options), seats, {"p": engine}))
    assert not played.failures, played.failures
    return played.episodes[0], engine.calls


def box(answer):
    return f"so \\boxed{{{answer}}}"


def by_role(table):
    """A script that answers from a list for each role, whose system prompt is its name; siblings take one each."""
    lines = {role: iter(texts) for role, texts in table.items()}

    def reply(call):
        return [next(lines[call.messages[0].content]) for _ in range(call.n)]

    return reply


def ask_vote(answers, kind="math"):
    return asyncio.run(votes.classes(Task("t", "q", "", {"kind": kind}), answers))


def test_o12_equal_answers_are_one_answer_and_the_earliest_wins_a_tie():
    wanted = {"ABC": "A", "ABB": "B", "-BC": "B", "--C": "C"}
    for text, winner in wanted.items():
        turns = _turns([box(c) if c != "-" else "no idea" for c in text], kind="text")
        assert asyncio.run(votes.vote(*turns)).text == box(winner)
    assert asyncio.run(votes.vote(*_turns(["none", "at", "all"], kind="text"))) is None
    task, turns = _turns([box("3"), box("1/2"), box("0.5")], kind="number")
    assert asyncio.run(votes.vote(task, turns)).text == box("1/2")


def _turns(texts, kind):
    from cothink.types import Turn

    task = Task("t", "q", "", {"kind": kind})
    return task, [Turn(str(k), (), "solver", "p", Completion(t), t) for k, t in enumerate(texts)]


def test_answers_are_compared_as_the_verifier_does():
    assert ask_vote(["x+1", None, "1+x", "x", r"\frac{1}{2}", "0.5"]) == [0, None, 0, 3, 4, 4]
    assert ask_vote(["Paris", "paris ", "Rome"], "text") == [0, 0, 2]
    assert ask_vote(["B", "B", "C"], "letter") == [0, 0, 2]
    task = Task("t", "q", "5", {"kind": "number"})
    assert votes.answer_of(task, box("five")) is None and votes.answer_of(task, box("$1,200")) == "1200"
    assert votes.answer_of(task, "the last number is 7") is None  # strict, as accuracy is


@pytest.mark.parametrize(
    ("text", "choice"),
    [("2 is best \\boxed{2}", "2"), ("\\boxed{1} no, \\boxed{3}", "3"), ("\\boxed{Answer 2}", "2"),
     ("\\boxed{0}", ""), ("\\boxed{4}", ""), ("the second", ""), ("\\boxed{two}", "")],
)  # fmt: skip
def test_what_a_judge_says(text, choice):
    assert votes.named(text, 3) == choice


def test_self_refine_lists_and_grade():
    episode, calls = perform(self_refine, [box(4), f"a mistake: {box(5)}"])
    assert [m.role for m in calls[1].messages] == ["system", "user", "assistant", "user"]
    assert calls[1].messages[1].content == TASK.question and calls[1].messages[-1].content == self_refine.REQUEST
    assert [(t.round, t.parents) for t in episode.turns] == [(0, ()), (1, ("0",))]
    assert (episode.finish.reason, episode.finish.turn, episode.finish.text) == (
        "finished",
        "1",
        f"a mistake: {box(5)}",
    )
    assert len(perform(self_refine, [box(k) for k in range(4)], rounds=3)[0].turns) == 4
    assert self_refine.turns(rounds=3) == 4
    cut = [Completion("so", finish_reason="length")]
    assert perform(self_refine, cut, stop_on_truncation=True)[0].finish.reason == "truncated"
    episode, _ = perform(self_refine, [box(4)], max_context=2)  # one id for each message: the second prompt has four
    assert (episode.finish.reason, episode.finish.text) == ("context_exceeded", box(4))
    with pytest.raises(ValueError, match="use the workflow solo"):
        asyncio.run(self_refine.run(TASK, None, rounds=0))  # type: ignore[arg-type]


def test_malts_debate_of_three_by_three():
    """malt §10 row 30: joined parents, nine calls."""
    texts = {"solver": [box(1), box(2), box(3)], "debater": [f"{k} {box(5 if k % 2 else 6)}" for k in range(6)]}
    episode, calls = perform(debate, by_role(texts))
    assert sum(call.n for call in calls) == 9 and calls[0].n == 3
    parents = ["", "", "", "012", "102", "201", "345", "435", "534"]  # one's own answer first
    assert ["".join(t.parents) for t in episode.turns] == parents
    assert [t.round for t in episode.turns] == [0] * 3 + [1] * 3 + [2] * 3
    # of the last answers 5, 6, 5 the vote takes 5, in the first turn that states it
    assert (episode.finish.text, episode.finish.turn) == (f"3 {box(5)}", "6")
    first = calls[1].messages
    assert [m.role for m in first] == ["system", "user"]
    told = first[1].content
    assert f"Question:\n{TASK.question}\n\nYour answer:\n{box(1)}\n\nAnswer of another expert:\n{box(2)}" in told
    again = calls[4].messages
    assert [m.role for m in again] == ["system", "user", "assistant", "user"]
    assert again[-1].content == f"Answer of another expert:\n1 {box(5)}\n\nAnswer of another expert:\n2 {box(6)}"


def test_remas_debate_of_two_by_two_is_the_same_file():
    """rema R9: the first round is sampled, the later ones are greedy: two seats with their own temperature."""
    texts = {"solver": [box(1), box(2)], "debater": [box(2), box(2)]}
    episode, _ = perform(debate, by_role(texts), agents=2, rounds=2)
    assert len(episode.turns) == 4 and episode.finish.text == box(2)
    assert debate.roles(rounds=1) == {"solver": debate.SOLVER}
    assert debate.turns(agents=2, rounds=2) == 2 and debate.turns() == 6
    for wrong in ({"agents": 1}, {"rounds": 0}):
        with pytest.raises(ValueError, match="two agents and one round"):
            asyncio.run(debate.run(TASK, None, **wrong))  # type: ignore[arg-type]


def test_a_judge_decides_a_debate_and_an_unparsable_one_leaves_it_to_the_vote():
    texts = {"solver": [box(1), box(2), box(2)], "judge": ["the first one holds \\boxed{1}"]}
    episode, _ = perform(debate, by_role(texts), rounds=1, decide="judge")
    judge = episode.turns[-1]
    assert (episode.finish.text, episode.finish.turn) == (box(1), None)  # the last word is the judge's
    assert (judge.role, judge.parents, judge.text) == ("judge", ("0", "1", "2"), "1")
    episode, _ = perform(debate, by_role({**texts, "judge": ["hard to say"]}), rounds=1, decide="judge")
    assert episode.finish.text == box(2)
    assert (episode.turns[-1].text, episode.turns[-1].completion.text) == ("", "hard to say")  # void: it is counted


def test_a_debate_that_outgrows_the_context_is_decided_by_the_last_whole_round():
    texts = {"solver": [box(1), box(2), box(2)], "debater": [box(3)] * 3}
    episode, _ = perform(debate, by_role(texts), max_context=3)  # the third round has four messages
    assert (episode.finish.reason, episode.finish.text, len(episode.turns)) == ("context_exceeded", box(3), 6)


def test_flat_and_hierarchical_selection_differ_by_hand():
    """rema §7 row 39, R10: of 1 1 1 | 9 9 1 | 9 9 3 all together 1 and 9 have four votes each, and 1 came first; the
    winners of the plans are 1, 9 and 9."""
    found = [box(answer) for answer in (1, 1, 1, 9, 9, 1, 9, 9, 3)]
    texts = {"meta": ["p", "q", "r"], "reasoning": found}
    flat, calls = perform(rerank, by_role(texts), plans=3, solutions=3, selection="flat")
    assert (flat.finish.text, flat.finish.turn) == (box(1), "3") and sum(call.n for call in calls) == 12
    tall, _ = perform(rerank, by_role(texts), plans=3, solutions=3)
    assert (tall.finish.text, tall.finish.turn) == (box(9), "6")
    assert [t.parents for t in tall.turns[:6]] == [(), (), (), ("0",), ("0",), ("0",)]


def test_judges_within_each_plan_and_across_them():
    texts = {"meta": ["p", "q"], "reasoning": [box(1), box(2), box(3), box(4)]}
    judges = ["\\boxed{2}", "none", "\\boxed{2}"]  # plan p: 2; plan q: the vote takes 3; across: the second, 3
    episode, calls = perform(rerank, by_role({**texts, "judge": judges}), plans=2, solutions=2, decide="judge")
    assert episode.finish.text == box(3) and episode.finish.turn is None
    last = episode.turns[-1]
    winners = {t.id: t.text for t in episode.turns if t.role == "reasoning" and t.id in last.parents}
    inner = [t.id for t in episode.turns[:-1] if t.role == "judge"]
    assert list(winners.values()) == [box(2), box(3)] and set(inner) <= set(last.parents)
    assert f"Answer 1:\n{box(2)}\n\nAnswer 2:\n{box(3)}" in calls[-1].messages[-1].content


def test_at_temperature_0_a_plan_and_a_solution_are_enough():
    episode, calls = perform(rerank, by_role({"meta": ["p"], "reasoning": [box(5)]}), temperature=0.0)
    assert len(calls) == 2 and episode.finish.text == box(5)
    with pytest.raises(ValueError, match="nothing to choose from"):
        asyncio.run(rerank.run(TASK, None, plans=1, solutions=1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("workflow", "options"),
    [
        (self_refine, {"rounds": 3, "stop_on_truncation": True}),
        (self_refine, {"max_context": 3}),
        (debate, {"agents": 2, "rounds": 2, "decide": "judge"}),
        (debate, {"max_context": 3}),
        (rerank, {"plans": 3, "solutions": 1, "selection": "flat", "decide": "judge"}),
        (rerank, {"plans": 2, "solutions": 2, "decide": "judge"}),
    ],
)
def test_other_settings_keep_the_rules_too(workflow, options):
    checks.check_workflow(workflow.run, options=options)


def test_reranking_speaks_the_words_its_team_was_trained_with():
    assert (rema.SINGLE["meta"], rema.SINGLE["reasoning"]) == (rerank.META, rerank.REASONING)
    assert set(rerank.roles(decide="judge")) == {"meta", "reasoning", "judge"}
