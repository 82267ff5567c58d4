"""The dpo stage against the arithmetic: the loss, its start at ln 2, adapters, a kill, and plain TRL."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("trl")

from trl.trainer.dpo_trainer import DPOTrainer

from cothink import api, record, store
from cothink.finite import TrainingError
from cothink.loading import load_policies
from cothink.parts import DPO, PolicyPart
from cothink.recipe import Recipe
from cothink.record import Run
from cothink.session import assemble
from cothink.stages import dpo as stage_of
from cothink.stages import trl_bridge, trl_pairs
from cothink.trees import Grade, Tree
from cothink.trees.labels import Rules, groups
from cothink.trees.rows import pair_rows
from cothink.types import Completion, Episode, Finish, Task, Turn

ROLES = ("generator", "verifier", "refiner")


RIGHT = {"000", "001", "010", "100"}
GOOD = RIGHT | {"0", "00"}


def trees(tokenizer, count=4):
    """The n = 2 tree of the specification (O2), on several tasks: a pair of G, one of V and two of R each."""
    found = []
    for k in range(count):
        turns, prompts = [], {"": tuple(tokenizer(f"user {k}")["input_ids"])}
        for path in ("".join(p) for size in (1, 2, 3) for p in itertools.product("01", repeat=size)):
            text = f"{'plan' if path in GOOD else 'question'} {path} {k}"
            ids = (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)
            prompt = prompts[path[:-1]]
            prompts[path] = (*prompt, *ids)
            role = ROLES[len(path) - 1]
            done = Completion(text, prompt, ids, (0.0,) * len(ids))
            turns.append(Turn(path, (path[:-1],) if path[:-1] else (), role, role, done, text))
        grades = {t.id: Grade("right" if t.id in RIGHT else "wrong") for t in turns if len(t.id) == 3}
        task = Task(f"made/{k}", f"user {k}", "1")
        found.append(Tree(Episode(f"made/{k}#0", task, tuple(turns), Finish("finished", "")), grades))
    return found


@pytest.fixture
def forest(tiny_folder, monkeypatch):
    """What the store of a folder gives."""
    from transformers import AutoTokenizer

    made = trees(AutoTokenizer.from_pretrained(tiny_folder))
    monkeypatch.setattr(store, "load", lambda folder: made)
    return made


def recipe(folder, place, policies=None, *, first=(), **stage):
    policies = policies or {"shared": {}}
    seats = dict(zip(ROLES, [*policies] * 3))
    return {
        "name": "pairs",
        "team": {"workflow": "malt", "roles": {role: {"policy": p, "system": ""} for role, p in seats.items()}},
        "policies": {n: {"model": str(folder), "weight_decay": 0.0, **options} for n, options in policies.items()},
        "tasks": {"train": {"name": "wordsums", "count": 2}},
        "stages": [*first, {"kind": "dpo", "data": {"name": "tree", "store": str(place)}, "learning_rate": 1e-2,
                            "scheduler": "constant", "warmup_steps": 0, **stage}],
    }  # fmt: skip


def run(folder, out, **options):
    torch.manual_seed(0)  # fresh adapters start alike
    api.run(recipe(folder, folder, **options), out=out)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(out, policy="shared"):
    from safetensors.torch import load_file

    (file,) = (record.last_checkpoint(out) / policy).glob("*.safetensors")  # type: ignore[operator]
    return load_file(file)


def gap(one, two):
    assert one.keys() == two.keys() and one
    return max(float((one[k] - two[k]).abs().max()) for k in one)


def flat(pairs):
    return [x for pair in pairs for x in pair]


@pytest.fixture
def contest(tiny_folder, forest):
    """A LoRA policy that has learned something, and the pairs of the verifier."""
    torch.manual_seed(1)
    policy = load_policies({"p": PolicyPart(model=str(tiny_folder), lora_r=4, lora_dropout=0.2)}, str)["p"]
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    rows = [r for r in pair_rows(groups(forest, Rules()), Rules()) if r.role == "refiner"]
    assert len(rows) == 8
    return policy, stage_of.Contest(rows)


def shifted(contest, delta):
    """Reference log-probs from which the policy is `delta` nats away."""
    return replace_reference(contest, [(c - delta, r) for c, r in contest.reference])


def replace_reference(contest, values):
    return stage_of.Contest(contest.rows, contest.facts, values, contest.checkpoint)


def trainer_of(policy, seat, contest, folder, **stage):
    part = DPO(kind="dpo", max_steps=1, **stage)
    config = stage_of._config(policy, part, contest, folder, 0)
    return trl_pairs.dpo_trainer(policy, seat, config, stage_of.dataset(contest))


@pytest.mark.parametrize(
    ("epsilon", "delta", "loss"),
    [(0.0, 0, 0.693147), (0.1, 0, 0.693147), (0.0, 5, 0.313262), (0.0, -5, 1.313262), (0.1, 5, 0.413262),
     (0.268941, 0, 0.693147), (0.268941, 5, 0.582203)],
)  # fmt: skip
def test_the_loss_is_the_formula(contest, tmp_path, epsilon, delta, loss):
    """malt §10 row 21: O8, on the loss that trains; and its slope, -beta/2 at 0, nothing at the smoothed optimum."""
    policy, one = contest
    stage_of.refer(policy, one, None)
    with trl_bridge.quiet(), trl_pairs.contending(policy, None, 0) as seat:
        trainer = trainer_of(policy, seat, shifted(one, delta), tmp_path, beta=0.2, label_smoothing=epsilon)
        for row in trainer.train_dataset:
            assert trl_pairs.loss_of(trainer, row) == pytest.approx(loss, abs=2e-5)
        around = []
        for step in (0.5, -0.5):
            near = trainer_of(policy, seat, shifted(one, delta + step), tmp_path, beta=0.2, label_smoothing=epsilon)
            around.append(trl_pairs.loss_of(near, near.train_dataset[0]))
    slope = {(0.0, 0): -0.1, (0.268941, 5): 0.0}.get((epsilon, delta))
    if slope is not None:
        assert around[0] - around[1] == pytest.approx(slope, abs=2e-4)


def test_it_starts_at_ln_2_and_a_lost_adapter_is_noticed(contest, tmp_path):
    """malt §10 row 22: O9, on every pair; without the adapter that sft trained the first step never comes."""
    policy, one = contest
    stage = DPO(kind="dpo", max_steps=1, warmup_steps=0)
    stage_of.refer(policy, one, None)
    with trl_bridge.quiet(), trl_pairs.contending(policy, None, 0) as seat:
        trainer = trainer_of(policy, seat, one, tmp_path)
        values = [trl_pairs.loss_of(trainer, row) for row in trainer.train_dataset]
    assert values == pytest.approx([math.log(2)] * 8, abs=1e-4)
    with policy.model.disable_adapter():
        bare = stage_of.reference(SimpleNamespace(  # type: ignore[arg-type]
            name="p", model=policy.model, device=policy.device, logprobs=_bare(policy)), one.rows)  # fmt: skip
    assert max(abs(a - b) for a, b in zip(flat(bare), flat(one.reference))) > 0.1
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    before = trl_bridge.fingerprint(policy)
    with pytest.raises(stage_of.ReferenceLost, match=r"costs ln 2 = 0.693, and one costs .* adapter that sft has"):
        stage_of.train(policy, stage, one, tmp_path, 0, lambda step, logs: None)
    assert trl_bridge.fingerprint(policy) == before


def _bare(policy):
    from cothink.logprobs import token_logprobs

    return lambda batch: token_logprobs(policy.model, batch)[:2]


def test_dropout_is_off_while_it_learns_and_back_afterwards(contest, tmp_path):
    policy, one = contest
    stage_of.refer(policy, one, None)
    lost = {m: m.p for m in policy.model.modules() if isinstance(m, torch.nn.Dropout)}
    assert set(lost.values()) == {0.2}
    seen = []
    stage = DPO(kind="dpo", max_steps=2, warmup_steps=0, learning_rate=1e-3, pairs_per_step=8)
    stage_of.train(policy, stage, one, tmp_path, 0, lambda step, logs: seen.append(dict(logs)))
    losses = [logs["loss"] for logs in seen if "loss" in logs]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4) and losses[1] < losses[0]
    assert all(m.p == p for m, p in lost.items()) and not policy.model.training


def test_scale_0_is_the_old_policy_and_scale_1_the_new_one(contest, tmp_path):
    """malt §10 row 25: a second adapter over the frozen first one; both become one of a higher rank."""
    policy, one = contest
    stage_of.refer(policy, one, None)
    old = one.reference
    state = {k: v.clone() for k, v in policy.model.state_dict().items()}
    found = {}
    for scale in (0.0, 0.5, 1.0):
        torch.manual_seed(1)
        fresh = load_policies({"p": policy.settings}, lambda _: policy.settings.model)["p"]
        fresh.model.load_state_dict(state)
        stage = DPO(kind="dpo", max_steps=4, warmup_steps=0, learning_rate=2e-2, adapter_scale=scale, pairs_per_step=8)
        stage_of.train(fresh, stage, one, tmp_path / str(scale), 0, lambda step, logs: None)
        assert fresh.model.peft_config["policy-p"].r == 8 and [*fresh.model.peft_config] == ["policy-p"]
        found[scale] = stage_of.reference(fresh, one.rows)
        fresh.save(tmp_path / f"saved{scale}")
        again = load_policies({"p": policy.settings}, lambda _: policy.settings.model)["p"]
        again.load(tmp_path / f"saved{scale}")
        assert flat(stage_of.reference(again, one.rows)) == pytest.approx(flat(found[scale]), abs=1e-4)
    margins = {k: sum(c - oc - r + o for (c, r), (oc, o) in zip(v, old)) for k, v in found.items()}
    assert flat(found[0.0]) == pytest.approx(flat(old), abs=1e-4)
    assert 0.1 < margins[0.5] < margins[1.0]


def test_the_scaled_policy_is_the_one_that_was_trained(contest, tmp_path):
    """malt §10 row 25: at scale 1 the merged adapter gives the loss that the two adapters gave together."""
    policy, one = contest
    stage_of.refer(policy, one, None)
    with trl_bridge.quiet(), trl_pairs.contending(policy, 1.0, 0) as seat:
        trainer = trainer_of(policy, seat, one, tmp_path, learning_rate=2e-2, warmup_steps=0)
        trainer.train()
        learned = {n for n, p in policy.model.named_parameters() if p.requires_grad}
        assert learned and all(".policy-p-dpo." in n for n in learned)
        together = [trl_pairs.loss_of(trainer, row) for row in trainer.train_dataset]
    deltas = [
        (c - oc) - (r - o) for (c, r), (oc, o) in zip(stage_of.reference(policy, one.rows), one.reference, strict=True)
    ]
    merged = [-math.log(1 / (1 + math.exp(-0.2 * d))) for d in deltas]
    assert merged == pytest.approx(together, abs=1e-4) and min(merged) < 0.69


def test_each_adapter_learns_alone_and_the_generator_only_when_named(tiny_folder, forest, tmp_path):
    """malt §10 rows 23 and 24: `roles` off leaves G as it was; the base and the other adapters stay bit-identical."""
    lora = {role: {"lora_r": 2} for role in ROLES}
    for roles, learned in ((None, {"verifier", "refiner"}), (["generator"], {"generator"})):
        torch.manual_seed(0)
        tree = recipe(tiny_folder, tmp_path, lora, max_steps=2, **({} if roles is None else {"roles": roles}))
        session = assemble(Recipe.load(tree))
        model = session.policies["generator"].model
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        asyncio.run(stage_of.dpo(session, session.recipe.stages[0], 0))  # type: ignore[arg-type]
        changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
        assert {n.split("policy-")[1].split(".")[0] for n in changed} == learned
        assert {n: p.version for n, p in session.policies.items()} == {n: int(n in learned) for n in ROLES}
        assert all("policy-" in n for n in changed) and not any("forward" in vars(m) for m in model.modules())


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
    ("policies", "more", "step"),
    [({"shared": {}}, {}, 3), ({"a": {"lora_r": 2, "lora_dropout": 0.1}, "b": {"lora_r": 2}}, {}, 8),
     ({"a": {"lora_r": 2}, "b": {"lora_r": 2}}, {"adapter_scale": 0.5}, 8)],
    ids=["full", "adapter", "stacked"],
)  # fmt: skip
def test_killed_and_resumed_is_uninterrupted(tiny_folder, forest, tmp_path, monkeypatch, policies, more, step):
    """Bit for bit: weights, stored reference log-probs, and one line of metrics for each step."""
    options = {"policies": policies, "max_steps": 5, "pairs_per_step": 2, "checkpoint_every": 2, **more}
    whole = run(tiny_folder, tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        kill_at(patch, step)
        with pytest.raises(Killed):
            run(tiny_folder, tmp_path / "cut", **options)
    assert trl_bridge.last_checkpoint(next((tmp_path / "cut" / "trainer").glob("stage00-*"))) is not None
    resumed = run(tiny_folder, tmp_path / "cut", **options)
    for name in policies:
        assert gap(weights(tmp_path / "whole", name), weights(tmp_path / "cut", name)) == 0
    lines = [[{k: v for k, v in line.items() if k != "time"} for line in lines] for lines in (whole, resumed)]
    assert lines[0] == lines[1]
    texts = [sorted(f.read_text() for f in (tmp_path / n / "pairs").iterdir()) for n in ("whole", "cut")]
    assert texts[0] == texts[1] and not (tmp_path / "cut" / "trainer").exists()


def test_a_reference_of_another_checkpoint_is_refused(contest, tmp_path):
    """malt §10 row 19: the stored hash must be that of the policy; other pairs are refused too."""
    policy, one = contest
    file = tmp_path / "pairs.jsonl"
    stage_of.refer(policy, one, file)
    stage_of.export(file, stage_of.lines(policy, one))
    again = stage_of.Contest(one.rows)
    stage_of.refer(policy, again, file)
    assert again.reference == one.reference and again.checkpoint == one.checkpoint
    with pytest.raises(stage_of.ReferenceLost, match="holds other pairs than the trees give now"):
        stage_of.refer(policy, stage_of.Contest(one.rows[1:]), file)
    with torch.no_grad():
        policy.parameters()[0].add_(0.01)
    with pytest.raises(stage_of.ReferenceLost, match=f"of the checkpoint {one.checkpoint}, and policy 'p' starts from"):
        stage_of.refer(policy, stage_of.Contest(one.rows), file)


def test_exported_pairs_load_in_plain_trl(tiny_folder, forest, tmp_path):
    """malt issue: pairs as JSON lines, read by TRL without cothink, give the sampled ids and the same losses."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    ours = run(tiny_folder, tmp_path / "r", max_steps=2, pairs_per_step=32, learning_rate=1e-3)
    file = tmp_path / "r" / "pairs" / "00-shared.jsonl"
    rows = load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
    sampled = [[line[k] for k in ("prompt_ids", "chosen_ids", "rejected_ids")] for line in rows]
    plain = rows.select_columns(["prompt", "chosen", "rejected"])
    args = DPOConfig(
        str(tmp_path / "trl"), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", max_steps=2,
        per_device_train_batch_size=32, logging_steps=1, disable_tqdm=True, save_strategy="no", beta=0.2,
        learning_rate=1e-3, lr_scheduler_type="constant",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    trainer = DPOTrainer(
        model, args=args, train_dataset=plain, processing_class=AutoTokenizer.from_pretrained(tiny_folder)
    )
    assert [
        [line[k] for k in ("prompt_ids", "chosen_ids", "rejected_ids")] for line in trainer.train_dataset
    ] == sampled
    trainer.train()
    for mine, theirs in zip(ours, trainer.state.log_history):
        assert mine["shared/loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    assert ours[1]["shared/loss"] < ours[0]["shared/loss"] == pytest.approx(math.log(2), abs=1e-4)


def test_the_figures_of_a_step(tiny_folder, forest, tmp_path):
    """malt §4.2: a margin is beta times the gap of the changes of log-prob; lengths and counts stand beside."""
    first, *_, last = run(tiny_folder, tmp_path / "r", max_steps=8, pairs_per_step=16, beta=0.5)
    assert first["verifier/pairs"] + first["refiner/pairs"] == len(
        (tmp_path / "r" / "pairs" / "00-shared.jsonl").read_text().splitlines()
    )
    assert first["refiner/chosen_tokens"] > 1 and first["refiner/dropped"] == 0
    assert last["shared/margin"] == pytest.approx(
        0.5 * (last["shared/chosen_change"] - last["shared/rejected_change"]), rel=1e-3
    )
    assert last["shared/pair_accuracy"] > 0.9 and last["shared/margin"] > 0.1
    assert first["shared/margin"] == pytest.approx(0, abs=1e-3)


def test_overlong_pairs_are_left_out_and_counted(tiny_folder, forest, tmp_path):
    """malt §10 row 27: dropped and counted, never cut; a role without any left stops with its name."""
    longest = max(
        len(t.completion.prompt_ids) + len(t.completion.output_ids) for tree in forest for t in tree.episode.turns
    )
    first, *_ = run(tiny_folder, tmp_path / "r", max_steps=1, max_length=longest - 1)
    assert first["refiner/dropped"] >= 1 and first["verifier/dropped"] == 0
    with pytest.raises(stage_of.DataShort, match=r"all \d+ pairs of the role 'verifier' are longer than 9 tokens"):
        run(tiny_folder, tmp_path / "s", max_steps=1, max_length=9)


def test_test_rows_are_refused(tiny_folder, forest, tmp_path):
    """malt §10 row 19."""
    forest[2] = replace(forest[2], split="test")
    with pytest.raises(ValueError, match=r"task made/2 is of the split 'test', which is never trained on"):
        run(tiny_folder, tmp_path / "r", max_steps=1)


@pytest.mark.parametrize("options", [{}, {"lora_r": 4, "lora_dropout": 0.3}], ids=["full", "adapter"])
def test_a_policy_starts_again_from_its_base(tiny_folder, forest, options):
    """malt §4.4: `start: base` of a later round; a fresh adapter says what the base says, without dropout."""
    policies = load_policies({n: PolicyPart(model=str(tiny_folder), **options) for n in ("p", "other")}, str)
    policy, other = policies.values()
    rows = [r for r in pair_rows(groups(forest, Rules()), Rules()) if r.role == "verifier"]
    base = stage_of.reference(policy, rows)
    with torch.no_grad():
        for parameter in (*policy.parameters(), *other.parameters()):
            parameter.add_(0.02)
    beside = trl_bridge.fingerprint(other)
    assert flat(stage_of.reference(policy, rows)) != pytest.approx(flat(base), abs=0.1)
    policy.restart(tiny_folder, 3)
    assert flat(stage_of.reference(policy, rows)) == pytest.approx(flat(base), abs=1e-4)
    assert trl_bridge.fingerprint(other) == beside
    first = trl_bridge.fingerprint(policy)
    policy.restart(tiny_folder, 3)
    assert trl_bridge.fingerprint(policy) == first


def test_a_sampling_copy_follows_a_replaced_adapter(tiny_folder):
    """The copy in another precision has the adapters in the model's order, also after one was made anew."""
    from cothink.engines.weights import Weights

    policies = load_policies({n: PolicyPart(model=str(tiny_folder), lora_r=2) for n in ("a", "b")}, str)
    one, two = policies.values()
    copied = Weights(one.model, policies, torch.bfloat16)
    copied.refresh()
    one.restart(tiny_folder, 1)
    with torch.no_grad():
        for policy, value in ((one, 0.25), (two, 0.5)):
            for parameter in policy.parameters():
                parameter.fill_(value)
    one.version = two.version = 1
    copied.refresh()
    for name, value in (("a", 0.25), ("b", 0.5)):
        mine = [p for n, p in copied.model.named_parameters() if f".policy-{name}." in n]
        assert mine and all(bool((p == value).all()) for p in mine)


@pytest.mark.parametrize("times", [1, 3])
def test_an_update_of_dpo_that_is_not_finite_is_left_out_and_three_end_the_stage(
    tiny_folder, tmp_path, forest, monkeypatch, times
):
    compute, count = DPOTrainer.compute_loss, [0]

    def compute_loss(self, *args, **kwargs):
        count[0] += self.is_in_train  # the check of the start costs no update
        return compute(self, *args, **kwargs) * (math.nan if 2 <= count[0] < 2 + times else 1.0)

    monkeypatch.setattr(DPOTrainer, "compute_loss", compute_loss)
    options = {"max_steps": 4, "pairs_per_step": 4, "microbatch_pairs": 4}
    if times == 3:
        with pytest.raises(TrainingError, match=r"The loss is nan: look at the \d+ pairs and their reference"):
            run(tiny_folder, tmp_path / "run", **options)
        return
    rows = run(tiny_folder, tmp_path / "run", **options)
    assert [row.get("shared/skipped_updates", 0) for row in rows] == [0, 1, 0, 0]
    assert math.isnan(rows[1]["shared/loss"]) and all(
        bool(t.isfinite().all()) for t in weights(tmp_path / "run").values()
    )
