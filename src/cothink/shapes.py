"""The sizes of a model, from its config.json alone: how many weights it has, and where they stand."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ShapeError(ValueError):
    """A model whose sizes cannot be known here, with what to do about it."""


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear layer of a block: `name` as in the model, its sizes, and whether it has a bias."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of Llama's kind: blocks of grouped-query attention and a gated MLP, with norms before both.

    `biased` names the linear layers that have a bias; `qk_norm` says that queries and keys have a norm of their own.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    vocabulary: int
    tied: bool
    biased: tuple[str, ...] = ()
    qk_norm: bool = False

    @property
    def queries(self) -> int:
        """Numbers of one token's queries; as many come out of its attention."""
        return self.heads * self.head

    @property
    def keys(self) -> int:
        """Numbers of one token's keys; its values have as many."""
        return self.kv_heads * self.head

    @property
    def embedding(self) -> int:
        """Weights of the table of tokens; the output layer has as many, or is the same table where `tied`."""
        return self.vocabulary * self.hidden

    def linears(self) -> Iterator[Linear]:
        """The linear layers of one block."""
        for name, inputs, outputs in (
            ("self_attn.q_proj", self.hidden, self.queries),
            ("self_attn.k_proj", self.hidden, self.keys),
            ("self_attn.v_proj", self.hidden, self.keys),
            ("self_attn.o_proj", self.queries, self.hidden),
            ("mlp.gate_proj", self.hidden, self.inner),
            ("mlp.up_proj", self.hidden, self.inner),
            ("mlp.down_proj", self.inner, self.hidden),
        ):
            yield Linear(name, inputs, outputs, name.rpartition(".")[2] in self.biased)

    @property
    def block(self) -> int:
        """Weights of one block."""
        linear = sum(x.inputs * x.outputs + x.outputs * x.bias for x in self.linears())
        return linear + 2 * self.hidden + 2 * self.head * self.qk_norm

    @property
    def parameters(self) -> int:
        """All weights; shared ones count once."""
        return self.layers * self.block + self.hidden + self.embedding * (1 if self.tied else 2)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` whose blocks are those of a `Shape`."""

# Sizes in the config.json that each model's publisher keeps on the hub; for models that are not on this machine.
LLAMA_8B = Shape(4096, 32, 32, 8, 128, 14336, 128256, tied=False)
LLAMA_1B = Shape(2048, 16, 32, 8, 64, 8192, 128256, tied=True)
LLAMA_3B = Shape(3072, 28, 24, 8, 128, 8192, 128256, tied=True)
QWEN_7B = Shape(3584, 28, 28, 4, 128, 18944, 152064, tied=False, biased=ATTENTION[:3])
QWEN_1B = Shape(1536, 28, 12, 2, 128, 8960, 151936, tied=True, biased=ATTENTION[:3])
SMOLLM2 = Shape(576, 30, 9, 3, 64, 1536, 49152, tied=True)
KNOWN = {
    "meta-llama/Llama-3.1-8B": LLAMA_8B,
    "meta-llama/Llama-3.2-1B": LLAMA_1B,
    "meta-llama/Llama-3.2-3B": LLAMA_3B,
    "Qwen/Qwen2.5-7B": QWEN_7B,
    "Qwen/Qwen2.5-Math-7B": QWEN_7B,
    "Qwen/Qwen2.5-1.5B": QWEN_1B,
    "Qwen/Qwen2.5-Math-1.5B": QWEN_1B,
    "HuggingFaceTB/SmolLM2-135M": SMOLLM2,
    "smollm2": SMOLLM2,
}


def shape(model: str) -> Shape:
    """The sizes of a model that a recipe names; raises ShapeError where they cannot be known without a network."""
    folder = local(model)
    if folder is not None and (folder / "config.json").is_file():
        return read(json.loads((folder / "config.json").read_text(encoding="utf-8")), model)
    known = KNOWN.get(model.removesuffix("-Instruct"))
    if known is None:
        cure = "name a folder that is" if folder is not None else f"`hf download {model} config.json` brings it"
        raise ShapeError(f"the sizes of {model} are not known: its config.json is not here; {cure}")
    return known


def read(config: Mapping[str, Any], model: str = "this model") -> Shape:
    """The sizes that a config.json holds; raises ShapeError for models of another build."""
    kind = config.get("model_type")
    if kind not in FAMILIES or config.get("quantization_config"):
        what = f"quantised {kind}" if kind in FAMILIES else kind
        raise ShapeError(f"the memory of {model} ({what}) is not known; it is for {', '.join(FAMILIES)}")
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        biased = ATTENTION[:3] if kind == "qwen2" else ATTENTION if config.get("attention_bias") else ()
        return Shape(
            hidden,
            config["num_hidden_layers"],
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or hidden // heads,
            config["intermediate_size"],
            config["vocab_size"],
            tied=config.get("tie_word_embeddings", False),
            biased=biased + (MLP if config.get("mlp_bias") else ()),
            qk_norm=kind == "qwen3",
        )
    except KeyError as error:
        raise ShapeError(f"the config.json of {model} has no {error.args[0]}") from None


def local(model: str) -> Path | None:
    """The folder where a model lies or would lie; None for one of the hub that is not in its cache."""
    from cothink import builtin, models

    if model.startswith("builtin:"):
        return builtin.path()
    if model == models.SMOLLM2:
        return models.cache_root() / models.SMOLLM2
    if model.startswith((".", "/", "~")):
        return Path(model).expanduser()
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{model.replace('/', '--')}"
    return next((p.parent for p in sorted(cache.glob("snapshots/*/config.json"))), None)
