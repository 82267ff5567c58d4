"""Causal influence on the built-in model: prompts without one message, and what that does to the next turn (6.11)."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch

import cothink
from cothink.session import assemble
from cothink.stages import causal
from cothink.stages.playing import play_tasks


def recipe(tmp_path, turns, **stage):
    prompts = ("Plan.", "Follow the plan.") if turns == 1 else ("Guide.", "Follow.")
    seats = zip(("meta", "reasoning"), prompts)
    return {
        "name": "x",
        "output": str(tmp_path),
        "team": {
            "workflow": {"name": "rema", "max_turns": turns, "max_context": 400},
            "roles": {r: {"policy": "one", "system": s, "max_tokens": 24} for r, s in seats},
        },
        "policies": {"one": {"model": "builtin:tiny", "learning_rate": 1e-4}},
        "tasks": {"train": {"name": "wordsums", "levels": [1, 2], "count": 4}},
        "stages": [
            {"kind": "rl", "steps": 1, "tasks_per_step": 2, "episodes_per_task": 2, "filter": "none", **stage}
        ],
    }  # fmt: skip


@pytest.mark.parametrize("turns", [1, 3])
def test_an_episode_without_one_message(tmp_path, turns):
    """credit §6.11: prompts are those of a play in which that turn was silent; everything said before it stays."""
    session = assemble(cothink.Recipe.load(recipe(tmp_path, turns)))
    played = asyncio.run(play_tasks(session, session.tasks["train"][:3], 1, "seed"))
    codec = session.engines["one"].codec("one")
    for e in played.episodes:
        for k, silent in enumerate(e.turns):
            heard = asyncio.run(causal.unheard(session, e, silent.id))
            for before in e.turns[: k + 1]:
                assert heard[before.id] == before.completion.prompt_ids
            for after in e.turns[k + 1 : k + 2]:
                if after.id in heard and silent.text.strip():
                    text = codec.decode(heard[after.id])
                    assert silent.text.strip() in codec.decode(after.completion.prompt_ids)
                    assert heard[after.id] != after.completion.prompt_ids and e.task.question in text


def test_a_plan_makes_its_execution_likelier(tmp_path):
    """credit §6.11: the figure is the mean of log p(next | all) - log p(next | without), by hand on the same model."""
    session = assemble(cothink.Recipe.load(recipe(tmp_path, 1)))
    episodes = asyncio.run(play_tasks(session, session.tasks["train"], 2, "seed")).episodes
    found = asyncio.run(causal.figures(session, episodes))
    model, codec = session.policies["one"].activate(), session.engines["one"].codec("one")
    gains = []
    for e in episodes:
        _, answer = e.turns
        chat = session.roles["reasoning"].system, f"Question:\n{e.task.question}\n\nInstruction:\n"
        prompt = codec.start([cothink.types.Message(r, t) for r, t in zip(("system", "user"), chat)])
        ids = torch.tensor([[*prompt, *answer.completion.output_ids]])
        with torch.no_grad():
            logp = model(input_ids=ids).logits[0].float().log_softmax(-1)
        n = len(prompt)
        masked = sum(float(logp[n + j - 1, t]) for j, t in enumerate(answer.completion.output_ids))
        gains.append(sum(answer.completion.logprobs) - masked)
    assert found == {"meta/influence": pytest.approx(sum(gains) / len(gains), abs=1e-3)}
    assert found["meta/influence"] > 0.5  # the built-in model follows its plans


def test_it_is_logged_every_so_many_steps(tmp_path):
    stage = {"steps": 3, "influence": {"every": 2, "episodes": 2}}
    folder = cothink.run(recipe(tmp_path, 3, **stage)).folder
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert ["meta/influence" in row for row in rows] == [True, False, True]
