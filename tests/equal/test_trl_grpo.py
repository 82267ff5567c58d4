"""With one role and one turn, our advantages and losses are those of TRL's GRPOTrainer: values and gradients."""

import copy

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from cothink.attention import flat
from cothink.batch import pad, weights_for
from cothink.estimators import dr_grpo, grpo
from cothink.logprobs import token_logprobs
from cothink.losses import policy
from cothink.types import Sample, ScoredTurn

PROMPTS = ["1 2", "3 4 5 6 7", "8 9 1"]
GROUP, LIMIT = 4, 7


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    words = ["<pad>", "<eos>", "<unk>", *map(str, range(13))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=0, eos_token_id=1, bos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    args = GRPOConfig(
        str(tmp_path_factory.mktemp("trl")), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        per_device_train_batch_size=len(PROMPTS) * GROUP, num_generations=GROUP, max_completion_length=LIMIT, seed=0,
    )  # fmt: skip

    def reward(completion_ids, **_):
        return [float(sum(ids) % 3) for ids in completion_ids]

    return GRPOTrainer(
        LlamaForCausalLM(config),
        reward,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": p} for p in PROMPTS]),
        processing_class=tokenizer,
    )


@pytest.fixture(scope="module")
def rollout(trainer):
    """What TRL generated and scored, made off-policy by noise on the old and the reference log-probs."""
    trainer.model.eval()
    inputs = trainer._generate_and_score_completions([{"prompt": p} for p in PROMPTS for _ in range(GROUP)])
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        now, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, inputs["completion_ids"].shape[1]
        )
    torch.manual_seed(1)
    inputs["old_per_token_logps"] = now - 0.7 * torch.randn_like(now)
    inputs["ref_per_token_logps"] = now - 0.5 * torch.randn_like(now)
    return inputs


def rows(inputs):
    """TRL's tensors as our samples, and the reference log-probs of their trained tokens."""
    made, reference = [], []
    for k in range(len(inputs["prompt_ids"])):
        prompt = inputs["prompt_ids"][k][inputs["prompt_mask"][k].bool()].tolist()
        real = inputs["completion_mask"][k].bool()
        answer = inputs["completion_ids"][k][real].tolist()
        blank = [0.0] * len(prompt)
        old = (*blank, *inputs["old_per_token_logps"][k][real].tolist())
        gain = (*blank, *[inputs["advantages"][k].item()] * len(answer))
        turns = (*[-1] * len(prompt), *[0] * len(answer))
        made.append(Sample("p", "solver", f"e{k}/solver", (*prompt, *answer), turns, old, gain))
        reference.append(inputs["ref_per_token_logps"][k][real])
    return made, torch.cat(reference)


def ours(trainer, inputs, aggregate, **options):
    samples, reference = rows(inputs)
    refs = {"turns_ref": 1, "length_ref": LIMIT} if aggregate == "const_token" else {}
    batch = pad(samples, weights_for(samples, aggregate, **refs))
    batch.ref_logprobs = torch.zeros_like(batch.logprobs).masked_scatter(batch.turns >= 0, reference)
    # A model of its own: TRL replaces the forward pass of the one it was given.
    model = LlamaForCausalLM(copy.deepcopy(trainer.model.config)).eval()
    model.load_state_dict(trainer.model.state_dict())
    with flat(model):
        logprobs, _, _ = token_logprobs(model, batch)
    loss, metrics = policy(logprobs, batch, log_ratio_max=None, **options)
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    return loss.item(), grads, {k: v / n for k, (v, n) in metrics.items() if n}


def theirs(trainer, inputs, **knobs):
    trainer.loss_type = knobs.get("loss_type", "grpo")
    trainer.importance_sampling_level = knobs.get("level", "token")
    trainer.epsilon_low, trainer.epsilon_high = knobs.get("low", 0.2), knobs.get("high", 0.28)
    trainer.beta, trainer.args.delta = knobs.get("beta", 0.0), knobs.get("delta")
    trainer.args.use_bias_correction_kl = knobs.get("bias_correction", False)
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    clip = trainer._metrics["eval"].get("clip_ratio/region_mean", [None])[-1]
    return loss.item(), {n: p.grad.clone() for n, p in trainer.model.named_parameters()}, clip


PLAIN = {"clip": "ppo", "low": 0.2, "high": 0.28, "dual_clip": None}
PAIRS = {
    "grpo": ({"loss_type": "grpo"}, {"aggregate": "episode_token_mean", **PLAIN}),
    "bnpo": ({"loss_type": "bnpo"}, {"aggregate": "token_mean", **PLAIN}),
    "dapo": ({"loss_type": "dapo"}, {"aggregate": "token_mean", **PLAIN, "clip": "clip_higher"}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"aggregate": "const_token", **PLAIN}),
    "dual_clip": ({"delta": 3.0}, {"aggregate": "episode_token_mean", **PLAIN, "dual_clip": 3.0}),
    "gspo": (
        {"level": "sequence", "low": 3e-4, "high": 4e-4},
        {"aggregate": "episode_turn_mean", "ratio": "turn_geo", "clip": "gspo"},
    ),
    "cispo": ({"loss_type": "cispo", "high": 1.28}, {"aggregate": "token_mean", "clip": "cispo"}),
    "sapo": ({"loss_type": "sapo"}, {"aggregate": "episode_token_mean", "clip": "sapo"}),
    "k3": ({"beta": 0.1}, {"aggregate": "episode_token_mean", **PLAIN, "kl": "k3", "kl_beta": 0.1}),
    "k3_iw": (
        {"beta": 0.1, "bias_correction": True},
        {"aggregate": "episode_token_mean", **PLAIN, "kl": "k3_iw", "kl_beta": 0.1},
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_loss_and_gradient_equal_trl(trainer, rollout, name):
    knobs, options = PAIRS[name]
    loss, grads, clip = theirs(trainer, rollout, **knobs)
    got, own, means = ours(trainer, rollout, **options)
    assert abs(loss) > 1e-3 and max(g.abs().max() for g in grads.values()) > 1e-3
    assert got == pytest.approx(loss, abs=1e-6)
    assert set(own) == set(grads)
    for parameter, grad in grads.items():
        assert torch.allclose(own[parameter], grad, atol=1e-6), parameter
    if options["clip"] in ("ppo", "clip_higher"):
        assert clip > 0 and means["clip_fraction"] == pytest.approx(clip, abs=1e-6)


def test_advantages_equal_trl(trainer, rollout, monkeypatch):
    samples, _ = rows(rollout)
    rewards = [float(sum(i for i, t in zip(s.ids, s.turns) if t >= 0) % 3) for s in samples]
    turns = [ScoredTurn(str(k // GROUP), f"e{k}", "solver", "p", 0, r, 1) for k, r in enumerate(rewards)]
    assert len(set(rewards)) == 3
    assert rollout["advantages"].tolist() == pytest.approx(grpo(turns, eps=1e-4), abs=1e-6)
    monkeypatch.setattr(trainer, "scale_rewards", "none")
    monkeypatch.setattr(trainer, "beta", 0.0)
    torch.manual_seed(2)
    again = trainer._generate_and_score_completions([{"prompt": p} for p in PROMPTS for _ in range(GROUP)])
    real = [ids[m.bool()].tolist() for ids, m in zip(again["completion_ids"], again["completion_mask"])]
    turns = [ScoredTurn(str(k // GROUP), f"e{k}", "solver", "p", 0, float(sum(r) % 3), 1) for k, r in enumerate(real)]
    assert again["advantages"].tolist() == pytest.approx(dr_grpo(turns), abs=1e-6)
