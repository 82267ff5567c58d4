"""The running batch: what it shares, forgets, restarts and mixes never changes what is said."""

from __future__ import annotations

import asyncio

import pytest
import torch

from cothink.attention import states
from cothink.engines import precision
from cothink.engines.local import engine as local_engine
from cothink.engines.prefixes import Prefixes
from cothink.engines.requests import Answer, Request
from cothink.engines.sampler import draw
from cothink.engines.weights import Packed
from cothink.loading import load_policies
from cothink.parts import PolicyPart
from cothink.types import Message, Sampling


def policies(folder, **kinds):
    return load_policies({name: PolicyPart(model=str(folder), **spec) for name, spec in kinds.items()}, str)


async def chats(engine, policy, texts, sampling, n=1, seed=0, turns=1):
    """Each text opens a chat of some turns; returns all completions in order."""
    codec = engine.codec(policy)

    async def one(k, text):
        messages, said = [Message("user", text)], []
        ids = codec.start(messages)
        for turn in range(turns):
            answers = await engine.generate(policy, messages, ids, sampling, n, 100 * seed + 10 * k + turn)
            said += answers
            first = answers[0]
            messages = [*messages, Message("assistant", first.text), Message("user", f"and {turn}?")]
            ids = codec.grow(messages, (*first.prompt_ids, *first.output_ids)).ids
        return said

    return [c for group in await asyncio.gather(*(one(k, t) for k, t in enumerate(texts))) for c in group]


def said(completions):
    return [(c.prompt_ids, c.output_ids, c.finish_reason) for c in completions]


TEXTS = ["plan", "a much longer question that pads the others", "solve", "", "answer now", "a much longer question"]


def test_a_growing_chat_is_read_once_and_says_the_same(tiny_folder):
    team = policies(tiny_folder, a={})
    sampling = Sampling(max_tokens=9)
    engine = local_engine(team)
    done = asyncio.run(chats(engine, "a", TEXTS, sampling, turns=3))
    fresh = local_engine(team, cache_gib=1e-9)  # no room to remember anything, or to speak together
    assert said(asyncio.run(chats(fresh, "a", TEXTS, sampling, turns=3))) == said(done)
    last = [c for k, c in enumerate(done) if k % 3 == 2]
    distinct = set()
    for c in done:
        distinct |= {c.prompt_ids[: k + 1] for k in range(len(c.prompt_ids))}
    spoken = {
        (*c.prompt_ids, *c.output_ids)[: len(c.prompt_ids) + k + 1] for c in done for k in range(len(c.output_ids) - 1)
    }
    assert engine.counters.prefilled == len(distinct - spoken)
    assert engine.counters.prefilled + engine.counters.reused == sum(len(c.prompt_ids) for c in done)
    assert engine.counters.prefilled < sum(len(c.prompt_ids) for c in last)
    assert fresh.counters.reused < engine.counters.reused


def test_a_tight_memory_restarts_rows_and_changes_nothing(tiny_folder):
    team = policies(tiny_folder, a={})
    sampling = Sampling(max_tokens=70)
    wide, tight = local_engine(team), local_engine(team, cache_gib=900 * 256 / 2**30)
    want = asyncio.run(chats(wide, "a", TEXTS, sampling, n=4, seed=3))
    assert said(asyncio.run(chats(tight, "a", TEXTS, sampling, n=4, seed=3))) == said(want)
    assert wide.counters.restarted == 0 < tight.counters.restarted


def test_adapters_of_one_base_speak_in_one_batch(tiny_folder):
    kinds = {"a": {"lora_r": 2}, "b": {"lora_r": 2}}
    team = policies(tiny_folder, **kinds)
    with torch.no_grad():
        for name, policy in team.items():
            for k, p in enumerate(policy.parameters()):
                p.copy_(
                    torch.randn(p.shape, generator=torch.Generator().manual_seed(k + len(name) * (name == "b"))) * 0.3
                )
    sampling = Sampling(max_tokens=12)
    apart = [asyncio.run(chats(local_engine(team), name, TEXTS, sampling)) for name in team]

    engine = local_engine(team)

    async def together():
        return await asyncio.gather(*(chats(engine, name, TEXTS, sampling) for name in team))

    mixed = asyncio.run(together())
    assert [said(c) for c in mixed] == [said(c) for c in apart]
    assert said(mixed[0]) != said(mixed[1])
    assert (
        max(abs(x - y) for m, a in zip(mixed, apart) for c, d in zip(m, a) for x, y in zip(c.logprobs, d.logprobs))
        < 1e-4
    )
    assert engine.counters.steps == 12  # one batch for both, not one after the other


def test_new_weights_forget_old_states(tiny_folder):
    policy = policies(tiny_folder, a={})["a"]
    engine = local_engine({"a": policy})
    sampling = Sampling(temperature=0.0, max_tokens=12)
    before = asyncio.run(chats(engine, "a", TEXTS, sampling))
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(0.8)
    policy.version += 1
    after = asyncio.run(chats(engine, "a", TEXTS, sampling))
    assert said(after) == said(asyncio.run(chats(local_engine({"a": policy}), "a", TEXTS, sampling))) != said(before)


@pytest.mark.parametrize("kind", [{}, {"lora_r": 4}], ids=["full", "adapter"])
def test_bfloat16_copy_follows_the_weights_within_its_gap(tiny_folder, kind):
    policy = policies(tiny_folder, a=kind)["a"]
    with torch.no_grad():
        for p in policy.parameters():
            if kind:  # a fresh adapter says nothing
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.1)
    engine, exact = local_engine({"a": policy}, dtype="bfloat16"), local_engine({"a": policy})
    sampling = Sampling(temperature=0.0, max_tokens=1)
    for _ in range(2):
        one = asyncio.run(chats(engine, "a", TEXTS, Sampling(max_tokens=4), seed=1))
        assert policy.model.dtype == torch.float32 and all(len(c.logprobs) == len(c.output_ids) for c in one)
        pairs = zip(asyncio.run(chats(engine, "a", TEXTS, sampling)), asyncio.run(chats(exact, "a", TEXTS, sampling)))
        assert sum(a.output_ids == b.output_ids for a, b in pairs) >= 4
        with torch.no_grad():
            for p in policy.parameters():
                p.mul_(0.7)
        policy.version += 1


def test_an_error_ends_every_waiting_call(tiny_folder, monkeypatch):
    from cothink.engines import continuous

    engine = local_engine(policies(tiny_folder, a={}), max_rows=2)

    def broken(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(continuous, "hidden", broken)

    async def all_of_them():
        calls = [chats(engine, "a", [t], Sampling(max_tokens=3)) for t in TEXTS]
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)

    assert [str(e) for e in asyncio.run(all_of_them())] == ["no memory"] * len(TEXTS)
    monkeypatch.undo()
    assert len(asyncio.run(chats(engine, "a", TEXTS, Sampling(max_tokens=3)))) == len(TEXTS)


def test_an_abandoned_call_leaves_the_batch(tiny_folder):
    engine = local_engine(policies(tiny_folder, a={}))

    async def some_leave():
        stay = asyncio.create_task(chats(engine, "a", TEXTS[:2], Sampling(max_tokens=30)))
        go = asyncio.create_task(chats(engine, "a", TEXTS[2:], Sampling(max_tokens=200)))
        await asyncio.sleep(0.02)
        go.cancel()
        stayed = await stay
        while engine._samplers["a"].load:  # the worker sees before its next pass that nobody waits
            await asyncio.sleep(0.001)
        return stayed

    engine.codec("a").stop_ids = ()  # nothing but its length ends an answer
    engine._stops["a"].ids = engine._stops["a"].ids[:0]
    stayed = asyncio.run(asyncio.wait_for(some_leave(), 60))
    assert [len(c.output_ids) for c in stayed] == [30, 30]
    assert engine.counters.generated - 60 < 4 * 200 / 2  # the four that left said no more once the others were done


def test_a_line_of_abandoned_calls_only_is_no_work(tiny_folder):
    """Given up between the look at the line and the pass: the pass has nobody to speak for."""
    engine = local_engine(policies(tiny_folder, a={}))
    sampler = engine._samplers["a"]

    async def given_up():
        future = asyncio.get_running_loop().create_future()
        sampler.submit(Request("a", (5, 6), Sampling(), 0, 4, [Answer()], engine._stops["a"], future=future))
        sampler._drop_abandoned = future.cancel  # the others leave just after the line was looked at
        return sampler.advance()

    assert asyncio.run(given_up()) == [] and sampler.load == 0


def test_the_cache_forgets_what_was_unused_for_longest():
    known = Prefixes()

    def states(a, b):
        return torch.arange(a, b, dtype=torch.float32).view(1, 1, -1, 1, 1).expand(1, 2, -1, 1, 1)

    asked = []

    def read(a, b):
        asked.append((a, b))
        return states(a, b)

    known.store((1, 2, 3, 4), read)
    known.store((1, 2, 9), read)
    known.store((1, 2, 3), read)
    assert asked == [(0, 4), (2, 3)] and known.size == 5
    found = torch.cat(known.find((1, 2, 3, 4, 5)), 2)[0, 0, :, 0, 0]
    assert found.tolist() == [0, 1, 2, 3]
    assert torch.cat(known.find((1, 2, 9, 9)), 2).shape[2] == 3 and known.find((7,)) == []
    known.find((1, 2, 3, 4))
    known.trim(4)  # (9) is the oldest leaf
    assert known.size <= 4 and torch.cat(known.find((1, 2, 9)), 2).shape[2] == 2
    known.trim(0)
    assert known.size == 0 and known.find((1, 2)) == []


def test_draw_follows_the_distribution_in_blocks():
    """A vocabulary of 600 in blocks of 256; worked by hand: weights 1, 2, 5 at tokens 0, 300 and 599."""
    logits = torch.full((1, 600), float("-inf"))
    logits[0, [0, 300, 599]] = torch.tensor([1.0, 2.0, 5.0]).log()
    dice = torch.tensor([0.0, 0.1249, 0.1251, 0.3749, 0.3751, 0.999999999999], dtype=torch.float64)
    tokens, logp = draw(logits, [Sampling()], torch.zeros(6, dtype=torch.long), dice)
    assert tokens.tolist() == [0, 0, 300, 300, 599, 599]
    assert logp.exp().tolist() == pytest.approx([0.125, 0.125, 0.25, 0.25, 0.625, 0.625])
    masked, logp = draw(logits, [Sampling()], torch.zeros(1, dtype=torch.long), dice[-1:], {0: torch.arange(600) < 400})
    assert masked.tolist() == [300] and logp.exp().item() == pytest.approx(2 / 3)
    cold, logp = draw(logits, [Sampling(temperature=0.0)], torch.zeros(1, dtype=torch.long), dice[:1])
    assert cold.tolist() == [599] and logp.tolist() == [0.0]
    topped, logp = draw(logits, [Sampling(top_k=2)], torch.zeros(1, dtype=torch.long), dice[:1])
    assert topped.tolist() == [300] and logp.exp().item() == pytest.approx(2 / 7)


@pytest.mark.parametrize(("margin", "want"), [(1e-9, torch.bfloat16), (1e9, torch.float32)])
def test_auto_takes_the_precision_that_is_faster_here(tiny_folder, monkeypatch, margin, want):
    monkeypatch.setattr(precision, "MARGIN", margin)
    policy = policies(tiny_folder, a={})["a"]
    engine = local_engine({"a": policy}, dtype="auto")
    assert engine._samplers["a"]._weights.model.dtype == want
    assert policy.coarse == (want == torch.bfloat16)


def test_the_memory_of_keys_and_values_is_counted_in_tokens(tiny_folder):
    """2 layers x keys and values x 2 heads x 8 numbers x 4 bytes = 256 bytes a token, also under bfloat16."""
    model = policies(tiny_folder, a={})["a"].model
    assert states(model) == (2, 2, 8)
    assert precision.cache_tokens(model, torch.float32, 256 * 1000 / 2**30, 4.0) == 1000
    assert precision.cache_tokens(model, torch.bfloat16, 256 * 1000 / 2**30, 4.0) == 1000
    assert precision.cache_tokens(model, torch.float32, None, 1e-3) == 2**30 // 1000 // 256


def test_packed_layers_give_what_plain_bfloat16_layers_give():
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor does not multiply bfloat16")
    torch.manual_seed(0)
    layer, other = torch.nn.Linear(96, 160), torch.nn.Linear(96, 160)
    x = torch.randn(7, 1, 96).bfloat16()
    with torch.inference_mode():
        packed = Packed(layer, torch.bfloat16)
        for now in (layer, other):
            packed.follow(now)
            want = torch.nn.functional.linear(x, now.weight.bfloat16(), now.bias.bfloat16())
            assert packed(x).dtype == torch.bfloat16 and torch.allclose(packed(x), want, atol=2e-2)
