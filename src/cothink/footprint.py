"""Bytes of memory that a policy takes to hold, to sample from and to train: arithmetic over a model's sizes.

Each term is a tensor that some line of code makes; `tests/by_hand/test_footprint.py` counts those that autograd keeps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cothink.shapes import Linear, Shape

WIDE, NARROW = 4, 2
"""Bytes of a float32 and of a bfloat16."""
MOMENTS = 2
"""Numbers that AdamW keeps beside each weight."""
CHUNK = 1 << 24
"""Logits that the log-probs hold at once (`logprobs.CHUNK`)."""
PREFILL = 4096
"""Prompt tokens that join one forward pass of the local engine (`continuous.PREFILL`)."""
BUCKET = 1 << 24
"""Gradients that processes add up in one message (`ranks.BUCKET`)."""


@dataclass(frozen=True, slots=True)
class Build:
    """How one policy's model computes and learns.

    `rank` None trains full weights: float32, and `narrow` computes in bfloat16 under autocast. With a rank the base
    itself is `narrow`, frozen, and the adapter float32. `targets` as PEFT reads them; None: every linear layer.
    """

    shape: Shape
    rank: int | None = None
    narrow: bool = False
    checkpointing: bool = False
    dropout: bool = False
    targets: str | tuple[str, ...] | None = None

    @property
    def computing(self) -> int:
        """Bytes of a number in most of the computation."""
        return NARROW if self.narrow else WIDE

    @property
    def stream(self) -> int:
        """Bytes of a number that goes from block to block."""
        return self.computing if self.rank is not None else WIDE

    @property
    def weights(self) -> int:
        """Bytes of the model without its adapter."""
        return self.shape.parameters * self.stream

    @property
    def learned(self) -> int:
        """How many weights learn."""
        if self.rank is None:
            return self.shape.parameters
        return self.shape.layers * sum(self.rank * (x.inputs + x.outputs) for x in self.adapted())

    def adapted(self) -> list[Linear]:
        """The linear layers of a block that have an adapter; the output layer has none (PEFT's `all-linear`)."""
        if self.rank is None:
            return []
        named = self.targets
        if named is None or named == "all-linear":
            return list(self.shape.linears())
        if isinstance(named, str):
            return [x for x in self.shape.linears() if re.fullmatch(named, f"model.layers.0.{x.name}")]
        return [x for x in self.shape.linears() if any(x.name.endswith(n) for n in named)]


@dataclass(frozen=True, slots=True)
class Load:
    """One microbatch: tokens computed, keys read (every row reads all of its own), the longest row, tokens learned.

    `flat` is cothink's own attention; TRL's trainers pad rows, and repeat keys for the heads that share them.
    """

    tokens: int
    read: int
    longest: int
    learned: int
    flat: bool = True


def kept(how: Build, load: Load) -> int:
    """Bytes that one block keeps of a microbatch for its backward pass."""
    s, c = how.shape, how.computing
    norms = 2 * s.hidden * WIDE + 2 * WIDE  # their inputs, in float32, and one reciprocal each
    if how.rank is None:
        norms += 2 * s.hidden * WIDE  # normed, for the gradient of the norms' own weights
    if s.qk_norm:
        norms += (1 if how.rank else 2) * (s.queries + s.keys) * WIDE + (s.heads + s.kv_heads) * WIDE
    attention = 2 * s.queries * c + s.heads * WIDE  # queries, what comes out, and the sum of each softmax
    gate = 3 * s.inner * c  # gate, silu(gate), up
    keys = 2 * (s.keys if load.flat else s.queries) * c
    return load.tokens * (norms + attention + gate + _inputs(how)) + load.read * keys


def _inputs(how: Build) -> int:
    """Bytes a token that the linear layers of a block keep as their input, for the gradient of their weights."""
    s = how.shape
    if how.rank is None and how.narrow:  # autocast converts the input anew for each layer; the last one's is narrow
        return sum(x.inputs for x in s.linears()) * NARROW
    if how.rank is None:
        return (2 * s.hidden + s.queries + s.inner) * WIDE
    own = sum(how.rank * WIDE for _ in how.adapted())  # what stands between the two halves of an adapter
    if how.dropout:  # its result and what it multiplies with (a GPU keeps less of the latter), for each adapter
        return own + sum(x.inputs * 2 * WIDE for x in how.adapted())
    if how.narrow:  # each adapter converts its input to float32
        return own + sum(x.inputs * WIDE for x in how.adapted())
    same = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "mlp", "up_proj": "mlp"}
    inputs = {same.get(n := x.name.rpartition(".")[2], n): x.inputs for x in how.adapted()}
    return own + sum(inputs.values()) * WIDE


def backward(how: Build, load: Load) -> int:
    """Bytes of gradients that are on their way through one block at the same time."""
    s = how.shape
    return load.tokens * (3 * s.inner * how.computing + 2 * s.hidden * how.stream)


def activations(how: Build, load: Load) -> int:
    """Bytes that a forward pass of a microbatch keeps for the backward pass, and the backward pass adds."""
    s = how.shape
    block = kept(how, load)
    blocks = s.layers * load.tokens * s.hidden * how.stream + block if how.checkpointing else s.layers * block
    rest = load.tokens * (
        s.hidden * WIDE * (2 if how.rank is None else 1) + 2 * s.head * how.computing
    )  # last norm, angles
    return blocks + rest + mask(how, load) + backward(how, load) + copies(how)


def mask(how: Build, load: Load) -> int:
    """Bytes of who reads whom: a number for each pair and query head of a group; TRL's kernels need none."""
    each = how.shape.heads // how.shape.kv_heads * how.computing + 1
    return load.tokens * load.longest * each if load.flat else 0


def copies(how: Build) -> int:
    """Bytes of the bfloat16 copies of float32 weights that autocast keeps until the pass is over."""
    mixed = how.rank is None and how.narrow
    return how.shape.layers * how.shape.block * NARROW if mixed else 0


def output(how: Build, load: Load) -> int:
    """Bytes that log-probs of the learned tokens take: their states, chunks of logits, the output layer's gradient."""
    s = how.shape
    logits = min(load.learned, max(1, CHUNK // s.vocabulary)) * s.vocabulary
    states = 2 * load.learned * s.hidden * how.stream  # and their gradients
    gradient = 2 * s.embedding * WIDE if how.rank is None else 0  # a sum over chunks, and the next chunk's
    narrow = s.embedding * NARROW if how.narrow and how.rank is None else 0
    return states + 3 * logits * WIDE + gradient + narrow


def stepping(how: Build, fused: bool) -> int:
    """Bytes that an AdamW step takes for a moment: `fused` over all weights (a GPU), or the largest of them."""
    s = how.shape
    largest = max(s.embedding, s.hidden * s.inner) if how.rank is None else how.rank * s.inner
    return (how.learned if fused else 2 * largest) * WIDE


def keys(shape: Shape, width: int) -> int:
    """Bytes that the keys and values of one token take in the engine's cache."""
    return 2 * shape.layers * shape.keys * width


def speaking(how: Build, rows: int, prompts: int) -> int:
    """Bytes that one forward pass of the local engine takes beside its cache, for `rows` rows and new prompt tokens."""
    s, c = how.shape, how.computing
    passing = rows + min(prompts, 2 * PREFILL)
    return passing * (3 * s.inner + 6 * s.hidden) * c + rows * s.vocabulary * (c + WIDE)
