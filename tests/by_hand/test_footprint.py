"""Bytes of memory, from hand-computed numbers, and against the tensors that autograd really keeps."""

from __future__ import annotations

import contextlib
import random
from types import SimpleNamespace

import pytest

from cothink import footprint as fp
from cothink.footprint import Build, Load
from cothink.shapes import LLAMA_8B, SMOLLM2, Shape

LOAD = Load(tokens=1024, read=1024, longest=64, learned=1024)


def test_weights_gradients_and_moments_by_hand():
    full = Build(SMOLLM2)
    assert full.weights == 4 * 134_515_008 and full.learned == 134_515_008
    adapter = Build(SMOLLM2, rank=8)
    # a block: q and o 8 x (576 + 576), k and v 8 x (576 + 192), three of the MLP 8 x (576 + 1536)
    assert adapter.learned == 30 * (2 * 9216 + 2 * 6144 + 3 * 16_896) == 2_442_240
    assert Build(LLAMA_8B, rank=16, narrow=True).weights == 2 * 8_030_261_248
    assert Build(LLAMA_8B, narrow=True).weights == 4 * 8_030_261_248  # full weights stay float32
    some = Build(SMOLLM2, rank=8, targets=("q_proj", "v_proj"))
    assert some.learned == 30 * (9216 + 6144) == Build(SMOLLM2, rank=8, targets=r".*\.(q|v)_proj").learned


def test_what_a_block_keeps_by_hand():
    # a token of SmolLM2's block in float32: 9 vectors of 576 (two inputs of norms, two normed, two inputs of layers,
    # queries, answers of attention, input of o_proj), 4 of 1536 in the MLP, keys and values of 192; 9 + 2 numbers
    token = 4 * (9 * 576 + 4 * 1536 + 2 * 192 + 9 + 2)
    assert token == 46_892
    assert fp.kept(Build(SMOLLM2), LOAD) == 1024 * token
    # keys are read once for each row, whatever else rows have in common
    assert fp.kept(Build(SMOLLM2), Load(1024, 3072, 64, 1024)) == 1024 * (token + 2 * 1536)


def test_what_checkpointing_keeps_by_hand():
    much, little = (fp.activations(Build(SMOLLM2, checkpointing=c), LOAD) for c in (False, True))
    assert much - little == 1024 * (29 * 46_892 - 30 * 4 * 576)


def test_keys_and_values_of_a_token_by_hand():
    assert fp.keys(LLAMA_8B, 2) == 2 * 32 * 8 * 128 * 2 == 131_072
    assert fp.keys(SMOLLM2, 4) == 2 * 30 * 3 * 64 * 4 == 46_080


def test_what_the_output_layer_takes_by_hand():
    # 341 rows of 49,152 logits are the most below 2**24, three times in float32; states and weights, two of each
    known = 3 * 4 * 341 * 49_152 + 2 * 4 * 1024 * 576 + 2 * 4 * 49_152 * 576
    assert fp.output(Build(SMOLLM2), LOAD) == known
    assert fp.output(Build(SMOLLM2, rank=8), LOAD) == known - 2 * 4 * 49_152 * 576


SMALL = Shape(48, 2, 6, 2, 8, 80, 64, tied=True)
BUILDS = {
    "full": Build(SMALL),
    "full in bfloat16": Build(SMALL, narrow=True),
    "adapter": Build(SMALL, rank=4),
    "adapter of three layers": Build(SMALL, rank=4, targets=("q_proj", "v_proj", "down_proj")),
    "adapter in bfloat16": Build(SMALL, rank=4, narrow=True),
    "adapter with dropout": Build(SMALL, rank=4, narrow=True, dropout=True),
    "own norms": Build(Shape(48, 2, 6, 2, 8, 80, 64, tied=True, qk_norm=True)),
}


@pytest.mark.parametrize("name", BUILDS)
def test_a_block_keeps_as_many_bytes_as_autograd_holds(name):
    """Two blocks hold more than one by exactly what the formula says of one."""
    how = BUILDS[name]
    (one, load), (two, _) = saved(how, 1), saved(how, 2)
    assert two - one == fp.kept(how, load) + fp.copies(how) // how.shape.layers - _vectors(how)


def _vectors(how):
    """Weights of a block that autocast does not copy: those of its norms."""
    return 2 * how.shape.hidden * 2 if fp.copies(how) else 0


def saved(how, layers):
    """Bytes of the tensors that a forward pass of some rows keeps, weights apart, and its load."""
    import torch

    from cothink.attention import Packed, causal, flat, hidden

    dice = random.Random(0)
    rows = [tuple(dice.randrange(how.shape.vocabulary) for _ in range(24)) for _ in range(4)]
    packed = Packed.of(rows, torch.device("cpu"))
    load = Load(tokens=96, read=96, longest=24, learned=96)
    model = made(how, layers)
    mine = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in mine:
            found[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)  # memory given back and taken again would count once
        return tensor

    mixed = how.narrow and how.rank is None
    context = torch.autocast("cpu", dtype=torch.bfloat16) if mixed else contextlib.nullcontext()
    with context, flat(causal(model)), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        hidden(model, packed.ids, packed.positions, packed)
    return sum(found.values()), load


def made(how, layers):
    """The model, with as many blocks as asked for."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    s = how.shape
    config = AutoConfig.for_model(
        "qwen3" if s.qk_norm else "llama", vocab_size=s.vocabulary, hidden_size=s.hidden, num_hidden_layers=layers,
        num_attention_heads=s.heads, num_key_value_heads=s.kv_heads, head_dim=s.head, intermediate_size=s.inner,
        tie_word_embeddings=s.tied,
    )  # fmt: skip
    narrow = how.narrow and how.rank is not None
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if narrow else torch.float32)
    if how.rank is None:
        return model.train()
    from peft import get_peft_model

    from cothink.policy import lora_config

    part = SimpleNamespace(
        lora_r=how.rank, lora_alpha=8, lora_dropout=0.5 if how.dropout else 0.0, target_modules=how.targets
    )
    return get_peft_model(model, lora_config(part), adapter_name="policy-p").train()
