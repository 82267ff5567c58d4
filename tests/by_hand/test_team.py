"""The player (spec/rema.md §7): parents of chains, trees and joins, bounded concurrency, deadlines, order, failures."""

from __future__ import annotations

import asyncio

import pytest

from cothink.engines.scripted import engine as scripted
from cothink.team import Job, play
from cothink.types import Finish, PlayError, Role, Task

ROLES = {name: Role(name, "p", name.upper()) for name in ("a", "b", "c")}
TASK = Task("t", "q", "1")


def perform(workflow, script, jobs=1, **options):
    engine = scripted(script)
    work = [Job(TASK, f"e{k}", k) for k in range(jobs)]
    return asyncio.run(play(work, workflow, ROLES, {"p": engine}, **options)), engine


def done(turn):
    return Finish("finished", turn.text, turn.id)


def test_tree_of_siblings_has_parents_and_forks():
    async def tree(task, team):
        answers = await team.chat("a").sample(task.question, 2)

        async def critique(turn):
            return await team.chat("b").sample(turn.text, 2, after=turn)

        last = await asyncio.gather(*(critique(t) for t in answers))
        return done(last[1][1])

    played, engine = perform(tree, lambda call: [f"{call.policy}{k}" for k in range(call.n)])
    (episode,) = played.episodes
    assert [(t.id, t.role, t.parents) for t in episode.turns] == [
        ("0", "a", ()), ("1", "a", ()),
        ("2", "b", ("0",)), ("3", "b", ("0",)), ("4", "b", ("1",)), ("5", "b", ("1",)),
    ]  # fmt: skip
    assert episode.finish.turn == "5"
    assert [c.n for c in engine.calls] == [2, 2, 2]


def test_fork_goes_on_from_one_sibling():
    async def fork(task, team):
        chat = team.chat("a")
        _, second = await chat.sample(task.question, 2)
        return done(await chat.at(second).say("go on", after=second))

    played, engine = perform(fork, lambda call: [f"s{k}" for k in range(call.n)])
    assert [m.content for m in engine.calls[-1].messages] == ["A", "q", "s1", "go on"]
    assert engine.calls[-1].prompt_ids[:3] == (
        *engine.calls[0].prompt_ids,
        *played.episodes[0].turns[1].completion.output_ids,
    )
    assert played.episodes[0].turns[-1].parents == ("1",)


def test_join_has_two_parents():
    async def debate(task, team):
        x, y = await asyncio.gather(team.chat("a").say(task.question), team.chat("b").say(task.question))
        return done(await team.chat("c").say(f"{x.text} or {y.text}?", after=[x, y]))

    (episode,) = perform(debate, lambda call: call.messages[0].content.lower())[0].episodes
    assert [(t.role, t.parents) for t in episode.turns] == [("a", ()), ("b", ()), ("c", ("0", "1"))]


def test_speaking_after_siblings_needs_after():
    async def vague(task, team):
        await team.chat("a").sample(task.question, 2)
        return done(await team.chat("b").say("which?"))

    with pytest.raises(PlayError, match="after 2 sibling turns"):
        perform(vague, lambda call: "x")


def test_order_does_not_depend_on_who_answers_first():
    def slow(order):
        async def script(call):
            await asyncio.sleep(0.002 * order.index(call.messages[0].content))
            return call.messages[0].content

        return script

    async def both(task, team):
        x, _ = await asyncio.gather(team.chat("a").say("q"), team.chat("b").say("q"))
        return done(x)

    one = perform(both, slow(["A", "B"]))[0].episodes[0]
    two = perform(both, slow(["B", "A"]))[0].episodes[0]
    assert [(t.id, t.parents, t.role, t.text) for t in one.turns] == [
        (t.id, t.parents, t.role, t.text) for t in two.turns
    ]
    assert [(t.id, t.text) for t in one.turns] == [("0", "A"), ("1", "B")] and one.finish == two.finish


def test_seeds_differ_between_calls_and_repeat_between_runs():
    async def chain(task, team):
        chat = team.chat("a")
        await chat.say("1")
        return done(await chat.say("2"))

    seeds = [[c.seed for c in perform(chain, lambda call: "x", jobs=3)[1].calls] for _ in range(2)]
    assert sorted(seeds[0]) == sorted(seeds[1]) and len(set(seeds[0])) == 6


def test_a_late_episode_is_left_out_and_counted():
    async def script(call):
        await asyncio.sleep(5 if call.seed % 2 else 0)
        return "x"

    async def one(task, team):
        return done(await team.chat("a").say("q"))

    jobs = 12
    played, engine = perform(one, script, jobs=jobs, deadline=0.1)
    late = sum(c.seed % 2 for c in engine.calls)
    assert 0 < late < jobs
    assert len(played.episodes) == jobs - late
    assert [f.kind for f in played.failures] == ["deadline"] * late


def test_row9_a_slow_episode_does_not_hold_the_others():
    finished = []

    async def script(call):
        await asyncio.sleep(0.2 if call.messages[-1].content == "slow" else 0)
        return "x"

    async def one(task, team):
        turn = await team.chat("a").say(task.question)
        finished.append(task.question)
        return done(turn)

    engine = scripted(script)
    jobs = [Job(Task(q, q, ""), q, 0) for q in ("slow", "b", "c")]
    played = asyncio.run(play(jobs, one, ROLES, {"p": engine}))
    assert finished == ["b", "c", "slow"]
    assert [e.id for e in played.episodes] == ["slow", "b", "c"]


def test_concurrency_is_bounded():
    running, most = 0, 0

    async def script(call):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return "x"

    async def one(task, team):
        return done(await team.chat("a").say("q"))

    perform(one, script, jobs=20, concurrency=3)
    assert most == 3


def test_one_broken_episode_is_counted_all_broken_raise():
    async def one(task, team):
        turn = await team.chat("a").say("q")
        if turn.text == "bad":
            raise ValueError("no such thing")
        return done(turn)

    replies = iter(["bad", "good", "good"])
    played, _ = perform(one, lambda call: next(replies), jobs=3)
    assert len(played.episodes) == 2
    assert [(f.kind, f.message) for f in played.failures] == [("error", "ValueError: no such thing")]
    with pytest.raises(PlayError, match=r"all 3 episodes failed.*no such thing"):
        perform(one, lambda call: "bad", jobs=3)


def test_a_workflow_that_forgets_its_finish_is_told_so():
    async def nothing(task, team):
        await team.chat("a").say("q")

    with pytest.raises(PlayError, match="must return a Finish"):
        perform(nothing, lambda call: "x")


def test_unknown_role_names_those_there_are():
    async def wrong(task, team):
        return done(await team.chat("boss").say("q"))

    with pytest.raises(PlayError, match="'boss'; the team has a, b, c"):
        perform(wrong, lambda call: "x")
