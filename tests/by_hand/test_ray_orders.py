"""The Ray engine over a stand-in of Ray: orders in their sequence, weights by version, and what a recipe may ask."""

import asyncio
import json
import sys

import fake_ray
import fake_vllm
import pytest
import torch

from cothink.engines import local, ray_worker
from cothink.engines import ray as pools
from cothink.loading import load_policies
from cothink.parts import PolicyPart
from cothink.recipe import Recipe
from cothink.resolve import RecipeError
from cothink.types import Message, PlayError, Sampling

GREEDY = Sampling(temperature=0.0, max_tokens=10)
CHATS = [[Message("user", text)] for text in ("plan", "solve 1 + 1", "a much longer question", "answer")]


def policies(folder, **kinds):
    found = load_policies({name: PolicyPart(model=str(folder), **spec) for name, spec in kinds.items()}, str)
    for k, policy in enumerate(found.values()):
        shake(policy, k)
    return found


def shake(policy, seed):
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=dice))
    policy.version += 1


def says(engine, policy, how=GREEDY):
    async def asked():
        codec = engine.codec(policy)
        return await asyncio.gather(
            *(engine.generate(policy, c, codec.start(c), how, 2, k) for k, c in enumerate(CHATS))
        )

    return [(c.output_ids, c.version) for group in asyncio.run(asked()) for c in group]


@pytest.fixture
def house():
    """Ray's stand-in, and the actors that it makes."""
    with fake_ray.installed() as ray:
        fake_ray.Actor.made.clear()
        yield ray


def test_what_is_asked_of_ray(house, tiny_folder, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    pools.engine(policies(tiny_folder, a={"lora_r": 2}), workers=3, cpus=2, gpus=0.5, max_rows=7)
    assert house.given == {
        "address": "local", "num_cpus": 3, "include_dashboard": False, "namespace": "cothink-here",
        "log_to_driver": False, "logging_level": 40,
    }  # fmt: skip
    assert [actor.options for actor in fake_ray.Actor.made] == [
        {"max_concurrency": 1 << 14, "num_cpus": 0, "num_gpus": 0.5}
    ] * 3
    assert fake_ray.Actor.made[0].inside._engine._samplers["a"]._max == 7


def test_a_running_cluster_is_joined_and_its_processors_are_counted(house, tiny_folder, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    pools.engine(policies(tiny_folder, a={"lora_r": 2}), workers=1, cpus=2)
    assert house.given == {"address": "10.0.0.1:6379", "log_to_driver": False, "logging_level": 40}
    assert fake_ray.Actor.made[0].options["num_cpus"] == 2
    house.given.clear()
    pools.engine(policies(tiny_folder, a={"lora_r": 2}), workers=1, address="auto")
    assert house.given["address"] == "auto"


def test_without_ray_the_message_says_what_to_install(tiny_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PlayError, match=r"pip install 'cothink\[ray\]'"):
        pools.engine(policies(tiny_folder, a={"lora_r": 2}))


def test_orders_are_followed_in_their_sequence_and_requests_wait_for_theirs(tiny_folder):
    found = policies(tiny_folder, a={}, b={"lora_r": 2})
    first, made = ray_worker.parcel(found["a"], 5), ray_worker.bundle(found)
    first = ray_worker.Parcel("a", 5, None, {k: w.copy() for k, w in first.weights.items()})
    shake(found["a"], 3)
    second = ray_worker.parcel(found["a"], 6)
    prompt = (1, 2, 3)

    async def scene():
        worker = ray_worker.Speaker()
        assert await worker.start(made, "local", 1, {}, 0) == {"a": False, "b": False}
        asked = asyncio.ensure_future(worker.generate(3, "a", prompt, GREEDY, 1, 0))
        await worker.order(3, None)
        await worker.order(2, second)
        await asyncio.sleep(0.05)
        assert not asked.done()
        await worker.order(1, first)
        return (await asked)[0], (await worker.generate(3, "b", prompt, GREEDY, 1, 0))[0]

    here = local.engine(found)
    a, b = asyncio.run(scene())
    (want,) = asyncio.run(here.generate("a", [], prompt, GREEDY, 1, 0))
    assert (a.output_ids, a.version) == (want.output_ids, 6)
    (want,) = asyncio.run(here.generate("b", [], prompt, GREEDY, 1, 0))
    assert (b.output_ids, b.version) == (want.output_ids, 1)


def test_an_order_that_comes_before_the_start_waits_for_it(tiny_folder):
    found = policies(tiny_folder, a={})
    made, old = ray_worker.bundle(found), ray_worker.parcel(found["a"], 1)
    old = ray_worker.Parcel("a", 1, None, {k: w.copy() for k, w in old.weights.items()})
    shake(found["a"], 3)

    async def scene():
        worker = ray_worker.Speaker()
        await worker.order(8, ray_worker.parcel(found["a"], 2))
        await worker.start(made, "local", 1, {}, 7, old)
        return await worker.generate(8, "a", (1, 2, 3), GREEDY, 1, 0)

    (said,) = asyncio.run(scene())
    (want,) = asyncio.run(local.engine(found).generate("a", [], (1, 2, 3), GREEDY, 1, 0))
    assert (said.output_ids, said.version) == (want.output_ids, 2)


def test_an_order_that_cannot_be_followed_is_told_to_whoever_asks(tiny_folder):
    found = policies(tiny_folder, a={})
    wrong = ray_worker.Parcel("a", 2, None, {"other": b""})

    async def scene():
        worker = ray_worker.Speaker()
        await worker.start(ray_worker.bundle(found), "local", 1, {}, 0)
        await worker.order(1, wrong)
        await worker.generate(1, "a", (1, 2, 3), GREEDY, 1, 0)

    with pytest.raises(RuntimeError, match="policy a: the worker's weights have other names"):
        asyncio.run(scene())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_arrive_bit_for_bit(tiny_folder, dtype):
    found = policies(tiny_folder, a={"lora_r": 2}, b={})
    for policy in found.values():
        policy.model.to(getattr(torch, dtype))
    made = ray_worker.bundle(found)
    there = ray_worker._opened(made, "local")
    for name, policy in found.items():
        shake(policy, 5)
        ray_worker._fill(there[name], ray_worker.parcel(policy, 9))
        assert there[name]._optimizer is None and there[name].tokenizer.get_vocab() == policy.tokenizer.get_vocab()
        for mine, theirs in zip(
            there[name].model.state_dict().values(), policy.model.state_dict().values(), strict=True
        ):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


def test_an_adapter_of_another_rank_takes_its_place(house, tiny_folder):
    found = policies(tiny_folder, a={"lora_r": 2}, b={"lora_r": 2})
    engine, other = pools.engine(found, workers=2), says(local.engine(found), "b")
    from cothink.policy import lora_config

    found["a"].replace_adapter(lora_config(PolicyPart(model="tiny", lora_r=6)))  # as dpo does when it stacks adapters
    shake(found["a"], 4)
    engine.load("a", None, found["a"].version)
    assert says(engine, "a") == says(local.engine(found), "a")
    assert says(engine, "b") == other


def test_every_worker_answers_by_the_newest_weights_and_a_new_one_begins_with_them(house, tiny_folder):
    found = policies(tiny_folder, a={}, b={"lora_r": 2})
    engine, here, lines = pools.engine(found, workers=2), local.engine(found), []
    engine.say = lines.append
    first = says(engine, "a")
    assert first == says(here, "a")
    shake(found["a"], 7)
    engine.load("a", None, found["a"].version)
    second = says(engine, "a")
    assert second == says(here, "a") and second != first
    shake(found["b"], 8)
    engine.load("b", None, found["b"].version)
    fake_ray.Actor.made[0].end()
    assert [says(engine, name) for name in found] == [says(here, name) for name in found]
    assert len(fake_ray.Actor.made) == 3 and lines[0].startswith(
        "engine ray: worker 1 of 2 has ended (pid 4, it is dead.)"
    )
    assert fake_ray.Actor.made[2].inside._versions == {"a": 2, "b": 2}
    assert engine.figures() == {"engine/workers_lost": 1.0, "engine/asked_again": 2.0, "engine/staleness": 0.0}
    assert engine.figures()["engine/workers_lost"] == 0.0


def test_answers_by_other_weights_than_asked_for_are_refused_and_age_is_counted(house, tiny_folder):
    found = policies(tiny_folder, a={})
    engine = pools.engine(found, workers=1)
    (actor,) = fake_ray.Actor.made
    actor.inside._versions["a"] = 0
    with pytest.raises(PlayError, match="policy a: a worker answered with weights other than those of version 1"):
        says(engine, "a")
    actor.inside._versions["a"] = 1

    async def overtaken():
        asked = asyncio.ensure_future(engine.generate("a", [], (1, 2), GREEDY, 1, 0))
        await asyncio.sleep(0)
        found["a"].version += 2  # the trainer went on while a worker was speaking
        return await asked

    assert asyncio.run(overtaken())[0].version == 1
    assert engine.figures()["engine/staleness"] == 2.0


def test_forgetting_reaches_the_workers(house, tiny_folder):
    engine = pools.engine(policies(tiny_folder, a={}), workers=2)
    says(engine, "a")
    kept = [actor.inside._engine._samplers["a"]._known["a"] for actor in fake_ray.Actor.made]
    assert all(known.size for known in kept)
    engine.forget()
    engine.settle()
    assert not any(known.size for known in kept)


@pytest.mark.parametrize("kinds", [{"a": {"lora_r": 4}, "b": {"lora_r": 2}}, {"a": {}}], ids=["adapters", "whole"])
def test_workers_may_have_a_vllm_each(house, tiny_folder, kinds):
    """The stand-ins of both: what vLLM is asked and given goes through the pool as it goes without one."""
    found = policies(tiny_folder, **kinds)
    with fake_vllm.installed():
        engine = pools.engine(found, workers=2, inner="vllm", max_rows=8)
        assert fake_ray.Actor.made[0].inside._engine._backend._engine.given.max_num_seqs == 8
        here = local.engine(found)
        before = {name: says(engine, name) for name in found}
        assert before == {name: says(here, name) for name in found}
        shake(found["a"], 9)
        engine.load("a", None, found["a"].version)
        after = {name: says(engine, name) for name in found}
        assert after == {name: says(here, name) for name in found} and after["a"] != before["a"]
        fake_ray.Actor.made[1].end()
        engine.say = lambda line: None
        assert says(engine, "a") == after["a"]


def test_a_schema_of_a_vllm_inside_has_vllms_grammar(house, tiny_folder):
    pytest.importorskip("llguidance")
    found = policies(tiny_folder, a={"lora_r": 4})
    with fake_vllm.installed():
        engine = pools.engine(found, workers=1, inner="vllm")
    schema = json.dumps({"type": "object"})
    engine.grammar("a", schema)
    kept = found["a"].grammars[schema]
    engine.grammar("a", schema)
    assert found["a"].grammars[schema] is kept and kept._more_ends == []


RECIPE = {
    "name": "r",
    "team": {"workflow": "rema", "roles": {"meta": {"policy": "a"}, "reasoning": {"policy": "b"}}},
    "policies": {"a": {"model": "builtin:tiny"}, "b": {"model": "builtin:tiny"}},
    "tasks": {"test": {"name": "wordsums", "split": "test"}},
    "stages": [{"kind": "evaluate", "on": "test"}],
}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 0}, "engine.workers: 0 is less than 1"),
        ({"cpus": -1}, "engine.cpus: -1.0 is less than 0"),
        ({"workers": "many"}, "engine.workers: 'many' is not valid"),
        ({"inner": "vlm"}, "should be 'local' or 'vllm' [E01]; did you mean 'vllm'?"),
        ({"worker": 2}, "unknown option of engines ray and local 'worker' [E01]; did you mean 'workers'?"),
        ({"max_row": 2}, "did you mean 'max_rows'?"),
        ({"max_rows": "all"}, "engine.max_rows: 'all' is not valid"),
        ({"enforce_eager": True}, "engine.enforce_eager: unknown option of engines ray and local"),
        ({"inner": "vllm"}, "policies.b: engine vllm holds one set of full weights"),
        ({"inner": "vllm", "timeout": 3}, "engine.timeout: is of requests to a server"),
        ({"inner": "vllm", "server": "http://h:1"}, "engine.server: workers of a pool have their own vLLM each"),
    ],
)  # fmt: skip
def test_check_refuses_what_a_pool_cannot_be_told(options, said):
    with pytest.raises(RecipeError) as error:
        Recipe.load({**RECIPE, "engine": {"name": "ray", **options}})
    assert said in str(error.value)


def test_check_accepts_a_pool_with_the_options_of_its_inner_engine():
    Recipe.load({**RECIPE, "engine": "ray"})
    Recipe.load({**RECIPE, "engine": {"name": "ray", "workers": 8, "dtype": "bfloat16", "cache_gib": 1}})
    adapters = {name: {**part, "lora_r": 4} for name, part in RECIPE["policies"].items()}
    engine = {"name": "ray", "inner": "vllm", "gpus": 1, "max_lora_rank": 16}
    Recipe.load({**RECIPE, "policies": adapters, "engine": engine})
