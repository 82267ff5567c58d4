"""The cold starts of the JSON and judge teams: they read what the workflows will show them, and teach what is valid."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

import pytest

from cothink.actions import ACTIONS, read
from cothink.conversations import wordactions, wordverdicts
from cothink.engines.scripted import engine as scripted
from cothink.tasks import DataError, wordpairs, wordsums
from cothink.team import Job, play
from cothink.types import Role
from cothink.verify import find_verdict, verify_task
from cothink.workflows import judge, rema

TEAM = {n: Role(n, "p", n) for n in ("meta", "reasoning")}


def lists(run, task, roles, replies):
    """What the roles are shown when each says what its chat teaches."""
    engine = scripted(list(replies))
    asyncio.run(play([Job(task, "e", 1)], run, roles, {"p": engine}))
    return [call.messages for call in engine.calls]


def test_actions_are_valid_in_equal_shares_and_the_chats_are_those_of_the_workflow():
    chats = wordactions.load(TEAM, count=120, levels=(1, 5))
    tasks = {t.question: t for t in wordsums.load(levels=(1, 5), count=120, distractors=(0, 2))}
    found, right = Counter(), Counter()
    for meta, reasoning in zip(chats[::2], chats[1::2]):
        plan, answer = meta.messages[-1].content, reasoning.messages[-1].content
        shown = lists(partial(rema.run, max_turns=1, actions=True), tasks[meta.question], TEAM, (plan, answer))
        assert shown == [meta.messages[:-1], reasoning.messages[:-1]]
        action = read(plan)
        assert action is not None
        found[action.action] += 1
        right[action.action] += verify_task(tasks[meta.question], answer).right
        if action.action == "REWRITE":
            kept, steps = action.output.split(". "), tasks[meta.question].meta["steps"]
            assert all(line in meta.question for line in kept) and len(kept) == len(steps) + 2
    assert set(found) == set(ACTIONS) and min(found.values()) > 25
    assert right["DECOMPOSE"] / found["DECOMPOSE"] > right["EMPTY"] / found["EMPTY"]
    only = wordactions.load(TEAM, count=20, shares=(0.0, 0.0, 1.0))
    assert {read(c.messages[-1].content).action for c in only[::2]} == {"EMPTY"}  # type: ignore[union-attr]
    with pytest.raises(DataError, match="three weights"):
        wordactions.load(TEAM, count=2, shares=(0.0, 0.0, 0.0))


@pytest.mark.parametrize("form", ["rema", "vrp"])
def test_verdicts_are_valid_and_the_chats_are_those_of_the_workflow(form):
    roles = TEAM if form == "rema" else {"judge": Role("judge", "p", "judge")}
    chats = wordverdicts.load(roles, count=100, levels=(1, 3))
    tasks = {t.question: t for t in wordpairs.load(levels=(1, 3), count=100)}
    right = 0
    for k in range(0, len(chats), len(roles)):
        group = chats[k : k + len(roles)]
        task, said = tasks[group[0].question], [c.messages[-1].content for c in group]
        assert lists(partial(judge.run, form=form), task, roles, said) == [c.messages[:-1] for c in group]
        assert find_verdict(said[-1]) is not None and "[[" not in (said[0] if form == "rema" else "")
        right += verify_task(task, said[-1]).right
    assert 65 < right < 97  # the careless toss a coin
