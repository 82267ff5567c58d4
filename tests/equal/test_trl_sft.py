"""The sft stage against the arithmetic: TRL's loss is ours, packing and splitting change nothing, nor does a kill."""

from __future__ import annotations

import asyncio
import json
import math

import pytest
import torch

pytest.importorskip("trl")

from cothink import api, record
from cothink.batch import pad
from cothink.loading import load_policies
from cothink.parts import PolicyPart
from cothink.recipe import Recipe
from cothink.record import Run
from cothink.session import assemble
from cothink.stages import sft as stage_of
from cothink.stages import trl_bridge

TALKS = [(f"What is {k} + {k}?", f"Add {k} twice.", f"{k} + {k} = {2 * k}. " * (1 + k % 3)) for k in range(1, 9)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Eight plans and eight answers, one of them longer than the others by far."""
    path = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    rows = [{"role": "meta", "id": f"t{k}", "prompt": q, "completion": m} for k, (q, m, _) in enumerate(TALKS)]
    rows += [
        {"role": "reasoning", "id": f"t{k}", "prompt": f"{q} {m}", "completion": y} for k, (q, m, y) in enumerate(TALKS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recipe(folder, data, policies=None, **stage):
    policies = policies or {"shared": {}}
    seats = dict(zip(("meta", "reasoning"), [*policies] * (3 - len(policies))))
    return {
        "name": "talks",
        "team": {
            "workflow": {"name": "rema", "max_turns": 1},
            "roles": {role: {"policy": p, "system": ""} for role, p in seats.items()},
        },
        "policies": {n: {"model": str(folder), "weight_decay": 0.0, **options} for n, options in policies.items()},
        "tasks": {"train": {"name": "wordsums", "count": 2}},
        "stages": [{"kind": "sft", "data": {"name": "files", "path": str(data)}, "learning_rate": 1e-2,
                    "scheduler": "constant", "max_length": 250, **stage}],
    }  # fmt: skip


def run(folder, data, out, **options):
    torch.manual_seed(0)  # fresh adapters start alike
    api.run(recipe(folder, data, **options), out=out)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(out, policy="shared"):
    from safetensors.torch import load_file

    (file,) = (record.last_checkpoint(out) / policy).glob("*.safetensors")  # type: ignore[operator]
    return load_file(file)


def gap(one, two):
    assert one.keys() == two.keys() and one
    return max(float((one[k] - two[k]).abs().max()) for k in one)


def test_the_first_loss_is_the_mean_nll_of_our_own_log_probs(tiny_folder, data, tmp_path):
    """rema §7 row 35, malt §10 row 20: the mean over learned tokens only, of both roles of a shared policy."""
    first, *_ = run(tiny_folder, data, tmp_path / "r", max_steps=1, rows_per_step=16)
    policy = load_policies({"shared": PolicyPart(model=str(tiny_folder))}, str)["shared"]
    session = assemble(Recipe.load(recipe(tiny_folder, data, max_steps=1)))
    lesson = stage_of.prepare(session, session.recipe.stages[0], 0)["shared"]  # type: ignore[arg-type]
    assert len(lesson.rows) == 16
    batch = pad(lesson.rows, [[0.0] * len(row.ids) for row in lesson.rows])
    with torch.no_grad():
        logprobs, _ = policy.logprobs(batch)
    count = sum(row.trained for row in lesson.rows)
    nll = -float(logprobs.sum()) / count
    assert nll > 1 and first["shared/loss"] == pytest.approx(nll, rel=1e-5)
    assert trl_bridge.mean_nll(policy, lesson.rows) == pytest.approx(nll, rel=1e-5)
    by_role = {r: [row for row in lesson.rows if row.role == r] for r in ("meta", "reasoning")}
    for role, rows in by_role.items():
        assert first[f"{role}/nll_before"] == pytest.approx(trl_bridge.mean_nll(policy, rows), rel=1e-5)
    assert first["meta/trained_tokens"] + first["reasoning/trained_tokens"] == count
    assert first["meta/tokens"] + first["reasoning/tokens"] == sum(len(row.ids) for row in lesson.rows)


def test_packed_split_and_whole_steps_are_one_step(tiny_folder, data, tmp_path):
    """Packed = padded, 16 x 1 = 1 x 16: the same loss and, after a step, the same weights."""
    kinds = {
        "whole": {"rows_per_step": 16},
        "split": {"rows_per_step": 16, "microbatch_rows": 1},
        "packed": {"rows_per_step": 16, "packing": True},
    }
    found, first = {}, {}
    for kind, options in kinds.items():
        # Adam's first step is the sign of the gradient, whatever its size; small gradients would flip on rounding.
        first[kind], *_ = run(tiny_folder, data, tmp_path / kind, max_steps=1, **options)
        found[kind] = weights(tmp_path / kind)
    for kind in ("split", "packed"):
        for key in ("shared/loss", "shared/gradient_norm"):
            assert first[kind][key] == pytest.approx(first["whole"][key], rel=1e-4), (kind, key)
        assert gap(found["whole"], found[kind]) < 1e-4, kind
    assert gap(found["whole"], weights_of(tiny_folder)) > 5e-3


def weights_of(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_exported_rows_load_in_plain_trl(tiny_folder, data, tmp_path):
    """malt issue: rows as JSON lines, read by TRL without cothink, give the same loss."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    first, *_ = run(tiny_folder, data, tmp_path / "r", max_steps=1, rows_per_step=16)
    file = tmp_path / "r" / "examples" / "00-shared.jsonl"
    line = json.loads(file.read_text().splitlines()[0])
    assert {"role", "id", "messages", "input_ids", "labels"} == line.keys()
    rows = load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
    args = SFTConfig(
        str(tmp_path / "trl"), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", max_steps=1,
        per_device_train_batch_size=16, logging_steps=1, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    trainer = SFTTrainer(model, args, train_dataset=rows, processing_class=AutoTokenizer.from_pretrained(tiny_folder))
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(first["shared/loss"], rel=1e-5)


def test_only_the_taught_adapter_changes_and_the_model_comes_back_as_it_was(tiny_folder, data):
    """malt §10 row 23: adapters over one base train alone; the base and the other adapter stay bit-identical."""
    tree = recipe(tiny_folder, data, {"meta": {"lora_r": 4}, "reasoning": {"lora_r": 4}}, max_steps=2, roles=["meta"])
    session = assemble(Recipe.load(tree))
    meta, other = session.policies["meta"], session.policies["reasoning"]
    model, base = meta.model, meta.model.get_base_model()
    assert model is other.model
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    other.parameters()  # as if it had been trained before
    meta.activate()
    flags = {n: p.requires_grad for n, p in model.named_parameters()}
    config, pad_token = base.config.to_dict(), meta.tokenizer.pad_token
    found = asyncio.run(stage_of.sft(session, session.recipe.stages[0], 0))  # type: ignore[arg-type]
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed and all(".policy-meta." in n for n in changed)
    assert found.keys() == {"meta/nll_before", "meta/nll"} and found["meta/nll"] < found["meta/nll_before"]
    assert base.config.to_dict() == config and meta.tokenizer.pad_token == pad_token
    assert not any("forward" in vars(m) or "model_tags" in vars(m) for m in (model, base))
    assert not model.training and meta.version == 1 and other.version == 0
    assert flags == {n: p.requires_grad for n, p in model.named_parameters()}


class Killed(BaseException):
    pass


def kill_at(monkeypatch, step):
    """The process dies right after the metrics of an optimiser step were written."""
    write = Run.metrics

    def metrics(self, stage, at, values):
        write(self, stage, at, values)
        if at == step and any(key.endswith("/loss") for key in values):
            raise Killed

    monkeypatch.setattr(Run, "metrics", metrics)


@pytest.mark.parametrize(
    ("policies", "step"),
    [({"shared": {}}, 5), ({"a": {"lora_r": 2, "lora_dropout": 0.1}, "b": {"lora_r": 2}}, 5), ({"a": {}, "b": {}}, 9)],
    ids=["full", "adapter", "second-policy"],
)
def test_killed_and_resumed_is_uninterrupted(tiny_folder, data, tmp_path, monkeypatch, policies, step):
    """Bit for bit: weights, and one line of metrics for each step."""
    options = {"policies": policies, "epochs": 1.5, "rows_per_step": 2, "checkpoint_every": 2, "scheduler": "cosine"}
    whole = run(tiny_folder, data, tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        kill_at(patch, step)
        with pytest.raises(Killed):
            run(tiny_folder, data, tmp_path / "cut", **options)
    assert trl_bridge.last_checkpoint(next((tmp_path / "cut" / "trainer").glob("stage00-*"))) is not None
    resumed = run(tiny_folder, data, tmp_path / "cut", **options)
    for name in policies:
        assert gap(weights(tmp_path / "whole", name), weights(tmp_path / "cut", name)) == 0
    lines = [[{k: v for k, v in line.items() if k != "time"} for line in lines] for lines in (whole, resumed)]
    assert lines[0] == lines[1]
    assert not (tmp_path / "cut" / "trainer").exists()


def test_an_interruption_leaves_the_trainers_place(tiny_folder, data, tmp_path, monkeypatch):
    """Ctrl-C cancels the running task: the step is finished and saved without any checkpoint_every."""
    options = {"max_steps": 6, "rows_per_step": 4}
    run(tiny_folder, data, tmp_path / "whole", **options)
    write, session = Run.metrics, Recipe.load(recipe(tiny_folder, data, **options))

    def metrics(self, stage, at, values):
        write(self, stage, at, values)
        if at == 3 and "shared/loss" in values:
            asyncio.current_task().cancel()  # type: ignore[union-attr]

    torch.manual_seed(0)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "metrics", metrics)
        with pytest.raises(asyncio.CancelledError):
            api.run(session, out=tmp_path / "cut")
    place = trl_bridge.last_checkpoint(tmp_path / "cut" / "trainer" / "stage00-shared")
    assert place is not None and place.name in ("checkpoint-3", "checkpoint-4")
    run(tiny_folder, data, tmp_path / "cut", **options)
    assert gap(weights(tmp_path / "whole"), weights(tmp_path / "cut")) == 0


def test_the_loss_of_held_out_tasks_is_measured_and_falls(tiny_folder, data, tmp_path):
    lines = run(tiny_folder, data, tmp_path / "r", epochs=8, rows_per_step=7, held_out=1)
    nll = [line["reasoning/nll"] for line in lines if "reasoning/nll" in line]
    assert len(nll) == 8 and nll[-1] < lines[0]["reasoning/nll_before"]
    held = {line["id"] for line in map(json.loads, (tmp_path / "r/examples/00-shared.jsonl").read_text().splitlines())}
    assert len(held) == 7  # both sides of the eighth are kept out
    assert max(line["step"] for line in lines) == 8 * math.ceil(14 / 7)
