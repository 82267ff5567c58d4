"""What is said to vLLM and made of its answers, against a stand-in of a few lines; tests/vllm_real has the real one."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import fake_vllm
import pytest
import torch

from cothink.engines import local, vllm, vllm_core
from cothink.engines.requests import Stops
from cothink.loading import load_policies
from cothink.parts import PolicyPart
from cothink.recipe import Recipe
from cothink.resolve import RecipeError
from cothink.types import Message, NoRoom, PlayError, Sampling

CHAT = [Message("user", "plan?")]
GREEDY = Sampling(temperature=0.0, max_tokens=6)


def policies(folder: Path, **parts: dict) -> dict:
    found = load_policies({n: PolicyPart(model="tiny", **p) for n, p in parts.items()}, lambda name: folder)
    for k, policy in enumerate(p for p in found.values() if p.adapter is not None):
        shake(policy, k)
    return found


def shake(policy, seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.5 * torch.randn(weight.shape, generator=dice))
    policy.version += 1


def made(found: dict, **options):
    with fake_vllm.installed():
        return vllm.engine(found, **options)


def says(engine, policy: str, how: Sampling = GREEDY, n: int = 1, seed: int = 1):
    ids = engine.codec(policy).start(CHAT)
    return asyncio.run(engine.generate(policy, CHAT, ids, how, n, seed))


@pytest.fixture(scope="module")
def codec(tiny_folder):
    return local.codec_of(policies(tiny_folder, only={})["only"])


def test_settings_carry_every_setting_of_a_role(codec):
    how = Sampling(temperature=0.5, top_p=0.9, top_k=7, max_tokens=99, stop=("END",))
    assert vllm_core.settings(how, codec, 40, 11) == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "max_tokens": 40,
        "seed": 11,
        "stop": ["END"],
        "stop_token_ids": list(codec.stop_ids),
        "include_stop_str_in_output": True,
        "logprobs": 0,
    }


def test_each_place_has_a_seed_of_its_own_that_fits_63_bits():
    seeds = {vllm_core.place_seed(seed, place) for seed in (0, 1, 2**62) for place in range(50)}
    assert len(seeds) == 150 and all(0 <= s < 2**63 for s in seeds)
    assert vllm_core.place_seed(3, 1) == vllm_core.place_seed(3, 1)


def ended(codec, ids, reason="stop", logprobs=None, how=GREEDY):
    answer = vllm_core.Answer(tuple(ids), logprobs or (-0.5,) * len(ids), reason)
    return vllm_core.completion(answer, (1, 2), how, codec, Stops(codec, 300), 4)


def test_a_completion_is_our_own_decoding_of_the_ids(codec):
    text = codec.tokenizer("plan solve", add_special_tokens=False)["input_ids"]
    end = codec.stop_ids[0]
    hot = Sampling(max_tokens=9)
    said = ended(codec, [*text, end], how=hot)
    assert (said.text, said.output_ids, said.prompt_ids) == ("plan solve", (*text, end), (1, 2))
    assert (said.logprobs, said.finish_reason, said.version) == ((-0.5,) * (len(text) + 1), "stop", 4)
    assert ended(codec, text, "length", how=hot).finish_reason == "length"


def test_a_text_ends_with_its_first_stop_string_and_keeps_all_ids(codec):
    ids = codec.tokenizer("plan. solve", add_special_tokens=False)["input_ids"]
    said = ended(codec, ids, how=Sampling(stop=("l", ".")))
    assert said.text == "pl" and said.output_ids == tuple(ids)


def test_a_greedy_answer_is_certain(codec):
    assert ended(codec, [5, 6], "length").logprobs == (0.0, 0.0)
    assert ended(codec, [5, 6], "length", how=Sampling(temperature=0.1)).logprobs == (-0.5, -0.5)


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_an_answer_that_was_not_finished_is_an_error(codec, reason):
    with pytest.raises(PlayError, match="vLLM ended an answer with"):
        ended(codec, [5], reason)


def test_an_answer_without_its_logprobs_is_an_error(codec):
    with pytest.raises(PlayError, match="2 token ids and 1 log-probs"):
        ended(codec, [5, 6], "length", (-0.1,))


def test_a_schema_carries_the_layout_of_our_grammar():
    found = vllm_core.schema_of('{"type": "object"}')
    layout = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    assert found == {"type": "object", "x-guidance": layout}


@pytest.mark.parametrize(
    ("needed", "asked", "rank"), [(4, None, 8), (8, None, 8), (9, None, 16), (4, 32, 32), (1, None, 1)]
)
def test_ranks_are_those_vllm_makes_room_for(needed, asked, rank):
    assert vllm_core.lora_rank(needed, asked) == rank


def test_ranks_that_vllm_does_not_know_are_errors():
    with pytest.raises(PlayError, match=r"max_lora_rank=12; vLLM takes one of 1, 8"):
        vllm_core.lora_rank(4, 12)
    with pytest.raises(PlayError, match="rank 600 is more than vLLM holds"):
        vllm_core.lora_rank(600, None)


def test_vllm_is_started_with_room_for_one_adapter_more_than_there_are(tiny_folder):
    engine = made(policies(tiny_folder, base={}, a={"lora_r": 4}, b={"lora_r": 9}), max_rows=3, cache_gib=0.5)
    given = vars(engine._backend._engine.given)
    assert (given["max_loras"], given["max_lora_rank"], given["enable_lora"]) == (3, 16, True)
    assert (given["max_num_seqs"], given["kv_cache_memory_bytes"], given["dtype"]) == (3, 2**29, "float32")
    assert (given["logprobs_mode"], given["enable_prefix_caching"]) == ("processed_logprobs", True)
    assert given["enforce_eager"] is True and given["model"] == str(tiny_folder)


def test_the_base_and_its_adapters_say_what_the_local_engine_says(tiny_folder):
    found = policies(tiny_folder, base={}, a={"lora_r": 4}, b={"lora_r": 4})
    engine, beside = made(found), local.engine(found)
    spoken = {name: says(engine, name) for name in found}
    assert spoken == {name: says(beside, name) for name in found}
    assert len({said[0].output_ids for said in spoken.values()}) == 3


def test_load_replaces_one_adapter_and_removes_the_old_folder(tiny_folder):
    found = policies(tiny_folder, a={"lora_r": 4}, b={"lora_r": 4})
    engine, beside = made(found), local.engine(found)
    before = says(engine, "a"), says(engine, "b")
    shake(found["a"], 7)
    engine.load("a", None, found["a"].version)
    assert says(engine, "a") == says(beside, "a") != before[0]
    assert says(engine, "b") == before[1]
    root = engine._handover.root
    assert sorted(p.name for p in root.iterdir()) == ["a.3", "b.2"]  # a.1 is gone
    assert sorted(engine._backend._engine.adapters.values()) == [f"{root.name}-a-3", f"{root.name}-b-2"]
    assert stat.S_IMODE((root / "a.3" / "adapter_model.safetensors").stat().st_mode) == 0o644


def test_full_weights_are_read_anew_and_the_cache_is_emptied(tiny_folder):
    found = policies(tiny_folder, only={})
    shake(found["only"], 1)  # before there is an engine: it does not begin with the weights of the model's folder
    engine, beside = made(found), local.engine(found)
    first = says(engine, "only")
    assert first == says(beside, "only")
    shake(found["only"], 2)
    engine.load("only", None, found["only"].version)
    assert says(engine, "only") == says(beside, "only") != first
    assert engine._backend._engine.resets == 1


def test_a_version_that_nobody_announced_is_loaded(tiny_folder):
    found = policies(tiny_folder, a={"lora_r": 4})
    engine, beside = made(found), local.engine(found)
    shake(found["a"], 3)
    assert says(engine, "a") == says(beside, "a")
    assert says(engine, "a")[0].version == found["a"].version == 2


def test_policies_that_one_vllm_cannot_hold_are_refused(tiny_folder):
    two = policies(tiny_folder, a={}, b={})
    with pytest.raises(PlayError, match="one set of full weights, and a, b have one each"):
        made(two)
    mixed = policies(tiny_folder, a={"lora_r": 4}, b={"lora_r": 4, "dtype": "bfloat16"})
    with pytest.raises(PlayError, match="engine vllm holds one model"):
        made(mixed)
    beside = policies(tiny_folder, base={}, a={"lora_r": 4})
    with pytest.raises(PlayError, match="policy base: its full weights changed"):
        made(beside).load("base", None, 1)
    shake(beside["base"], 1)
    with pytest.raises(PlayError, match="policy base: its full weights have been trained"):
        made(beside)


def test_a_coarser_precision_is_told_to_the_trainer(tiny_folder):
    found = policies(tiny_folder, a={"lora_r": 4})
    made(found)
    assert not found["a"].coarse
    engine = made(found, dtype="bfloat16")
    assert found["a"].coarse and engine._backend._engine.given.dtype == "bfloat16"


def test_one_request_that_vllm_refuses_does_not_harm_the_others(tiny_folder):
    engine = made(policies(tiny_folder, a={"lora_r": 4}))
    ids = engine.codec("a").start(CHAT)

    async def both():
        ask = (engine.generate("a", CHAT, ids, Sampling(max_tokens=m), 1, 0) for m in (13, 5))
        return await asyncio.gather(*ask, return_exceptions=True)

    refused, fine = asyncio.run(both())
    assert isinstance(refused, ValueError) and "thirteen" in str(refused)
    assert len(fine[0].output_ids) <= 5


def test_who_stops_waiting_leaves_vllm(tiny_folder):
    engine = made(policies(tiny_folder, a={"lora_r": 4}))
    ids = engine.codec("a").start(CHAT)

    async def leave():
        late = asyncio.create_task(engine.generate("a", CHAT, ids, Sampling(max_tokens=200, temperature=9.0), 2, 0))
        await asyncio.sleep(0.02)
        late.cancel()
        return await engine.generate("a", CHAT, ids, GREEDY, 1, 0)

    assert len(asyncio.run(leave())) == 1
    says(engine, "a")
    engine.forget()
    assert not engine._backend._engine._running


def test_a_prompt_without_room_is_an_error(tiny_folder):
    engine = made(policies(tiny_folder, a={"lora_r": 4}), max_model_len=20)
    with pytest.raises(NoRoom, match="a prompt of 20 tokens leaves no room in 20"):
        asyncio.run(engine.generate("a", CHAT, (5,) * 20, GREEDY, 1, 0))
    said = asyncio.run(engine.generate("a", CHAT, (5,) * 18, Sampling(temperature=9.0), 1, 0))
    assert len(said[0].output_ids) <= 2


def test_an_answer_of_a_schema_brings_the_trainers_grammar(tiny_folder):
    pytest.importorskip("llguidance")
    found = policies(tiny_folder, a={"lora_r": 4})
    engine = made(found)
    schema = json.dumps({"type": "object"})
    with pytest.raises(PlayError, match="vLLM followed another grammar than ours"):  # the stand-in follows none
        says(engine, "a", Sampling(max_tokens=4, schema=schema))
    asked = engine._backend._engine.requests[-1].structured_outputs.json
    assert asked["x-guidance"]["key_separator"] == ": " and schema in found["a"].grammars


def test_without_vllm_the_message_says_what_to_install(tiny_folder):
    with pytest.raises(PlayError, match=r"pip install 'cothink\[vllm\]'"):
        vllm.engine(policies(tiny_folder, a={"lora_r": 4}))


RECIPE = {
    "name": "r",
    "team": {"workflow": "rema", "roles": {"meta": {"policy": "a"}, "reasoning": {"policy": "b"}}},
    "policies": {"a": {"model": "builtin:tiny", "lora_r": 4}, "b": {"model": "builtin:tiny", "lora_r": 4}},
    "tasks": {"test": {"name": "wordsums", "split": "test"}},
    "engine": {"name": "vllm"},
    "stages": [{"kind": "evaluate", "on": "test"}],
}
TWO_MODELS = {"a": {"model": "builtin:tiny", "lora_r": 4}, "b": {"model": "smollm2", "lora_r": 4}}
WHOLE = {"a": {"model": "builtin:tiny"}, "b": {"model": "builtin:tiny", "lora_r": 4}}
TWICE = {"a": {"model": "builtin:tiny"}, "b": {"model": "builtin:tiny"}}
HERE = {"name": "vllm", "server": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"policies": TWO_MODELS}, "policies: engine vllm holds one model, not builtin:tiny in float32 and smollm2"),
        ({"policies": WHOLE}, "policies.a: engine vllm holds one set of full weights"),
        ({"policies": TWICE}, "policies.b: engine vllm holds one set of full weights"),
        ({"engine": {"name": "vllm", "max_row": 4}}, "did you mean 'max_rows'"),
        ({"engine": {"name": "vllm", "retries": 4}}, "engine.retries: is of requests to a server"),
        ({"engine": {**HERE, "max_rows": 4}}, "engine.max_rows: is the server's to know"),
        ({"engine": {**HERE, "server": "here:80"}}, "engine.server: 'here:80' is no address"),
        ({"engine": HERE, "policies": TWICE}, "policies.a: a vLLM server takes new adapters, not new full weights"),
    ],
)
def test_check_refuses_what_vllm_cannot_hold_or_be_told(change, said):
    with pytest.raises(RecipeError) as error:
        Recipe.load({**RECIPE, **change})
    assert said in str(error.value)


def test_check_accepts_adapters_a_frozen_base_and_a_single_set_of_full_weights():
    Recipe.load(RECIPE)
    Recipe.load({**RECIPE, "engine": HERE})
    roles = {"meta": {"policy": "a", "trainable": False}, "reasoning": {"policy": "b"}}
    Recipe.load({**RECIPE, "policies": WHOLE, "team": {"workflow": "rema", "roles": roles}})
    shared = {"meta": {"policy": "a"}, "reasoning": {"policy": "a"}}
    only = {"a": {"model": "builtin:tiny"}}
    Recipe.load({**RECIPE, "policies": only, "team": {"workflow": "rema", "roles": shared}})
    Recipe.load({**RECIPE, "policies": TWICE, "engine": "local"})
