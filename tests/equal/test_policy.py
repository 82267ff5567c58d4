"""Equal is equal: however samples are cut, merged or shared, the gradient is the same."""

from __future__ import annotations

import contextlib
import math
import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from cothink import logprobs, losses
from cothink.batch import pad, weights_for
from cothink.finite import TrainingError
from cothink.loading import load_policies
from cothink.offpolicy import ess_fraction
from cothink.oldprobs import with_old
from cothink.parts import PolicyPart
from cothink.policy import Knobs, rate
from cothink.types import Sample


def load(folder, **specs):
    return load_policies({n: PolicyPart(model=str(folder), learning_rate=1e-2, **s) for n, s in specs.items()}, str)


def knobs(**changes):
    # wide clip: random behaviour log-probs must not clip, or microbatches would compare zeros
    loss = partial(losses.policy, clip="none", dual_clip=None, log_ratio_max=None)
    return Knobs(**{"loss": loss, "aggregate": "turn_mean", **changes})


def rows(policy, roles=("a", "b"), count=8, seed=0, turns=2):
    """Random samples of `turns` turns, with the log-probs of the policy itself."""
    rng = random.Random(seed)
    found = []
    for k in range(count):
        ids, places, advantages = [5, 6, 7], [-1] * 3, [0.0] * 3
        for t in range(turns):
            n, adv = rng.randint(2, 9), rng.choice([-1.0, 0.5, 2.0])
            ids += [rng.randrange(3, 250) for _ in range(n)] + [4, 9]
            places += [t] * n + [-1, -1]
            advantages += [adv] * n + [0.0, 0.0]
        role = roles[k % len(roles)]
        found.append(Sample("p", role, f"e{k}/{role}", tuple(ids), tuple(places), (0.0,) * len(ids), tuple(advantages)))
    batch = pad(found, [[0.0] * len(s.ids) for s in found])
    with torch.no_grad():
        values, _ = policy.logprobs(batch)
    return [
        Sample(s.policy, s.role, s.unit, s.ids, s.turns, tuple(values[i, : len(s.ids)].tolist()), s.advantages)
        for i, s in enumerate(found)
    ]


def gradient(policy, samples, k, check=False):
    policy.model.zero_grad()
    metrics = policy.accumulate(samples, k, check=check)
    grads = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
    assert sum(g.abs().sum() for g in grads) > 0
    return torch.cat([g.flatten() for g in grads]), metrics


@pytest.mark.parametrize("aggregate", ["turn_mean", "token_mean", "episode_turn_mean", "const_turn"])
def test_microbatches_are_memory_only(tiny_folder, aggregate):
    """rema §7 row 26; credit §9 row 3."""
    policy = load(tiny_folder, p={})["p"]
    samples = rows(policy)
    k = partial(knobs, aggregate=aggregate, turns_ref=2.0 if aggregate == "const_turn" else None)
    whole, m1 = gradient(policy, samples, k(microbatch_tokens=10**6))
    split, m8 = gradient(policy, samples, k(microbatch_tokens=1))
    assert torch.allclose(whole, split, atol=1e-6)
    assert m1["loss"][0] == pytest.approx(m8["loss"][0], abs=1e-6)


def test_merged_turns_equal_separate_samples(tiny_folder):
    """credit §9 row 3."""
    policy = load(tiny_folder, p={})["p"]
    samples = rows(policy, count=4)
    apart = []
    for s in samples:  # the second turn in a sample of its own, the first one there as context
        cut = max(j for j, t in enumerate(s.turns) if t == 0) + 1
        only = tuple(t if t == 1 else -1 for t in s.turns)
        first = Sample(s.policy, s.role, s.unit, s.ids[:cut], s.turns[:cut], s.logprobs[:cut], s.advantages[:cut])
        apart += [first, Sample(s.policy, s.role, s.unit, s.ids, only, s.logprobs, s.advantages)]
    merged, _ = gradient(policy, samples, knobs(aggregate="episode_turn_mean"))
    separate, _ = gradient(policy, apart, knobs(aggregate="episode_turn_mean"))
    assert torch.allclose(merged, separate, atol=1e-6)


def test_two_policies_of_equal_weights_equal_one_shared(tiny_folder):
    shared, left, right = load(tiny_folder, p={}, q={}, r={}).values()
    samples = rows(shared)
    k = knobs(aggregate="const_turn", turns_ref=2.0, planned_units=8)
    both, _ = gradient(shared, samples, k)
    a, _ = gradient(left, [s for s in samples if s.role == "a"], k)
    b, _ = gradient(right, [s for s in samples if s.role == "b"], k)
    assert torch.allclose(both, a + b, atol=1e-6)


@pytest.mark.parametrize("kind", [{}, {"lora_r": 2}, {"gradient_checkpointing": True}], ids=str)
def test_flat_tokens_equal_padded_rows(tiny_folder, kind, monkeypatch):
    """Log-probs, entropies and gradients; siblings of one prompt and rows of other lengths, a chunked output layer."""
    policy = load(tiny_folder, p=kind)["p"]
    samples = rows(policy, count=5)
    twin = samples[0]
    ids = (*twin.ids[:-3], *(3 + (i % 200) for i in twin.ids[-3:]))
    samples.append(Sample("p", twin.role, "twin/a", ids, twin.turns, twin.logprobs, twin.advantages))
    batch = pad(samples, weights_for(samples, "turn_mean"))
    model = policy.activate().train()
    weight = torch.rand(batch.ids.shape, generator=torch.Generator().manual_seed(0))

    def both(plain):
        with monkeypatch.context() as patch:
            patch.setattr(logprobs, "CHUNK", 1500)
            patch.setattr(logprobs, "is_flat", lambda model: not plain)
            model.zero_grad()
            with contextlib.nullcontext() if plain else policy.computing():
                values, entropies, computed = logprobs.token_logprobs(model, batch, entropy_in_loss=True)
                (values * weight + entropies * weight.flip(0)).sum().backward()
        return values, entropies, torch.cat([p.grad.flatten() for p in policy.parameters()]), computed

    one, two = both(plain=True), both(plain=False)
    for a, b in zip(one[:3], two[:3], strict=True):
        assert a.abs().sum() > 1 and torch.allclose(a, b, atol=1e-4, rtol=1e-4)
    assert two[3] < sum(len(s.ids) for s in samples) < one[3]


def test_samples_without_advantage_are_not_computed(tiny_folder):
    policy = load(tiny_folder, p={})["p"]
    samples = rows(policy, count=4)
    quiet = [replace(s, advantages=(0.0,) * len(s.ids)) for s in samples[:2]]
    mixed = [*quiet, *samples[2:]]
    fast, metrics = gradient(policy, mixed, knobs())
    assert metrics["tokens_skipped"][0] == sum(s.trained for s in quiet)
    # A KL or entropy term needs them all; here it is switched on with weight 0, so that the gradient is the same.
    slow, metrics = gradient(policy, mixed, knobs(entropy_in_loss=True))
    assert metrics["tokens_skipped"][0] == 0
    assert torch.allclose(fast, slow, atol=1e-6)
    policy.update(samples, knobs())
    after = [p.detach().clone() for p in policy.parameters()]
    done = policy.update(quiet, knobs())  # no gradient: momentum alone moves the weights, as with zeros
    assert done["tokens_computed"] == 0 and done["updates"] == 1
    assert not torch.equal(policy.parameters()[-2], after[-2])


def test_engine_and_trainer_that_disagree_stop_the_run(tiny_folder):
    policy = load(tiny_folder, p={})["p"]
    samples = rows(policy)
    _, metrics = gradient(policy, samples, knobs(), check=True)
    assert metrics["engine_gap_max"][0] < 1e-4
    s = samples[0]
    wrong = Sample(s.policy, s.role, s.unit, s.ids, s.turns, tuple(x - 0.1 for x in s.logprobs), s.advantages)
    with pytest.raises(TrainingError, match=r"differ by 0\.1"):
        policy.accumulate([wrong], knobs(), check=True)


def test_adapters_share_a_base_and_train_alone(tiny_folder):
    a, b = load(tiny_folder, a={"lora_r": 2}, b={"lora_r": 2}).values()
    assert a.model is b.model
    samples = rows(a)
    before = {n: p.clone() for n, p in a.model.named_parameters()}
    a.update(samples, knobs())
    changed = {n for n, p in a.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed and all(".policy-a." in n for n in changed)
    assert (a.version, b.version) == (1, 0)
    b.update(rows(b), knobs())
    assert any(".policy-b." in n for n, p in a.model.named_parameters() if not torch.equal(p, before[n]))


def test_updates_cut_the_batch_into_as_many_steps(tiny_folder):
    """rema §7 row 31; credit §3.12."""
    policy = load(tiny_folder, p={})["p"]
    assert policy.update(rows(policy), knobs(updates=4))["updates"] == 4
    assert policy.update(rows(policy)[:2], knobs(updates=4))["updates"] == 2  # fewer units than updates
    assert policy.update([], knobs())["updates"] == 0
    stopped = load(tiny_folder, p={})["p"]
    assert stopped.update(rows(stopped), knobs(updates=4, kl_stop=1e-12))["updates"] == 2  # the first has ratio 1


def test_non_finite_gradients_are_never_applied(tiny_folder):
    policy = load(tiny_folder, p={})["p"]
    samples = rows(policy)

    def broken(logprobs, batch):
        return (logprobs * batch.weights).sum() * float("nan"), {}

    before = [p.clone() for p in policy.parameters()]
    for _ in range(2):
        assert policy.update(samples, knobs(loss=broken))["skipped_updates"] == 1
    with pytest.raises(TrainingError, match="non-finite"):
        policy.update(samples, knobs(loss=broken))
    assert all(torch.equal(p, q) for p, q in zip(policy.parameters(), before))


@pytest.mark.parametrize("spec", [{}, {"lora_r": 2}])
def test_saved_and_loaded_training_goes_on_bit_for_bit(tiny_folder, tmp_path, spec):
    """credit §9 row 13."""
    one = load(tiny_folder, p=spec)["p"]
    one.update(rows(one), knobs(updates=2))
    one.save(tmp_path)
    one.save_state(tmp_path / "training")
    two = load(tiny_folder, p=spec)["p"]
    two.load(tmp_path, tmp_path / "training")
    assert two.version == 1
    fresh = rows(two, seed=1)
    for policy in (one, two):
        policy.update(rows(one, seed=1) if policy is one else fresh, knobs(updates=2), seed=3)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))


def test_plain_libraries_load_the_checkpoint(tiny_folder, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    full, lora = load(tiny_folder, full={}, lora={"lora_r": 2}).values()
    for policy in (full, lora):
        policy.update(rows(policy), knobs())
        policy.save(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "full")
    assert all(torch.equal(a, b) for a, b in zip(full.model.parameters(), again.parameters()))
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_folder), tmp_path / "lora")
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.allclose(adapted(ids).logits, lora.activate()(ids).logits, atol=1e-6)
    assert AutoTokenizer.from_pretrained(tmp_path / "lora").chat_template
    modes = [oct(f.stat().st_mode & 0o777) for f in tmp_path.rglob("*.safetensors")]
    assert modes and set(modes) == {"0o644"}


def test_bfloat16_full_weights_keep_float32_masters(tiny_folder):
    policy = load_policies({"p": PolicyPart(model=str(tiny_folder), dtype="bfloat16", learning_rate=1e-6)}, str)["p"]
    assert policy.mixed and policy.model.dtype == torch.float32
    before = [p.clone() for p in policy.parameters()]
    policy.update(rows(policy), knobs())
    changed = sum(int((a != b).sum()) for a, b in zip(before, policy.parameters()))
    assert changed > 0.5 * sum(p.numel() for p in before)  # steps of 1e-6 would round away on bfloat16 weights


def test_the_reference_of_a_resumed_run_is_the_stages_start(tiny_folder, tmp_path):
    policy = load(tiny_folder, p={})["p"]
    batch = pad(rows(policy), [[0.0] * len(s.ids) for s in rows(policy)])
    policy.keep_reference(tmp_path)
    start = policy.reference_logprobs(batch)
    policy.update(rows(policy), knobs())
    policy.save(tmp_path / "checkpoint")
    resumed = load(tiny_folder, p={})["p"]
    resumed.load(tmp_path / "checkpoint")
    resumed.keep_reference(tmp_path)
    assert torch.equal(resumed.reference_logprobs(batch), start)
    with torch.no_grad():
        assert not torch.allclose(resumed.logprobs(batch)[0], start)


def test_learning_rate_schedules():
    assert [rate("constant", k, 2, 10) for k in (0, 1, 2, 9)] == [0.5, 1.0, 1.0, 1.0]
    assert rate("linear", 6, 2, 10) == pytest.approx(0.5)
    assert rate("cosine", 6, 2, 10) == pytest.approx(0.5)
    assert rate("linear", 10, 2, 10) == 0.0


def test_a_new_adapter_is_drawn_from_the_recipes_seed_and_its_name(tiny_folder):
    """A run that died before its first checkpoint starts again with the same adapters."""

    def first(seed):
        kinds = {n: PolicyPart(model=str(tiny_folder), lora_r=4) for n in ("one", "two")}
        found = load_policies(kinds, str, seed=seed)
        return {n: torch.cat([w.flatten() for w in p.parameters()]) for n, p in found.items()}

    torch.rand(3)  # whatever happened before
    a, b, c = first(1), first(1), first(2)
    assert all(torch.equal(a[n], b[n]) and not torch.equal(a[n], c[n]) for n in a)
    assert not torch.equal(a["one"], a["two"])


@pytest.mark.parametrize("kind", ["tis_token", "mis_turn", "decoupled"])
def test_the_trainers_log_probs_before_the_updates_are_those_of_the_only_update(tiny_folder, kind):
    """credit §3.8: one forward pass more is spent only where weights move between sampling and the last update."""
    policy = load(tiny_folder, p={"lora_r": 2})["p"]
    policy.coarse = True  # the engine's numbers differ on purpose
    rng = random.Random(3)
    exact = rows(policy, count=4)
    noisy = [replace(s, logprobs=tuple(v + rng.gauss(0, 0.4) * (v != 0) for v in s.logprobs)) for s in exact]
    loss = partial(losses.policy, offpolicy=kind, rho_min=0.2, rho_max=1.5, clip="none", dual_clip=None)
    k = knobs(loss=loss, offpolicy=True)
    once, metrics = gradient(policy, noisy, k, check=True)
    both = with_old(policy, noisy, 64)
    assert [s.rollout for s in both] == [s.logprobs for s in noisy]
    for s, t in zip(both, exact, strict=True):
        assert s.logprobs == pytest.approx(t.logprobs, abs=1e-4)
    twice, again = gradient(policy, both, k, check=True)
    assert torch.allclose(once, twice, atol=1e-5)
    assert metrics["engine_gap"] == pytest.approx(again["engine_gap"], rel=1e-4) and metrics["engine_gap_max"][0] > 0.5
    none, _ = gradient(policy, exact, knobs(loss=partial(losses.policy, clip="none", dual_clip=None)))
    assert not torch.allclose(once, none, atol=1e-3)  # the factor does something
    # the same numbers on both sides: rho is 1 and the correction changes nothing
    same, calm = gradient(policy, exact, k, check=True)
    assert torch.allclose(same, none, atol=1e-5) and calm["offpolicy_fraction"][0] == 0
    policy.forget_optimizer()
    stats = policy.update(noisy, replace(k, updates=2))
    rhos = [math.exp(t - s) for a, b in zip(noisy, exact) for s, t, j in zip(a.logprobs, b.logprobs, a.turns) if j >= 0]
    assert stats["updates"] == 2 and 0.5 < stats["ess_fraction"] < 1 and stats["mismatch"] > 0.02
    assert ess_fraction(sum(rhos) / len(rhos), sum(r * r for r in rhos) / len(rhos)) == pytest.approx(
        stats["ess_fraction"], abs=0.08
    )  # the check sees the first mini-batch
