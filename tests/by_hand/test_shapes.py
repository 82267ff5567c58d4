"""Sizes of models: counted by hand, against published totals, and against the weights themselves."""

from __future__ import annotations

import json

import pytest

from cothink import builtin, shapes
from cothink.preview import parameters

TINY = 4 * (4 * 128 * 128 + 3 * 128 * 384 + 2 * 128) + 128 + 357 * 128
"""Built-in model: 4 blocks of four 128x128 and three 128x384 layers and two norms; a norm; a shared table."""


def test_the_builtin_model_has_as_many_weights_as_its_files_hold():
    assert TINY == 898_816
    assert shapes.shape("builtin:tiny").parameters == TINY == parameters(builtin.path())


@pytest.mark.parametrize(
    ("model", "total"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
        ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400),
        ("meta-llama/Llama-3.2-3B", 3_212_749_824),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen2.5-Math-7B", 7_615_616_512),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008),
    ],
)
def test_models_of_the_hub_have_the_weights_that_their_pages_state(model, total, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert shapes.shape(model).parameters == total


def test_qwen2_has_biases_where_they_were_counted():
    # 7B: three biases a block, 3584 + 512 + 512 numbers in 28 blocks
    bare = shapes.Shape(3584, 28, 28, 4, 128, 18944, 152064, tied=False)
    assert shapes.QWEN_7B.parameters - bare.parameters == 28 * 4608


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_config_counts_what_transformers_makes_of_it(kind):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "intermediate_size": 20, "tie_word_embeddings": kind == "qwen3",
        "attention_bias": kind == "llama", "mlp_bias": kind == "llama",
    }  # fmt: skip
    if kind in ("qwen2", "mistral"):
        del sizes["attention_bias"], sizes["mlp_bias"]
    config = AutoConfig.for_model(kind, **sizes)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    assert shapes.read(config.to_dict()).parameters == sum(p.numel() for p in made.parameters())


def test_a_model_in_the_hub_cache_is_read_from_there(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(shapes.ShapeError, match="hf download some/model"):
        shapes.shape("some/model")
    place = tmp_path / "models--some--model" / "snapshots" / "abc"
    place.mkdir(parents=True)
    config = json.loads((builtin.path() / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"vocab_size": 358}))
    assert shapes.shape("some/model").parameters == TINY + 128


def test_a_model_of_another_build_is_refused(tmp_path):
    with pytest.raises(shapes.ShapeError, match="gpt2"):
        shapes.read({"model_type": "gpt2"})
    with pytest.raises(shapes.ShapeError, match="has no hidden_size"):
        shapes.read({"model_type": "llama"})
    with pytest.raises(shapes.ShapeError, match="is not here; name a folder that is"):
        shapes.shape(str(tmp_path / "absent"))
