"""A pool of two Ray workers beside the local engine, over the same weights; run by `make test-ray`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace

import pytest
import torch

from cothink import checks, models
from cothink.engines import local
from cothink.loading import load_policies
from cothink.parts import PolicyPart
from cothink.types import Message, NoRoom, PlayError, Sampling

pytestmark = pytest.mark.pool
pytest.importorskip("ray", reason="pip install 'cothink[ray]'")

from cothink.engines import ray as pools  # noqa: E402

QUESTIONS = [f"Ann has {k} apples and gets {k + 3}. How many?" for k in range(9)]
GREEDY, HOT = Sampling(temperature=0.0, max_tokens=24), Sampling(max_tokens=24)
GAP = 1e-5  # float32 on both sides, other rows in the batch: measured 9e-6 at most


def shake(policy, seed: int) -> None:
    """Another policy after an update: its trained weights moved, its version one higher."""
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=dice))
    policy.version += 1


def made(**parts):
    policies = load_policies({n: PolicyPart(model="builtin:tiny", **p) for n, p in parts.items()}, models.where)
    for k, policy in enumerate(policies.values()):
        if policy.adapter is not None:
            shake(policy, k)
    return policies


@pytest.fixture(scope="module")
def team():
    """A bare base and two adapters, in two workers and in the local engine."""
    policies = made(base={}, a={"lora_r": 4}, b={"lora_r": 8})
    engine = pools.engine(policies, workers=2, inner="local", max_rows=64)
    yield policies, engine, local.engine(policies)
    engine.close()


@pytest.fixture
def said(team):
    """What the pool says of itself during one test."""
    lines: list[str] = []
    team[1].figures()
    team[1].say = lines.append
    return lines


async def all_of(engine, policy, how, n=1, seed=7):
    codec = engine.codec(policy)
    chats = [[Message("system", "Solve."), Message("user", q)] for q in QUESTIONS]
    groups = await asyncio.gather(
        *(engine.generate(policy, c, codec.start(c), how, n, seed + k) for k, c in enumerate(chats))
    )
    return [one for group in groups for one in group]


def says(engine, policy, how=GREEDY, n=1, seed=7):
    return asyncio.run(all_of(engine, policy, how, n, seed))


def processes(engine):
    ray = engine._ray
    return [ray.get(seat.worker.actor.process.remote()) for seat in engine.pool.seats]


@pytest.mark.parametrize("name", ["base", "a", "b"])
def test_it_keeps_the_rules_of_engines(team, name):
    checks.check_engine(team[1], name)


@pytest.mark.parametrize("name", ["base", "a", "b"])
def test_greedy_answers_are_those_of_the_local_engine(team, name):
    _, engine, here = team
    mine, theirs = says(engine, name), says(here, name)
    assert mine == theirs  # text, ids, log-probs (0 of what is certain), reason and version
    assert len({c.output_ids for c in mine}) > 3


@pytest.mark.parametrize("name", ["base", "a", "b"])
def test_sampled_answers_are_those_of_the_local_engine_whoever_gives_them(team, name):
    _, engine, here = team
    mine, theirs = says(engine, name, HOT, n=3), says(here, name, HOT, n=3)
    assert [replace(c, logprobs=()) for c in mine] == [replace(c, logprobs=()) for c in theirs]
    assert max(abs(p - q) for c, d in zip(mine, theirs) for p, q in zip(c.logprobs, d.logprobs, strict=True)) < GAP
    assert len({c.output_ids for c in mine[:3]}) > 1


def test_the_work_is_shared(team):
    _, engine, _ = team
    owed = []

    async def watched():
        asked = asyncio.ensure_future(all_of(engine, "base", HOT))
        while not asked.done():
            owed.append(tuple(seat.requests for seat in engine.pool.seats))
            await asyncio.sleep(0)
        await asked

    asyncio.run(watched())
    assert max(owed) == (5, 4)  # nine chats
    assert len(set(processes(engine))) == 2 and os.getpid() not in processes(engine)


@pytest.mark.parametrize("name", ["a", "base"])
def test_new_weights_reach_every_worker_and_nobody_elses_policy(team, name):
    policies, engine, here = team
    before = {n: says(engine, n) for n in policies}
    shake(policies[name], seed=9)
    engine.load(name, None, policies[name].version)
    after = {n: says(engine, n) for n in policies}
    assert after == {n: says(here, n) for n in policies}
    changed = {n for n in policies if [c.output_ids for c in after[n]] != [c.output_ids for c in before[n]]}
    assert changed == {name, *(["a", "b"] if name == "base" else [])} or changed == {name}
    assert {c.version for c in after[name]} == {policies[name].version}
    assert engine.figures() == {"engine/workers_lost": 0.0, "engine/asked_again": 0.0, "engine/staleness": 0.0}


def test_a_version_that_comes_again_with_other_weights_is_another_one(team):
    policies, engine, here = team
    policy = policies["b"]
    says(engine, "b")
    kept, version = [w.detach().clone() for w in policy.parameters()], policy.version
    shake(policy, seed=11)
    policy.version = version  # as after going back to an earlier state, and a step from there
    engine.load("b", None, version)
    fresh = local.engine(policies)
    assert says(engine, "b") == says(fresh, "b") != says(here, "b")[:0]
    with torch.no_grad():
        for weight, old in zip(policy.parameters(), kept):
            weight.copy_(old)
    policy.version += 1
    assert says(engine, "b") == says(here, "b")  # nobody announced it: a resumed run reads a checkpoint


def test_a_killed_worker_loses_nothing_and_is_told(team, said):
    policies, engine, here = team
    long = Sampling(max_tokens=200, temperature=1.5)
    wanted = says(here, "a", long, n=2)
    victim = processes(engine)[0]

    async def murder():
        asked = asyncio.ensure_future(all_of(engine, "a", long, n=2))
        while not engine.pool.seats[0].requests:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        assert not asked.done()
        os.kill(victim, signal.SIGKILL)
        return await asked

    found = asyncio.run(murder())
    assert [c.output_ids for c in found] == [c.output_ids for c in wanted]
    (line,) = said
    assert line.startswith(f"engine ray: worker 1 of 2 has ended (pid {victim}") and "workers lost so far: 1)" in line
    counted = engine.figures()
    assert counted["engine/workers_lost"] == 1 and 1 <= counted["engine/asked_again"] <= 5
    shake(policies["a"], seed=12)  # while the new worker starts, with the weights of before
    engine.load("a", None, policies["a"].version)
    assert says(engine, "a") == says(here, "a")
    engine.settle()
    assert len(set(processes(engine))) == 2 and victim not in processes(engine)
    engine.pool.seats[1].answers += 1000  # so that the new one is asked
    assert says(engine, "a") == says(here, "a")
    engine.pool.seats[1].answers -= 1000


def test_all_workers_killed_at_once_are_all_replaced(team, said):
    _, engine, here = team
    engine.settle()
    victims = processes(engine)
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    assert says(engine, "b") == says(here, "b")
    assert len(said) == 2 and engine.figures()["engine/workers_lost"] == 2


def test_a_prompt_that_fills_the_context_is_an_error_of_its_own_kind(team):
    with pytest.raises(NoRoom, match=r"^policy a: a prompt of 1024 tokens leaves no room in 1024$"):
        asyncio.run(team[1].generate("a", [], (5,) * 1024, HOT, 1, 0))


def test_a_deadline_takes_its_answer_out_of_the_worker_and_leaves_the_others(team):
    _, engine, here = team

    async def some():
        ids = engine.codec("a").start([Message("user", "1 + 1?")])
        late = asyncio.create_task(engine.generate("a", [], ids, Sampling(max_tokens=900, temperature=3.0), 2, 0))
        kept = asyncio.create_task(all_of(engine, "a", GREEDY))
        await asyncio.sleep(0.05)
        late.cancel()
        return await kept

    assert asyncio.run(some()) == says(here, "a")
    assert [seat.answers for seat in engine.pool.seats] == [0, 0]
    assert engine.pool.deaths == 3  # those of the tests before


def test_a_schema_limits_what_is_sampled_and_the_trainer_knows_its_grammar(team):
    pytest.importorskip("llguidance")
    policies, engine, here = team
    schema = json.dumps({"type": "object", "properties": {"go": {"enum": ["on", "stop"]}}, "required": ["go"],
                         "additionalProperties": False})  # fmt: skip
    how = Sampling(max_tokens=40, schema=schema)
    mine = says(engine, "b", how)
    from cothink.grammar import replay

    assert all(replay(policies["b"].grammars[schema], c.output_ids) for c in mine)
    assert [c.output_ids for c in mine] == [c.output_ids for c in says(here, "b", how)]


def test_what_the_inner_engine_refuses_is_said_in_its_own_words():
    with pytest.raises(ValueError, match=r"^engine local: max_rows=0; it must be at least 1$"):
        pools.engine(made(a={"lora_r": 4}), workers=1, max_rows=0)


def test_workers_for_which_there_is_no_room_are_told(monkeypatch):
    monkeypatch.setattr(pools, "PATIENCE", 1.0)
    with pytest.raises(PlayError, match=r"2 of 2 workers did not start in 1 s; each takes .*'num_gpus': 99.*is free"):
        pools.engine(made(a={"lora_r": 4}), workers=2, gpus=99)


def test_sampling_in_bfloat16_is_known_to_the_trainer():
    policies = made(a={"lora_r": 4})
    engine = pools.engine(policies, workers=1, dtype="bfloat16")
    assert policies["a"].coarse
    before = says(engine, "a")
    shake(policies["a"], seed=3)
    engine.load("a", None, policies["a"].version)
    assert says(engine, "a") == says(local.engine(policies, dtype="bfloat16"), "a") != before
    engine.close()
