"""The real vLLM beside the local engine, over the same weights."""

import asyncio
import json
import random
from dataclasses import replace

import numpy as np
import pytest
import teams
import torch

from cothink import checks
from cothink.engines import vllm
from cothink.types import Message, NoRoom, PlayError, Sampling

GAP = 1e-4  # float32 on both sides: measured 6e-6
HOT = Sampling(max_tokens=16)


@pytest.fixture(scope="module")
def team():
    """A bare base and two adapters of different rank, in vLLM and in the local engine."""
    made = teams.policies(base={}, a={"lora_r": 4}, b={"lora_r": 8})
    engine = vllm.engine(made, max_rows=64, cache_gib=0.5)
    yield made, engine, teams.beside(made)
    engine.close()


def gap(policy, said, temperature=1.0) -> float:
    """The largest distance of vLLM's log-probs from the trainer's."""
    return max(
        abs(a - b) for c in said for a, b in zip(c.logprobs, teams.logprobs(policy, c, temperature), strict=True)
    )


@pytest.mark.parametrize("name", ["base", "a", "b"])
def test_it_keeps_the_rules_of_engines(team, name):
    checks.check_engine(team[1], name)


@pytest.mark.parametrize("name", ["base", "a", "b"])
def test_greedy_answers_are_those_of_the_local_engine(team, name):
    _, engine, local = team
    mine, theirs = teams.says(engine, name), teams.says(local, name)
    assert mine == theirs  # text, ids, log-probs (0, by our definition), reason and version


def test_the_base_and_two_adapters_say_different_things_at_the_same_time(team):
    made, engine, local = team

    async def together(one):
        codec = one.codec("base")
        chat = [Message("user", teams.QUESTIONS[0])]
        ask = (one.generate(name, chat, codec.start(chat), teams.GREEDY, 1, 0) for name in ("base", "a", "b"))
        return [found[0].output_ids for found in await asyncio.gather(*ask)]

    assert asyncio.run(together(engine)) == asyncio.run(together(local))
    spoken = {name: [c.output_ids for c in teams.says(engine, name)] for name in made}
    assert spoken["base"] != spoken["a"] != spoken["b"] != spoken["base"]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", ["base", "a", "b"])
def test_logprobs_are_those_of_the_trainer(team, name, temperature):
    made, engine, _ = team
    said = teams.says(engine, name, replace(HOT, temperature=temperature), n=3)
    assert gap(made[name], said, temperature) < GAP
    assert len({c.output_ids for c in said[:3]}) > 1


def test_logprobs_are_those_of_the_cut_distribution(team):
    made, engine, _ = team
    how = Sampling(temperature=0.8, top_k=5, top_p=0.7, max_tokens=8)
    from cothink.engines.sampler import draw

    for said in teams.says(engine, "a", how, n=2):
        ids = torch.tensor([[*said.prompt_ids, *said.output_ids]])
        with torch.no_grad():
            logits = made["a"].activate()(input_ids=ids).logits[0, len(said.prompt_ids) - 1 : -1]
        for row, token, value in zip(logits, said.output_ids, said.logprobs, strict=True):
            seen = {}  # every token the local engine could draw here, with its log-prob
            for dice in torch.linspace(0, 0.999, 400):
                drawn, logp = draw(row[None], [how], torch.tensor([0]), dice[None])
                seen[int(drawn)] = float(logp)
            assert value == pytest.approx(seen[token], abs=GAP)


def test_an_answer_depends_on_its_seed_and_place_alone(team):
    _, engine, _ = team
    one, two = teams.says(engine, "a", HOT, n=3, seed=1), teams.says(engine, "a", HOT, n=1, seed=1)
    assert [c.output_ids for c in one[::3]] == [c.output_ids for c in two]
    assert [c.output_ids for c in two] != [c.output_ids for c in teams.says(engine, "a", HOT, n=1, seed=2)]


@pytest.mark.parametrize("stop", ["boxed", "{4", "x"])
def test_a_stop_string_ends_the_text_where_it_ends_the_local_engines(team, stop):
    _, engine, local = team
    how = replace(teams.GREEDY, stop=(stop,), max_tokens=16)
    mine, theirs = teams.says(engine, "base", how), teams.says(local, "base", how)
    assert mine == theirs
    assert any(c.text.endswith(stop) for c in mine)


def test_a_schema_limits_what_is_sampled_and_its_logprobs_are_those_among_the_allowed(team):
    made, engine, _ = team
    schema = json.dumps(
        {
            "type": "object",
            "properties": {"go": {"type": "string", "enum": ["on", "stop"]}},
            "required": ["go"],
            "additionalProperties": False,
        }
    )
    said = teams.says(engine, "b", Sampling(max_tokens=40, schema=schema), n=2)
    assert {json.loads(c.text)["go"] for c in said} <= {"on", "stop"}
    from cothink.grammar import replay

    for c in said:
        masks = replay(made["b"].grammars[schema], c.output_ids)
        ids = torch.tensor([[*c.prompt_ids, *c.output_ids]])
        with torch.no_grad():
            logits = made["b"].activate()(input_ids=ids).logits[0, len(c.prompt_ids) - 1 : -1]
        masked = logits.masked_fill(~torch.from_numpy(np.stack(masks)), float("-inf")).log_softmax(-1)
        wanted = [float(row[token]) for row, token in zip(masked, c.output_ids)]
        assert list(c.logprobs) == pytest.approx(wanted, abs=GAP)


def test_new_weights_of_one_policy_change_its_answers_and_nobody_elses(team):
    made, engine, local = team
    before = {name: teams.says(engine, name) for name in made}
    teams.shake(made["a"], seed=9)
    engine.load("a", None, made["a"].version)
    after = {name: teams.says(engine, name) for name in made}
    assert after == {name: teams.says(local, name) for name in made}
    assert [c.output_ids for c in after["a"]] != [c.output_ids for c in before["a"]]
    assert after["b"] == before["b"] and after["base"] == before["base"]
    assert {c.version for c in after["a"]} == {made["a"].version}
    assert gap(made["a"], teams.says(engine, "a", HOT, n=2)) < GAP  # nothing cached from the old weights is used


def test_a_version_nobody_announced_is_followed(team):
    made, engine, local = team
    teams.shake(made["b"], seed=10)  # as a resumed run does, which reads a checkpoint into the policy
    assert teams.says(engine, "b") == teams.says(local, "b")


def test_a_prompt_that_fills_the_context_is_an_error(team):
    _, engine, _ = team
    with pytest.raises(NoRoom, match="leaves no room in 1024"):
        asyncio.run(engine.generate("a", [], (5,) * 1024, HOT, 1, 0))


def test_a_deadline_takes_its_answer_out_of_vllm_and_leaves_the_others(team):
    _, engine, _ = team
    long = Sampling(max_tokens=900, temperature=3.0)

    async def some():
        chat = [Message("user", "1 + 1?")]
        ids = engine.codec("a").start(chat)
        late = asyncio.create_task(engine.generate("a", chat, ids, long, 2, 0))
        kept = asyncio.create_task(engine.generate("a", chat, ids, HOT, 1, 0))
        await asyncio.sleep(0.05)
        late.cancel()
        return await kept

    assert len(asyncio.run(some())) == 1
    teams.says(engine, "a")
    assert not engine._backend._engine.has_unfinished_requests()


def test_more_prompt_tokens_than_one_pass_takes(team):
    made, engine, _ = team

    async def crowd():
        ids = engine.codec("a").start([Message("user", "Count. " * 60)])
        return await asyncio.gather(*(engine.generate("a", [], ids, HOT, 1, k) for k in range(60)))

    said = [group[0] for group in asyncio.run(crowd())]
    assert sum(len(c.prompt_ids) for c in said) > 3000
    assert gap(made["a"], said[:4]) < GAP


def test_full_weights_beside_adapters_cannot_change(team):
    with pytest.raises(PlayError, match="policy base: its full weights changed"):
        team[1].load("base", None, 1)


# Closing an engine ends vLLM's state in the whole process: nothing below may use `team`.


def test_full_weights_are_replaced_whole():
    made = teams.policies(only={})
    teams.shake(made["only"], seed=1, size=0.02)  # weights other than those of the model's folder from the beginning
    engine, local = vllm.engine(made, max_rows=16, cache_gib=0.25), teams.beside(made)
    try:
        first = teams.says(engine, "only")
        assert first == teams.says(local, "only")
        teams.shake(made["only"], seed=2, size=0.02)
        engine.load("only", None, made["only"].version)
        second = teams.says(engine, "only")
        assert second == teams.says(local, "only")
        assert [c.output_ids for c in first] != [c.output_ids for c in second]
        assert gap(made["only"], teams.says(engine, "only", HOT, n=2)) < GAP
    finally:
        engine.close()


def test_making_an_engine_leaves_the_trainers_random_numbers_alone():
    made = teams.policies(only={"lora_r": 4})
    torch.manual_seed(3)
    random.seed(3)
    wanted = float(torch.rand(())), random.random()
    torch.manual_seed(3)
    random.seed(3)
    engine = vllm.engine(made, max_rows=4, cache_gib=0.25)
    assert (float(torch.rand(())), random.random()) == wanted
    engine.close()
