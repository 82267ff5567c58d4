"""Does a recipe fit? Its parts by hand, the tokens of its plays, and settings that really make it fit."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest

from cothink import cli, fit, preview
from cothink.fit import Device
from cothink.footprint import Load
from cothink.parts import RL
from cothink.recipe import Recipe
from cothink.types import Message, Sampling
from cothink.workload import Chat, Work, chats, step

ADAPTER = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
"""Weights of a LoRA adapter of rank 16 on Llama-3.1-8B."""
LORA = {"model": "meta-llama/Llama-3.1-8B-Instruct", "dtype": "bfloat16", "lora_r": 16}
FULL = {"model": "Qwen/Qwen2.5-1.5B", "dtype": "bfloat16", "learning_rate": 1e-6}
STAGE = {"kind": "rl", "steps": 1, "tasks_per_step": 8, "episodes_per_task": 4, "filter": "none"}


def recipe(policy, *stages, **more):
    team = {
        "workflow": {"name": "rema", "max_turns": 1},
        "roles": {"meta": {"policy": "m", "max_tokens": 100}, "reasoning": {"policy": "r", "max_tokens": 300}},
    }
    tasks = {"train": {"name": "wordsums"}, "test": {"name": "wordsums", "split": "test", "count": 20}}
    policies = {"m": {**policy}, "r": {**policy}}
    return Recipe.load(
        {"name": "x", "team": team, "policies": policies, "tasks": tasks, "stages": list(stages or (STAGE,)), **more}
    )


WORK = Work([Chat("m", 160, 60, 100), Chat("r", 460, 60, 300)], {"train": 100, "test": 20})


def at(found, what):
    return next(m.parts for m in found if m.what == what)


def test_adapters_share_a_base_and_keep_their_own_moments():
    assert ADAPTER == 41_943_040
    found = fit.moments(recipe(LORA), WORK, Device())
    parts = at(found, "learning r")
    assert parts["weights"] == 2 * 8_030_261_248
    assert parts["adapters"] == 2 * 4 * ADAPTER and parts["optimiser"] == 2 * 8 * ADAPTER
    # 8 rows x (60 + 4 plays x 400 tokens of their own) fit into two microbatches, those of meta into one
    assert parts["gradients"] == 4 * ADAPTER and at(found, "learning m")["gradients"] == 0
    assert at(found, "stepping m")["gradients"] == 4 * ADAPTER
    assert parts["engine's copy"] == parts["reference"] == 0


def test_full_weights_cost_sixteen_bytes_and_the_engine_two_more():
    parts = at(fit.moments(recipe(FULL), WORK, Device()), "stepping r")
    n = 1_543_714_304
    assert parts["weights"] == 2 * 4 * n and parts["optimiser"] == 2 * 8 * n and parts["gradients"] == 4 * n
    assert parts["engine's copy"] == 2 * 2 * n  # float32 weights, and bfloat16 ones that sample
    halves = at(fit.moments(recipe(FULL), WORK, Device(processes=2, shards=2)), "stepping r")
    for name in ("weights", "gradients", "optimiser"):
        assert halves[name] == parts[name] / 2


def test_the_cache_is_bounded_by_what_is_said_and_by_what_is_played():
    each = 2 * 32 * 8 * 128 * 2
    tokens = 8 * (60 + 4 * 100) + 8 * (60 + 4 * 400)
    assert at(fit.moments(recipe(LORA), WORK, Device()), "learning r")["cache"] == tokens * each
    small = recipe(LORA, engine={"name": "local", "cache_gib": 1.0})
    assert at(fit.moments(small, WORK, Device()), "learning r")["cache"] == 1 << 30
    long = Work([Chat("m", 60_000, 0, 60_000)])
    assert at(fit.moments(recipe(LORA), long, Device()), "learning m")["cache"] == 4 * (1 << 30)
    little = Device(memory=20e9)  # a quarter of what the weights leave
    assert at(fit.moments(recipe(LORA), long, little), "learning m")["cache"] == (20e9 - 2 * 8_030_261_248) / 4


def call(policy, *texts, limit=10, n=1):
    messages = tuple(Message("user" if k % 2 == 0 else "assistant", text) for k, text in enumerate(texts))
    return SimpleNamespace(policy=policy, messages=messages, sampling=Sampling(max_tokens=limit), n=n)


def test_chats_end_in_their_last_call_and_share_what_nobody_said():
    ask, more = "q" * 40, "go on   "
    one = [call("p", ask), call("p", ask, "x" * 40, more), call("r", ask + "x" * 40, limit=20, n=3)]
    two = [call("p", ask), call("p", ask, "y" * 40, more), call("r", ask + "y" * 40, limit=20, n=3)]
    assert chats(one, two) == [Chat("p", 10 + 10 + 2 + 10, 10, 20), Chat("r", 20 + 20, 10, 20, 3)]
    assert chats(one, two, 25)[0] == Chat("p", 25, 10, 20)


def test_the_fullest_microbatch_of_a_step():
    stage = RL(**{**STAGE, "microbatch_tokens": 820})
    # a row: 60 tokens shared and 4 x 400, that 4 x 460 keys read; 8 rows are 13,280 tokens, of which 820 are together
    load, several = step([WORK.chats[1]], stage, 1)
    assert several and load == Load(820, round(820 / 1660 * 1840), 460, round(820 / 1660 * 1200))
    load, several = step([WORK.chats[1]], stage.model_copy(update={"microbatch_tokens": 8192}), 2)
    assert not several and load.tokens == 8 * 1660 // 2
    assert step([WORK.chats[1]], stage.model_copy(update={"microbatch_tokens": 100}), 1)[0].tokens == 460  # a whole row


def test_what_earlier_stages_leave_behind_is_counted():
    sft = {"kind": "sft", "data": {"name": "wordsums"}, "epochs": 1, "rows_per_step": 8, "microbatch_rows": 2}
    test = {"kind": "evaluate", "on": "test"}
    found = fit.moments(recipe(FULL, test, STAGE, sft, test), WORK, Device())
    optimiser = {m.stage: m.parts["optimiser"] for m in found}
    n = 8 * 1_543_714_304
    assert optimiser == {0: 0, 1: 2 * n, 2: 3 * n, 3: 2 * n}  # the trainer's own goes with it


def test_nothing_is_proposed_where_all_fits():
    assert fit.problems(recipe({**LORA, "gradient_checkpointing": True}), WORK, Device(memory=80e9)) == []


@pytest.mark.parametrize(
    ("policy", "stage", "memory"),
    [
        (LORA, {**STAGE, "microbatch_tokens": 16384, "tasks_per_step": 64}, "24GB"),
        ({**FULL, "dtype": "float32"}, STAGE, "24GB"),
        (FULL, STAGE, "40GB"),
        ({**LORA, "dtype": "float32"}, STAGE, "40GB"),
        (LORA, {"kind": "sft", "data": {"name": "wordsums"}, "epochs": 1}, "30GB"),
    ],
)
def test_what_is_proposed_makes_it_fit(policy, stage, memory, tmp_path):
    file = tmp_path / "x.yaml"
    before, device = recipe(policy, stage), Device(memory=fit.size(memory))
    file.write_text(before.to_yaml())
    (problem,) = fit.problems(before, WORK, device)
    assert "do not fit" in problem.what and problem.write
    for proposal in problem.write.split("  or  "):
        found = re.fullmatch(r"(?P<words>.*) \((?P<size>.*) GB\)", proposal)
        assert found is not None, proposal
        after = Recipe.load(file, found["words"].split())
        peak = max(m.total for m in fit.moments(after, WORK, device))
        assert peak <= fit.size(memory) and math.isclose(peak, float(found["size"]) * 1e9, abs_tol=0.06e9)


def test_a_model_that_is_too_large_for_every_setting_says_so():
    (problem,) = fit.problems(recipe(LORA), WORK, Device(memory=10e9))
    assert problem.write.startswith("a smaller model or a larger device")


def test_sizes_are_numbers_with_units():
    assert fit.size("80GB") == 80e9 and fit.size("1.5GiB") == 1.5 * 2**30 and fit.size("512 MB") == 512e6
    for wrong, right in (("80G", "80GB"), ("80", "80GB"), ("eighty", "80GB"), ("24gb", "24GB"), ("0GB", "80GB")):
        with pytest.raises(ValueError, match=f"such as {right}"):
            fit.size(wrong)


def said(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        cli.main(["check", *arguments])
    return end.value.code or 0, "".join(capsys.readouterr())


def test_check_prints_the_memory_and_ends_well_only_where_it_fits(tmp_path, capsys):
    file = tmp_path / "x.yaml"
    file.write_text(recipe(LORA).to_yaml())
    code, text = said(capsys, str(file))
    assert code == 0 and "memory: about " in text and "weights 16.1 GB" in text
    code, text = said(capsys, str(file), "--memory", "80GB", "--processes", "8")
    assert code == 0 and "each of 8 processes" in text and "it fits: " in text and text.endswith("ok\n")
    code, text = said(capsys, str(file), "--memory", "20GB")
    assert code == 2 and "do not fit in 20.0 GB" in text and "microbatch_tokens" in text
    assert said(capsys, str(file), "--memory", "80G")[0] == 2
    assert said(capsys, str(file), "--processes", "8")[0] == 2


def test_check_says_what_is_missing_for_a_model_that_is_not_here(tmp_path, capsys):
    file = tmp_path / "x.yaml"
    file.write_text(recipe({**LORA, "model": "somebody/something"}).to_yaml())
    code, text = said(capsys, str(file))
    assert code == 0 and "hf download somebody/something config.json" in text
    code, text = said(capsys, str(file), "--memory", "80GB")
    assert code == 2 and "hf download somebody/something config.json" in text


def test_the_plays_of_a_recipe_are_as_long_as_they_may_be():
    loaded = recipe(LORA)
    found = preview._chats(loaded, {name: preview._data(loaded, name) for name in loaded.tasks})
    assert [(c.policy, c.said) for c in found] == [("m", 100), ("r", 300)]
    meta, reasoning = found
    assert meta.length == meta.shared + 100 or meta.length == meta.shared + 101  # all of its prompt is the row's
    assert reasoning.length >= reasoning.shared + 100 + 300  # the plan is not
