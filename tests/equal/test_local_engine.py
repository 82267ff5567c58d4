"""The local engine says what the model says: same ids as greedy `generate`, same log-probs as the trainer."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest
import torch

from cothink.batch import pad
from cothink.engines.continuous import Continuous
from cothink.engines.local import engine as local_engine
from cothink.loading import load_policies
from cothink.parts import PolicyPart
from cothink.team import Job, play
from cothink.types import Message, PlayError, Role, Sample, Sampling, Task
from cothink.workflows import malt


def policies(folder, **kinds):
    return load_policies({name: PolicyPart(model=str(folder), **spec) for name, spec in kinds.items()}, str)


def ask(engine, policy, texts, sampling, n=1, seed=0):
    codec = engine.codec(policy)

    async def one(k, text):
        messages = [Message("user", text)]
        return await engine.generate(policy, messages, codec.start(messages), sampling, n, seed + k)

    async def everyone():
        return await asyncio.gather(*(one(k, t) for k, t in enumerate(texts)))

    return asyncio.run(everyone())


TEXTS = ["plan", "a much longer question that pads the others", "solve", "", "answer [FINISH] now"]


def test_greedy_ids_equal_generate(tiny_folder):
    team = policies(tiny_folder, a={})
    engine = local_engine(team)
    model, codec = team["a"].model, engine.codec("a")
    for text, (done,) in zip(TEXTS, ask(engine, "a", TEXTS, Sampling(temperature=0.0, max_tokens=24))):
        prompt = torch.tensor([codec.start([Message("user", text)])])
        want = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
        assert list(done.output_ids) == want[0, prompt.shape[1] :].tolist()
        assert done.finish_reason == ("stop" if done.output_ids[-1] in codec.stop_ids else "length")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_equal_the_trainers(tiny_folder, temperature):
    team = policies(tiny_folder, a={}, b={"lora_r": 2})
    engine = local_engine(team)
    sampling = Sampling(temperature=temperature, max_tokens=20)
    for name in team:
        done = [c for group in ask(engine, name, TEXTS, sampling, n=3) for c in group]
        rows = [
            Sample(
                name, "r", str(k), (*c.prompt_ids, *c.output_ids), (-1,) * len(c.prompt_ids) + (0,) * len(c.output_ids),
                (0.0,) * len(c.prompt_ids) + c.logprobs, (0.0,) * (len(c.prompt_ids) + len(c.output_ids)),
                temperature=temperature,
            )
            for k, c in enumerate(done)
        ]  # fmt: skip
        batch = pad(rows, [[0.0] * len(r.ids) for r in rows])
        logprobs, _ = team[name].logprobs(batch)
        trained = batch.turns >= 0
        assert trained.sum() > 100
        assert (logprobs - batch.logprobs)[trained].abs().max() < 1e-4


def test_a_row_does_not_depend_on_its_neighbours(tiny_folder):
    team = policies(tiny_folder, a={})
    sampling = Sampling(max_tokens=16)
    together = ask(local_engine(team), "a", TEXTS, sampling, n=2, seed=5)
    small = ask(local_engine(team, max_rows=3), "a", TEXTS, sampling, n=2, seed=5)
    alone = [ask(local_engine(team), "a", [t], sampling, n=2, seed=5 + k)[0] for k, t in enumerate(TEXTS)]
    ids = [[c.output_ids for c in group] for group in together]
    assert ids == [[c.output_ids for c in group] for group in small]
    assert ids == [[c.output_ids for c in group] for group in alone]
    assert together[0][0].output_ids != together[0][1].output_ids


def test_stop_string_ends_the_turn_and_stays(tiny_folder):
    team = policies(tiny_folder, a={})
    engine = local_engine(team)
    (plain,) = ask(engine, "a", ["plan"], Sampling(max_tokens=40), seed=3)[0]
    middle = plain.text[len(plain.text) // 2 : len(plain.text) // 2 + 2]
    assert middle.isascii() or middle  # any two characters will do
    (cut,) = ask(engine, "a", ["plan"], Sampling(max_tokens=40, stop=(middle,)), seed=3)[0]
    assert cut.finish_reason == "stop"
    assert cut.text == plain.text[: plain.text.index(middle) + len(middle)]
    assert cut.output_ids == plain.output_ids[: len(cut.output_ids)]
    assert len(cut.logprobs) == len(cut.output_ids)


def test_a_model_without_a_template_stops_at_the_next_speaker(tiny_folder):
    policy = policies(tiny_folder, a={})["a"]
    policy.tokenizer.chat_template = None
    engine = local_engine({"a": policy})
    codec = engine.codec("a")
    assert codec.stop_strings == ("\nUser:",)
    ids = policy.tokenizer.encode(" It is 5.\nUser: hello", add_special_tokens=False)
    stops = engine._stops["a"]
    maybe = stops.maybe(codec.stop_strings)
    cut = next(k for k in range(1, len(ids) + 1) if maybe[ids[k - 1]] and stops.cut(ids[:k], codec.stop_strings))
    assert policy.tokenizer.decode(ids[:cut]).endswith("\nUser:") and cut < len(ids)
    assert codec.decode(tuple(ids[:cut])) == " It is 5."


def test_top_k_and_top_p_renormalise(tiny_folder):
    team = policies(tiny_folder, a={})
    engine = local_engine(team)
    for group in ask(engine, "a", TEXTS, Sampling(max_tokens=8, top_k=1), n=2):
        assert all(lp == pytest.approx(0.0, abs=1e-6) for c in group for lp in c.logprobs)
    for group in ask(engine, "a", TEXTS, Sampling(max_tokens=8, top_p=1e-6), n=2):
        assert all(lp == pytest.approx(0.0, abs=1e-6) for c in group for lp in c.logprobs)


def test_prompt_without_room_is_an_error_of_its_episode(tiny_folder):
    engine = local_engine(policies(tiny_folder, a={}))
    with pytest.raises(PlayError, match="leaves no room in 256"):
        ask(engine, "a", ["plan " * 300], Sampling(max_tokens=4))


def test_which_rows_share_a_pass_does_not_depend_on_the_clock(tiny_folder, monkeypatch):
    """Episodes that wait for a place, and tasks of their own: all of them have asked before the next pass begins."""
    roles = {
        n: Role(n, "a", n, sampling=Sampling(max_tokens=40, stop=("a", "e")))
        for n in ("generator", "verifier", "refiner")
    }
    tasks = [Task(f"t{k}", f"{k} + {k}?", "1") for k in range(6)]
    workflow = partial(malt.run, branching=[2, 2, 1], prompts="words")
    model = policies(tiny_folder, a={})
    step, seen = Continuous._step, []

    def counted(self):
        seen.append((len(self._rows), len(self._waiting)))
        time.sleep(0.002)
        return step(self)

    async def at_once(function):
        return function()

    monkeypatch.setattr(Continuous, "_step", counted)
    found = []
    for patient in (True, False):  # the loop has all the time of a pass, or none of it
        if not patient:
            monkeypatch.setattr(asyncio, "to_thread", at_once)
        seen.clear()
        jobs = [Job(task, task.id, 1) for task in tasks]
        asyncio.run(play(jobs, workflow, roles, {"a": local_engine(model)}, concurrency=3))
        found.append(tuple(seen))
    assert found[0] == found[1] and len(found[0]) > 20
