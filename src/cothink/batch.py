"""Samples become tensors: aggregation weights, mini-batches, micro-batches, padding."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from cothink.losses import Aggregate, aggregation_weights, balanced
from cothink.types import Sample


@dataclass
class Batch:
    """Rows of token ids and what the loss needs, B rows of L tokens.

    A row is one sample. Every log-prob stands at the token it belongs to: position j holds log p(ids[j] | ids[:j]).
    Untrained positions hold turn -1 and weight 0. Padding costs nothing but these numbers: the model gets flat tokens.
    """

    ids: Tensor  # [B, L] long
    mask: Tensor  # [B, L] bool, False on padding
    turns: Tensor  # [B, L] long, place of the turn in its unit, -1 = not trained
    logprobs: Tensor  # [B, L] log-probs of the policy that sampled: the engine's, or the trainer's where `rollout` is
    advantages: Tensor  # [B, L]
    weights: Tensor  # [B, L] aggregation weight of each token, taken over the whole optimiser batch
    unit: Tensor  # [B, L] long, one number per unit of this batch, -1 on padding
    role: Tensor  # [B, L] long, place in `roles`, -1 on padding
    temperature: Tensor  # [B] sampling temperature
    roles: tuple[str, ...]
    rollout: Tensor | None = None  # [B, L] log-probs of the engine that sampled, beside the trainer's `logprobs`
    ref_logprobs: Tensor | None = None  # [B, L] under the reference weights
    entropy: Tensor | None = None  # [B, L] of the current policy, with its graph if it is part of the loss

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        moved = {f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        return replace(self, **moved)


def weights_for(
    samples: Sequence[Sample],
    mode: Aggregate,
    *,
    length_ref: float | None = None,
    turns_ref: float | None = None,
    planned_units: float | None = None,
    role_balance: Literal["none", "equal"] = "none",
) -> list[list[float]]:
    """The weight of every token of each sample, 0 where nothing is trained.

    `samples` must be the whole optimiser batch: the denominators count units, and a unit may have several samples.
    """
    counts = [_turn_lengths(s) for s in samples]
    units: dict[str, dict[int, int]] = {}
    roles: dict[str, str] = {}
    for sample, lengths in zip(samples, counts):
        unit = units.setdefault(sample.unit, {})
        twice = unit.keys() & lengths.keys()
        if twice:
            raise ValueError(f"unit {sample.unit!r}: turn {min(twice)} is trained in two samples; train it in one")
        unit.update(lengths)
        roles[sample.unit] = sample.role
    by_turn = aggregation_weights(
        [list(u.values()) for u in units.values()],
        mode,
        length_ref=length_ref,
        turns_ref=turns_ref,
        planned_units=planned_units,
    )
    if role_balance == "equal":
        by_turn = balanced(by_turn, [list(u.values()) for u in units.values()], list(roles.values()))
    table = {name: dict(zip(u, w)) for (name, u), w in zip(units.items(), by_turn)}
    return [[table[s.unit].get(turn, 0.0) for turn in s.turns] for s in samples]


def _turn_lengths(sample: Sample) -> dict[int, int]:
    lengths: dict[int, int] = {}
    for turn in sample.turns:
        if turn >= 0:
            lengths[turn] = lengths.get(turn, 0) + 1
    return lengths


def minibatches(samples: Sequence[Sample], count: int, seed: int = 0) -> list[list[Sample]]:
    """`count` nearly equal parts for as many optimiser steps, whole units together, every role in each part."""
    if count < 1:
        raise ValueError(f"minibatches: count is {count}, it must be at least 1")
    units = _units(samples)
    if count > len(units):
        raise ValueError(f"{count} updates need at least {count} units of samples, this batch has {len(units)}")
    rng = random.Random(seed)
    by_role: dict[str, list[list[Sample]]] = {}
    for unit in units:
        by_role.setdefault(unit[0].role, []).append(unit)
    line = [unit for role in sorted(by_role) for unit in rng.sample(by_role[role], len(by_role[role]))]
    # Dealing role after role keeps the parts equal in size and in roles; the shuffle removes the role blocks.
    parts = [line[i::count] for i in range(count)]
    return [[s for unit in rng.sample(part, len(part)) for s in unit] for part in parts]


def microbatches(samples: Sequence[Sample], tokens: int, *, padded: bool = False) -> list[list[Sample]]:
    """Groups of at most `tokens` tokens to compute, whole units together; memory only.

    Samples that begin alike stand beside each other and count their common beginning once; `padded` counts rows as
    long as the longest instead, for models that need padding. A unit that is larger on its own gets its own group.
    """
    return _by_length(samples, tokens) if padded else _by_beginning(samples, tokens)


def shares(samples: Sequence[Sample], count: int) -> list[list[Sample]]:
    """`count` parts to compute side by side, whole units together, of nearly equal numbers of tokens.

    Units that begin alike stay beside each other, so that a part computes most common beginnings once.
    """
    if count == 1:
        return [list(samples)]
    units = sorted((sorted(u, key=lambda s: s.ids) for u in _units(samples)), key=lambda u: u[0].ids)
    parts: list[list[Sample]] = [[] for _ in range(count)]
    whole, before = sum(len(s.ids) for s in samples), 0
    for unit in units:
        size = sum(len(s.ids) for s in unit)
        parts[min(count - 1, (2 * before + size) * count // (2 * whole))] += unit  # where its middle lies
        before += size
    return parts


def _by_beginning(samples: Sequence[Sample], tokens: int) -> list[list[Sample]]:
    groups: list[list[Sample]] = []
    size = 0
    before: tuple[int, ...] = ()
    for unit in sorted((sorted(u, key=lambda s: s.ids) for u in _units(samples)), key=lambda u: u[0].ids):
        new, alone, last = 0, 0, before
        for k, sample in enumerate(unit):
            new += len(sample.ids) - common(last, sample.ids)
            alone += len(sample.ids) - (common(last, sample.ids) if k else 0)
            last = sample.ids
        if groups and size + new <= tokens:
            groups[-1] += unit
            size += new
        else:
            groups.append(list(unit))
            size = alone
        before = last
    return groups


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first elements two sequences share."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    low, high = 0, n  # the first `low` are equal, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _by_length(samples: Sequence[Sample], tokens: int) -> list[list[Sample]]:
    groups: list[list[Sample]] = []
    longest = 0
    for unit in sorted(_units(samples), key=lambda u: max(len(s.ids) for s in u)):
        longest = max(longest, max(len(s.ids) for s in unit))
        if groups and (len(groups[-1]) + len(unit)) * longest <= tokens:
            groups[-1] += unit
        else:
            groups.append(list(unit))
    return groups


def _units(samples: Sequence[Sample]) -> list[list[Sample]]:
    units: dict[str, list[Sample]] = {}
    for sample in samples:
        units.setdefault(sample.unit, []).append(sample)
    return list(units.values())


def pad(
    samples: Sequence[Sample],
    weights: Sequence[Sequence[float]],
    pad_id: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """One sample per row, filled up on the right. `weights` as `weights_for` returns them."""
    if len(samples) != len(weights):
        raise ValueError(f"{len(samples)} samples came with weights for {len(weights)}")
    width = max((len(s.ids) for s in samples), default=0)
    names = tuple(dict.fromkeys(s.role for s in samples))
    numbers = {unit: k for k, unit in enumerate(dict.fromkeys(s.unit for s in samples))}
    columns: dict[str, list[list]] = {k: [] for k in _FILL}
    for sample, weight in zip(samples, weights, strict=True):
        n = len(sample.ids)
        if n and sample.turns[0] >= 0:
            raise ValueError(f"sample of unit {sample.unit!r} trains its first token, which nothing predicts")
        if len(weight) != n:
            raise ValueError(f"sample of unit {sample.unit!r} has {n} tokens and {len(weight)} weights")
        line: dict[str, Sequence] = {
            "ids": sample.ids,
            "turns": sample.turns,
            "logprobs": sample.logprobs,
            "advantages": sample.advantages,
            "weights": weight,
            "unit": [numbers[sample.unit]] * n,
            "role": [names.index(sample.role)] * n,
            "rollout": sample.rollout or sample.logprobs,
        }
        for key, values in line.items():
            columns[key].append([*values, *[pad_id if key == "ids" else _FILL[key]] * (width - n)])
    # reshape: an empty list of rows is a batch of 0 x 0, not a vector
    made = {
        k: torch.tensor(v, dtype=dtype if isinstance(_FILL[k], float) else torch.long).reshape(len(samples), width)
        for k, v in columns.items()
    }
    if not any(s.rollout for s in samples):
        made.pop("rollout")
    heat = torch.tensor([s.temperature for s in samples], dtype=dtype)
    return Batch(**made, mask=made["unit"] >= 0, temperature=heat, roles=names)


# What stands on padding; a float here marks a column of real numbers.
_FILL: dict[str, int | float] = {
    "ids": 0,
    "turns": -1,
    "logprobs": 0.0,
    "advantages": 0.0,
    "weights": 0.0,
    "unit": -1,
    "role": -1,
    "rollout": 0.0,
}
