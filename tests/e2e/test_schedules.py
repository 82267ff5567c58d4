"""Two policies in one run: phases resumed exactly, frozen weights untouched, different models and tokenizers."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch

import cothink
from cothink.record import last_checkpoint
from cothink.stages import phases


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory):
    """A GPT-2 of another size over a word-level tokenizer with another template and another end token."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    characters = [chr(k) for k in range(32, 127)] + ["\n"]
    words = ["<pad>", "<end>", "<user>", "<system>", "<me>", "<?>", *characters]
    model = models.BPE(vocab={w: k for k, w in enumerate(words)}, merges=[], unk_token="<?>")
    characterwise = Tokenizer(model)
    characterwise.normalizer = normalizers.NFC()
    characterwise.decoder = decoders.Fuse()
    template = (
        "{% for m in messages %}{{ {'user': '<user>', 'system': '<system>', 'assistant': '<me>'}[m['role']] }}"
        "{{ m['content'] }}<end>{% endfor %}{% if add_generation_prompt %}<me>{% endif %}"
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characterwise, eos_token="<end>", pad_token="<pad>", unk_token="<?>", chat_template=template,
        additional_special_tokens=["<user>", "<system>", "<me>"],
    )  # fmt: skip
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=24, n_layer=1, n_head=2, n_positions=256, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, initializer_range=0.3,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("other")
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def reward(monkeypatch):
    """A user's reward; `fail_at` makes the n-th call fail."""
    module = types.ModuleType("schedule_rewards")
    module.calls, module.fail_at = 0, None

    def sums(task, turn, episode):
        module.calls += 1
        if module.calls == module.fail_at:
            raise RuntimeError("the grader went away")
        return (sum(turn.completion.output_ids) % 7) / 7

    sums.__module__ = "schedule_rewards"
    module.sums = sums
    monkeypatch.setitem(sys.modules, "schedule_rewards", module)
    return module


@pytest.fixture
def recipe(tiny_folder, tmp_path):
    rows = [{"question": f"{a} + {b}?", "answer": str(a + b)} for a in range(3) for b in range(2)]
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return {
        "name": "two",
        "seed": 2,
        "output": str(tmp_path / "runs"),
        "team": {
            "workflow": {"name": "rema", "max_turns": 1, "max_context": 200, "stop_on_truncation": False},
            "roles": {
                "meta": {"policy": "first", "system": "plan", "max_tokens": 8},
                "reasoning": {"policy": "second", "system": "solve", "max_tokens": 8},
            },
        },
        "policies": {
            "first": {"model": str(tiny_folder), "learning_rate": 1e-2},
            "second": {"model": str(tiny_folder), "learning_rate": 1e-2},
        },
        "tasks": {"train": {"name": "files", "path": str(data)}},
        "stages": [
            {
                "kind": "rl", "preset": "rema_single", "steps": 20, "tasks_per_step": 4, "episodes_per_task": 4,
                "schedule": {"iterations": 2, "filter_plays": 3}, "filter": {"low": 0.0, "high": 0.9},
                "rewards": [{"name": "schedule_rewards:sums"}], "updates_per_step": 2,
            }
        ],
    }  # fmt: skip


def weights(folder, *names):
    from safetensors.torch import load_file

    place = last_checkpoint(folder)
    return {n: load_file(place / n / "model.safetensors") for n in names}


def metrics(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith(("time", "seconds"))} for r in rows]


def trained(rows):
    return ["".join(p for p in ("first", "second") if f"{p}/updates" in r) for r in rows]


def test_phases_on_real_weights_resume_bit_for_bit(recipe, reward, tmp_path, monkeypatch):
    """rema §7 rows 18, 19, 42: the sequence, the saved filter, interrupted = uninterrupted."""
    filters: list[int] = []
    play = phases.play_tasks

    def counting(session, rows, *args, **options):
        filters.append(len(rows))
        return play(session, rows, *args, **options)

    monkeypatch.setattr(phases, "play_tasks", counting)
    whole = cothink.run(recipe, out=tmp_path / "whole")
    rows = metrics(whole.folder)
    assert trained(rows) == ["second"] * 2 + ["first"] * 2 + ["second"] * 2 + ["first"] * 2  # 6 rows, 4 a step
    assert [r["phase/number"] for r in rows] == [1, 1, 2, 2, 3, 3, 4, 4] and filters == [6] * 4
    filters.clear()
    reward.calls, reward.fail_at = 0, 16 + 8 + 5  # in the first step of the second phase, right after its filter
    with pytest.raises(RuntimeError, match="the grader went away"):
        cothink.run(recipe, out=tmp_path / "parts")
    assert filters == [6] * 2
    reward.fail_at = None
    parts = cothink.run(recipe, out=tmp_path / "parts")
    assert filters == [6] * 4 and metrics(parts.folder) == rows
    a, b = weights(whole.folder, "first", "second"), weights(parts.folder, "first", "second")
    assert all(torch.equal(a[n][k], b[n][k]) for n in a for k in a[n])


@pytest.mark.parametrize("schedule", [{"steps": 2}, {"schedule": {"name": "alternate", "by": "epochs", "every": 9}}])
def test_a_frozen_policy_is_bit_identical_after_a_block(recipe, schedule, tiny_folder):
    """rema §7 row 19."""
    from safetensors.torch import load_file

    recipe["stages"][0] |= schedule
    if "schedule" in schedule:
        recipe["stages"][0] |= {"steps": 3, "filter": "none"}
    done = cothink.run(recipe)
    start, now = load_file(tiny_folder / "model.safetensors"), weights(done.folder, "first", "second")
    moved = {n: not all(torch.equal(start[k], w[k]) for k in start) for n, w in now.items()}
    by_epochs = "schedule" in schedule
    assert moved == {"first": by_epochs, "second": not by_epochs}


def test_policies_of_different_models_and_tokenizers_learn_in_one_run(recipe, other_folder, tmp_path):
    """rema §7 row 20: own optimiser, tokenizer and checkpoint for each; nothing is shared but text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipe["policies"]["second"] = {"model": str(other_folder), "learning_rate": 3e-3, "scheduler": "linear"}
    recipe["stages"][0] |= {
        "steps": 4, "schedule": {"name": "alternate", "every": 1}, "filter": "none",
        "loss": {"name": "policy", "kl": "none"},
    }  # fmt: skip
    done = cothink.run(recipe)
    rows = metrics(done.folder)
    assert trained(rows) == ["first", "second"] * 2
    assert all(r[f"{p}/engine_gap_max"] < 1e-3 for r, p in zip(rows, trained(rows)))
    assert [r[f"{p}/learning_rate"] for r, p in zip(rows, trained(rows))] == [
        0.01, pytest.approx(3e-3 * 0.5), 0.01, pytest.approx(0.0),
    ]  # fmt: skip
    place = last_checkpoint(done.folder)
    kinds = {n: AutoModelForCausalLM.from_pretrained(place / n).config.model_type for n in ("first", "second")}
    assert kinds == {"first": "llama", "second": "gpt2"}
    text = "solve 1 + 2?"
    ids = {n: AutoTokenizer.from_pretrained(place / n)(text, add_special_tokens=False)["input_ids"] for n in kinds}
    assert ids["first"] != ids["second"] and len(ids["second"]) == len(text)
    states = {n: torch.load(place / "training" / f"{n}.pt", weights_only=True)["optimizer"] for n in kinds}
    assert len(states["first"]["state"]) != len(states["second"]["state"])
    (first, *_) = [json.loads(x) for x in (done.folder / "episodes/00-rl/000001.jsonl").read_text().splitlines()]
    assert [t["policy"] for t in first["turns"]] == ["first", "second"]
