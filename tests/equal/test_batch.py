"""However samples are split, padded, packed, merged or ordered, the loss and its gradient stay the same."""

import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cothink.batch import Batch, microbatches, minibatches, pad, weights_for
from cothink.losses import merge, policy
from cothink.types import Sample

MODES = ["token_mean", "turn_mean", "episode_token_mean", "episode_turn_mean", "const_token", "const_turn"]
KNOBS = [
    {"ratio": "token", "clip": "clip_higher"},
    {"ratio": "turn_geo", "clip": "ppo", "log_ratio_max": 3.0},
    {"ratio": "turn_arith", "clip": "sapo"},
    {"ratio": "episode_geo", "clip": "cispo"},
]


CASES = [(mode, KNOBS[i % 4]) for i, mode in enumerate(MODES)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=23, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


def sample(rng: random.Random, k: int, role: str = "meta", turns=(0, 1), heat=1.0, untrained=False) -> Sample:
    ids, index = [rng.randrange(23) for _ in range(rng.randint(1, 4))], []
    index += [-1] * len(ids)
    for turn in turns:
        for part, place in ((rng.randint(1, 5), -1 if untrained else turn), (rng.randint(0, 2), -1)):
            ids += [rng.randrange(23) for _ in range(part)]
            index += [place] * part
    logprobs = [rng.uniform(-4, -2) if t >= 0 else 0.0 for t in index]
    advantages = [rng.choice([-1.0, 0.5, 2.0]) if t >= 0 else 0.0 for t in index]
    unit = f"e{k}/{role}"
    return Sample("p", role, unit, tuple(ids), tuple(index), tuple(logprobs), tuple(advantages), temperature=heat)


def mixed(seed=1) -> list[Sample]:
    """Ragged samples of two roles; one unit has two samples, one sample trains nothing."""
    rng = random.Random(seed)
    made = [sample(rng, k, role, range(rng.randint(1, 3))) for k in range(5) for role in ("meta", "solver")]
    return [*made, sample(rng, 9, "meta", (0, 1)), sample(rng, 9, "meta", (2,)), sample(rng, 10, untrained=True)]


def logprobs(model, batch: Batch) -> torch.Tensor:
    """[B, L] log-probs."""
    logits = model(input_ids=batch.ids, attention_mask=batch.mask.long(), use_cache=False).logits
    picked = logits[:, :-1].log_softmax(-1).gather(2, batch.ids[:, 1:, None]).squeeze(2)
    return torch.nn.functional.pad(picked, (1, 0))


def weigh(samples, mode, **refs):
    refs = {"turns_ref": 3, "length_ref": 8, **refs} if mode.startswith("const") else refs
    return dict(zip(map(id, samples), weights_for(samples, mode, **refs)))


def step(model, groups, weights, make=pad, **options):
    """Summed loss, merged metrics and the gradient of all parameters over groups of samples."""
    model.zero_grad()
    total, metrics = 0.0, {}
    for group in groups:
        batch = make(group, [weights[id(s)] for s in group], dtype=torch.float64)
        loss, stats = policy(logprobs(model, batch), batch, **options)
        loss.backward()
        total += loss.item()
        merge(metrics, stats)
    return total, metrics, torch.cat([p.grad.flatten().clone() for p in model.parameters()])


def assert_same(a, b):
    # The model's norms round to float32 inside, so nothing is equal to the last bit.
    assert a[0] == pytest.approx(b[0], abs=1e-7)
    assert torch.allclose(a[2], b[2], atol=1e-7)
    assert {k: v for k, v in a[1].items() if b[1].get(k) != pytest.approx(v, abs=1e-6)} == {}


@pytest.mark.parametrize(("mode", "options"), CASES, ids=lambda x: x if isinstance(x, str) else x["ratio"])
def test_microbatches_and_order_never_change_the_step(model, mode, options):
    """credit §9 row 3."""
    samples = mixed()
    weights = weigh(samples, mode)
    whole = step(model, [samples], weights, **options)
    assert abs(whole[0]) > 1e-3 and whole[2].abs().sum() > 1e-3
    assert_same(whole, step(model, microbatches(samples, 40), weights, **options))
    assert_same(whole, step(model, microbatches(samples[::-1], 1), weights, **options))


def test_merged_turns_equal_separate_samples(model):
    """One sample of two turns against two samples, each with its own copy of the context."""
    whole = sample(random.Random(3), 0, turns=(0, 1))
    end = max(j for j, t in enumerate(whole.turns) if t == 0) + 1

    def part(stop, turn):
        keep = [t if t == turn else -1 for t in whole.turns[:stop]]
        lp = [x if t >= 0 else 0.0 for x, t in zip(whole.logprobs, keep)]
        adv = [x if t >= 0 else 0.0 for x, t in zip(whole.advantages, keep)]
        return Sample("p", "meta", whole.unit, whole.ids[:stop], tuple(keep), tuple(lp), tuple(adv))

    parts = [part(end, 0), part(len(whole.ids), 1)]
    other = sample(random.Random(4), 1)
    one, two = [whole, other], [*parts, other]
    for mode, options in CASES:
        merged = step(model, [one], weigh(one, mode), **options)
        assert_same(merged, step(model, [two], weigh(two, mode), **options))


def test_untrained_rows_do_not_enter_any_mean(model):
    """credit §9 row 9."""
    samples = mixed()
    for mode in MODES:
        refs = {"planned_units": 12} if mode.startswith("const") else {}
        with_empty = step(model, [samples], weigh(samples, mode, **refs), **KNOBS[0])
        filled = [s for s in samples if s.trained]
        assert_same(with_empty, step(model, [filled], weigh(filled, mode, **refs), **KNOBS[0]))
    (empty,) = [s for s in samples if not s.trained]
    alone = step(model, [[empty]], {id(empty): [0.0] * len(empty.ids)}, **KNOBS[1])
    assert alone[0] == 0 and alone[2].abs().sum() == 0


def test_microbatches_keep_units_whole_and_within_the_budget():
    samples = mixed()
    for padded in (False, True):
        groups = microbatches(samples, 60, padded=padded)
        assert sorted(id(s) for g in groups for s in g) == sorted(map(id, samples))
        assert sum("e9/meta" in {s.unit for s in g} for g in groups) == 1 and len(groups) > 1
        for g in groups:
            size = len(g) * max(len(s.ids) for s in g) if padded else sum(len(s.ids) for s in g)
            assert size <= 60 or len({s.unit for s in g}) == 1


def test_microbatches_count_common_beginnings_once():
    prompt = tuple(range(1, 21))

    def row(k, ids):
        blank = (0.0,) * len(ids)
        return Sample("p", "r", f"e{k}/r", ids, (-1,) * (len(ids) - 1) + (0,), blank, (*blank[1:], 1.0))

    siblings = [row(k, (*prompt, 50 + k, 60)) for k in range(4)]
    other = row(9, (9,) * 22)
    groups = microbatches([siblings[0], other, *siblings[1:]], 20 + 4 * 2)
    assert [len(g) for g in groups] == [4, 1] and groups[1] == [other]
    assert [len(g) for g in microbatches(siblings, 27)] == [3, 1]


def test_minibatches_mix_roles_and_are_nearly_equal():
    samples = mixed()
    parts = minibatches(samples, 3, seed=5)
    assert sorted(id(s) for p in parts for s in p) == sorted(map(id, samples))
    sizes = [len({s.unit for s in p}) for p in parts]
    assert max(sizes) - min(sizes) <= 1
    assert all({s.role for s in p} == {"meta", "solver"} for p in parts)
    again = minibatches(samples, 3, seed=5)
    assert [[id(s) for s in p] for p in again] == [[id(s) for s in p] for p in parts]
    assert [s.unit for s in minibatches(samples, 1, seed=6)[0]] != [s.unit for s in minibatches(samples, 1, seed=7)[0]]
    with pytest.raises(ValueError, match="at least 13"):
        minibatches(samples, 13)


def test_equal_role_balance_and_a_turn_trained_twice():
    samples = mixed()
    weights = weigh(samples, "turn_mean", role_balance="equal")
    share = {r: sum(sum(weights[id(s)]) for s in samples if s.role == r) for r in ("meta", "solver")}
    assert share == pytest.approx({"meta": 0.5, "solver": 0.5})
    with pytest.raises(ValueError, match="trained in two samples"):
        weights_for([samples[0], samples[0]], "turn_mean")


def test_bad_rows_are_named():
    first = Sample("p", "r", "e/r", (1, 2), (0, 0), (0.0, 0.0), (1.0, 1.0))
    with pytest.raises(ValueError, match="first token"):
        pad([first], [[0.5, 0.5]])
    (row,) = [sample(random.Random(0), 0)]
    with pytest.raises(ValueError, match="weights"):
        pad([row], [[1.0]])
    heats = [sample(random.Random(k), k, heat=h) for k, h in enumerate((1.0, 0.7))]
    assert pad(heats, weights_for(heats, "turn_mean")).temperature.tolist() == pytest.approx([1.0, 0.7])
    assert pad([], []).ids.shape == (0, 0)
