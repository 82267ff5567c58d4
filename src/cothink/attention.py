"""Attention over flat tokens: every linear layer sees each distinct token once, only attention knows who reads whom.

transformers lets a model's attention be any function. Ours gets all tokens of a batch in one line, without padding,
and a plan that says which keys each of them may read. The engine and the trainer bring their own plans.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cothink.batch import common

NAME = "cothink_flat"
WASTE = 1.5
"""Sequences share one padded attention call while padding makes it at most this much larger..."""
SMALL = 1 << 16
"""...or wastes no more than this many query-key pairs: a call of its own costs more."""

_checked: weakref.WeakKeyDictionary[Any, States | None] = weakref.WeakKeyDictionary()


class States(NamedTuple):
    """What a model keeps of each token: keys and values of `layers` layers with `heads` heads of `size` numbers."""

    layers: int
    heads: int
    size: int


class Plan(Protocol):
    """Who reads whom: `attend` gets queries [T, H, D] and new keys and values [T, Hkv, D], returns [T, H, D]."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor: ...


class Unsupported(RuntimeError):
    """The model's attention is more than softmax over all earlier tokens."""


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    plan: Plan | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls: [B, H, S, D] with B x S = T tokens in, [B, S, H, D] out."""
    odd = [name for name in ("sliding_window", "softcap", "s_aux") if other.get(name) is not None]
    if plan is None or odd or dropout:
        missing = "without a plan" if plan is None else f"with {', '.join(odd) or 'dropout'}"
        raise Unsupported(f"flat attention {missing}")
    batch, heads, length, size = query.shape
    q, k, v = (x.transpose(1, 2).reshape(batch * length, -1, size) for x in (query, key, value))
    out = plan.attend(module.layer_idx, q, k, v, scaling or size**-0.5)
    return out.view(batch, length, heads, -1), None


@contextlib.contextmanager
def flat(model: Any) -> Iterator[None]:
    """Within this context the model's attention is ours; with gradient checkpointing the backward pass needs it too."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    with _implementation(model.config, NAME):
        yield


@contextlib.contextmanager
def _implementation(config: Any, name: str) -> Iterator[None]:
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def hidden(model: Any, ids: Tensor, positions: Tensor, plan: Plan) -> Tensor:
    """Last hidden states [T, d] of flat tokens [T]; the caller holds `flat(model)`."""
    inner = causal(model).base_model
    # One token per row rather than one row: adapters may then differ from token to token.
    out = inner(input_ids=ids.unsqueeze(1), position_ids=positions.unsqueeze(1), use_cache=False, plan=plan)
    return out.last_hidden_state.squeeze(1)


def causal(model: Any) -> Any:
    """The transformers model inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def head(model: Any) -> Any:
    """The linear layer from hidden states to logits."""
    return causal(model).get_output_embeddings()


def fits(model: Any) -> bool:
    """Whether flat attention gives this model's own logits: measured once, not guessed from its name."""
    base = causal(model)
    if base not in _checked:
        _checked[base] = _measured(base)
    return _checked[base] is not None


def states(model: Any) -> States:
    """The shape of a fitting model's keys and values."""
    found = _checked[causal(model)] if fits(model) else None
    if found is None:
        raise Unsupported("this model has no flat attention")
    return found


def _measured(model: Any) -> States | None:
    device = next(model.parameters()).device
    rows = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [7, 3]]
    packed = Packed.of(rows, device)
    seen: dict[int, tuple[torch.Size, torch.Size]] = {}

    class Looking:
        def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            seen[layer] = k.shape[1:], v.shape[1:]
            return packed.attend(layer, q, k, v, scale)

    training = model.training
    model.eval()
    try:
        with torch.no_grad(), flat(model):
            mine = head(model)(hidden(model, packed.ids, packed.positions, Looking())).float()
        own = model.config._attn_implementation
        with torch.no_grad(), _implementation(model.config, "sdpa" if own == NAME else own):
            for row, where in zip(rows, packed.places, strict=True):
                theirs = model(input_ids=torch.tensor([row], device=device), use_cache=False).logits[0].float()
                size = float(theirs.abs().max()) + 1e-6
                tolerance = 1e-3 if model.dtype == torch.float32 else 5e-2
                if float((mine[torch.tensor(where, device=device)] - theirs).abs().max()) > tolerance * size:
                    return None
    except (Unsupported, TypeError, AttributeError, RuntimeError):
        return None
    finally:
        model.train(training)
    if len({shape for both in seen.values() for shape in both}) != 1 or set(seen) != set(range(len(seen))):
        return None
    return States(len(seen), *seen[0][0])


@dataclass
class Bucket:
    """Sequences of similar length that share one padded attention call: N sequences, at most Q queries and K keys."""

    queries: Tensor  # [N, Q] flat places of the queries, padding repeats place 0
    keys: Tensor  # [N, K] flat places (or cache positions) of the keys
    mask: Tensor  # [N, 1, Q, K] bool, True where a query may read a key
    real: Tensor  # [M] places in the N x Q grid that hold a query
    to: Tensor  # [M] the flat place each of them belongs to
    _wide: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def wide(self, many: int, dtype: torch.dtype) -> Tensor:
        """The mask as numbers to add, [N, 1, many x Q, K]: made once for all layers."""
        if (many, dtype) not in self._wide:
            zero = torch.zeros(self.mask.shape, dtype=dtype, device=self.mask.device)
            self._wide[many, dtype] = zero.masked_fill_(~self.mask, float("-inf")).repeat(1, 1, many, 1)
        return self._wide[many, dtype]


class Packed:
    """Sequences laid out flat with equal beginnings stored once: a plan for a pass without a cache.

    `places[i][j]` is the flat place of token j of sequence i.
    """

    def __init__(self, ids: Tensor, positions: Tensor, places: list[list[int]], buckets: list[Bucket]):
        self.ids, self.positions, self.places, self.buckets = ids, positions, places, buckets
        self._queries = torch.cat([b.queries.flatten() for b in buckets])
        self._keys = torch.cat([b.keys.flatten() for b in buckets])
        starts = [0]
        for b in buckets:
            starts.append(starts[-1] + b.queries.numel())
        real = torch.cat([b.real + start for b, start in zip(buckets, starts, strict=False)])
        self._order = real[torch.cat([b.to for b in buckets]).argsort()]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], device: torch.device, *, share: bool = True) -> Packed:
        """Lays out the sequences; `share` False repeats equal beginnings."""
        flat_ids: list[int] = []
        positions: list[int] = []
        places: list[list[int]] = [[]] * len(rows)
        spans: list[tuple[int, int, list[int]]] = []  # first query, number of queries, places of all keys
        previous: Sequence[int] = ()
        line: list[int] = []
        for i in sorted(range(len(rows)), key=lambda i: tuple(rows[i])):
            row = rows[i]
            same = common(previous, row) if share else 0
            start = len(flat_ids)
            line = line[:same] + list(range(start, start + len(row) - same))
            flat_ids += row[same:]
            positions += range(same, len(row))
            places[i] = line
            if len(row) > same:
                spans.append((start, len(row) - same, line))
            previous = row
        buckets = [
            bucket([(range(s, s + n), line) for s, n, line in part], device)
            for part in by_size(spans, lambda s: (s[1], len(s[2])))
        ]
        return cls(torch.tensor(flat_ids, device=device), torch.tensor(positions, device=device), places, buckets)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See `Plan`."""
        # One gather for all buckets: the gradient of each gather is as large as all tokens.
        queries = q.index_select(0, self._queries).split([b.queries.numel() for b in self.buckets])
        sizes = [b.keys.numel() for b in self.buckets]
        keys, values = (x.index_select(0, self._keys).split(sizes) for x in (k, v))
        parts = [
            attend(
                qs.view(*b.queries.shape, *q.shape[1:]),
                ks.view(*b.keys.shape, *k.shape[1:]),
                vs.view(*b.keys.shape, *v.shape[1:]),
                b,
                scale,
            ).flatten(0, 1)
            for b, qs, ks, vs in zip(self.buckets, queries, keys, values, strict=True)
        ]
        return torch.cat(parts).index_select(0, self._order)


def bucket(spans: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device) -> Bucket:
    """A bucket of (places of the queries, places of the keys); the queries are the last of the keys."""
    import numpy as np

    n = len(spans)
    wide, deep = max(len(q) for q, _ in spans), max(len(k) for _, k in spans)
    queries, keys = np.zeros((n, wide), np.int64), np.zeros((n, deep), np.int64)
    first, many = np.zeros(n, np.int64), np.zeros(n, np.int64)
    for i, (q, k) in enumerate(spans):
        queries[i, : len(q)], keys[i, : len(k)] = q, k
        first[i], many[i] = len(k) - len(q), len(q)
    place = np.arange(wide)
    # Padding queries read key 0, so that no row of the softmax is empty.
    last = np.where(place < many[:, None], first[:, None] + place, 0)
    mask = np.arange(deep) <= last[:, :, None]
    real = np.flatnonzero((place < many[:, None]).reshape(-1))
    made = (queries, keys, mask[:, None], real, queries.reshape(-1)[real])
    q, k, who, where, to = (torch.from_numpy(x).to(device) for x in made)
    return Bucket(q, k, who, where, to)


def attend(q: Tensor, k: Tensor, v: Tensor, who: Bucket, scale: float) -> Tensor:
    """Masked attention [N, Q, H, D] of queries over keys and values [N, K, Hkv, D]."""
    n, wide, heads, size = q.shape
    groups = k.shape[2]
    many = heads // groups
    # Query heads that read the same keys stand beside each other as more queries: nothing of the keys is repeated.
    folded = q.view(n, wide, groups, many, size).permute(0, 2, 3, 1, 4).reshape(n, groups, many * wide, size)
    # Autocast would convert the mask anew in every layer, and keep each copy for the backward pass.
    narrow = torch.is_autocast_enabled(q.device.type)
    mask = who.wide(many, torch.get_autocast_dtype(q.device.type) if narrow else q.dtype)
    out = F.scaled_dot_product_attention(folded, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale)
    return out.view(n, groups, many, wide, -1).permute(0, 3, 1, 2, 4).reshape(n, wide, heads, -1)


def by_size(spans: Sequence[Any], size: Any) -> list[list[Any]]:
    """Groups of spans, longest first, whose padded area stays within `WASTE` of their own."""
    groups: list[list[Any]] = []
    own, deep, wide = 0, 0, 0
    for span in sorted(spans, key=lambda s: (-size(s)[1], -size(s)[0])):
        q, k = size(span)
        if groups:
            area = (len(groups[-1]) + 1) * max(wide, q) * deep
            if area <= WASTE * (own + q * k) + SMALL:
                groups[-1].append(span)
                own, wide = own + q * k, max(wide, q)
                continue
        groups.append([span])
        own, deep, wide = q * k, k, q
    return groups
