"""The running batch's keys and values: prompts by group, answers by row, both without holes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cothink.attention import Bucket, attend

ROOM = 64
"""Tokens by which a buffer grows: growing copies it."""


class Shelf:
    """Equal places for states of up to `length` tokens each; one tensor [2, places, length, heads, size] per layer."""

    def __init__(self, layers: int, heads: int, size: int, dtype: torch.dtype, device: torch.device):
        self._made = {"dtype": dtype, "device": device}
        self.layers = [torch.empty((2, 0, 0, heads, size), dtype=dtype, device=device) for _ in range(layers)]
        self.places, self.length = 0, 0

    def tokens(self, places: int, length: int) -> int:
        """How many tokens of memory it would hold after `grow(places, length)`."""
        places, length = self._rounded(places, length)
        return places * length

    def grow(self, places: int, length: int) -> None:
        """Makes room; layer by layer, so that there are never two copies of everything."""
        places, length = self._rounded(places, length)
        if (places, length) == (self.places, self.length):
            return
        for k, old in enumerate(self.layers):
            # Zeros, because a masked place still enters the sums: 0 times whatever memory held may be NaN.
            new = torch.zeros((2, places, length, *old.shape[3:]), **self._made)
            new[:, : self.places, : self.length] = old
            self.layers[k] = new
        self.places, self.length = places, length

    def shrink(self, places: int, length: int) -> None:
        """Gives memory back and keeps the first places and tokens."""
        length = min(self.length, -(-length // ROOM) * ROOM)
        self.layers = [old[:, :places, :length].clone() for old in self.layers]
        self.places, self.length = places, length

    def drop(self) -> None:
        """Gives all memory back."""
        self.shrink(0, 0)

    def read(self, place: int, start: int, end: int) -> list[Tensor]:
        """Views of the states of some tokens, one [2, tokens, heads, size] per layer."""
        return [layer[:, place, start:end] for layer in self.layers]

    def write(self, place: int, start: int, states: Tensor) -> None:
        """Puts states [layers, 2, tokens, heads, size] at a place."""
        for layer, new in zip(self.layers, states, strict=True):
            layer[:, place, start : start + new.shape[1]] = new

    def move(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """Copies whole places (from, to); no place is both."""
        if not moves:
            return
        source, target = (torch.tensor(x, device=self.layers[0].device) for x in zip(*moves, strict=True))
        for layer in self.layers:
            layer[:, target, :length] = layer[:, source, :length]

    def _rounded(self, places: int, length: int) -> tuple[int, int]:
        if places > self.places:
            places = max(places, min(2 * self.places, places + 64))
        return max(places, self.places), max(-(-length // ROOM) * ROOM, self.length)


@dataclass
class Step:
    """The plan of one forward pass: R rows say one more token each, then the tokens of new prompts follow."""

    prompts: Shelf
    answers: Shelf
    rows: int
    groups: int
    group_of: Tensor  # [R] the group of each row
    among: Tensor  # [R] its place among the rows of its group
    widest: int  # rows of the largest group
    written: Tensor  # [R] tokens of the answer already written, and so the place of this one
    prompt_mask: Tensor  # [G, 1, 1, P] 0 or -inf
    answer_mask: Tensor  # [R, 1, 1, A] 0 or -inf
    copies: tuple[Tensor, Tensor, Tensor]  # flat place, group, position: where the new prompts' states go
    new: list[tuple[Bucket, Tensor]]  # new queries by size, and the groups whose keys they read
    simple: bool  # every row is alone in its group, in the same order

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See `cothink.attention.Plan`."""
        precision = q.dtype
        q, k, v = (x.to(self.prompts.layers[layer].dtype) for x in (q, k, v))
        out = torch.empty_like(q)
        prompts, answers, r = self.prompts.layers[layer], self.answers.layers[layer], self.rows
        if self.new:
            flat, group, position = self.copies
            prompts[0][group, position], prompts[1][group, position] = k[flat], v[flat]
            for part, groups in self.new:
                keys, values = (x[groups, : part.keys.shape[1]] for x in (prompts[0], prompts[1]))
                found = attend(q[part.queries], keys, values, part, scale)
                out[part.to] = found.flatten(0, 1)[part.real]
        if r:
            line = torch.arange(r, device=q.device)
            answers[0][line, self.written], answers[1][line, self.written] = k[:r], v[:r]
            out[:r] = self._rows(q[:r], prompts, answers, scale)
        return out.to(precision)

    def _rows(self, q: Tensor, prompts: Tensor, answers: Tensor, scale: float) -> Tensor:
        r, heads, size = q.shape
        groups = answers.shape[3]
        many = heads // groups
        grid = q.unsqueeze(1)
        if not self.simple:
            grid = q.new_zeros(self.groups, self.widest, heads, size)
            grid[self.group_of, self.among] = q
        far, far_weight = _near(grid, prompts[:, : self.groups, : self.prompt_mask.shape[-1]], self.prompt_mask, scale)
        if self.simple:
            far, far_weight = far[:, 0], far_weight[:, 0]
        else:
            far, far_weight = far[self.group_of, self.among], far_weight[self.group_of, self.among]
        own, own_weight = _near(q.unsqueeze(1), answers[:, :r, : self.answer_mask.shape[-1]], self.answer_mask, scale)
        share = torch.sigmoid(own_weight[:, 0] - far_weight).unsqueeze(-1).to(q.dtype)
        return torch.lerp(far.reshape(r, groups, many, size), own[:, 0].reshape(r, groups, many, size), share).view(
            r, heads, size
        )


def _near(q: Tensor, states: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of queries [N, Q, H, D] over states [2, N, K, Hkv, D]: [N, Q, H, D] and log weights [N, Q, Hkv, M].

    All queries of one of the N read the same keys, so that the M heads of a group and the Q queries are one dimension.
    """
    n, wide, heads, size = q.shape
    groups = states.shape[3]
    many = heads // groups
    folded = q.view(n, wide, groups, many, size).transpose(1, 2).reshape(n, groups, wide * many, size)
    keys, values = states[0].transpose(1, 2), states[1].transpose(1, 2)
    wider = mask.expand(n, 1, wide * many, mask.shape[-1])
    if q.device.type == "cpu":
        out, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            folded, keys, values, attn_mask=wider, scale=scale
        )
    else:
        scores = (folded @ keys.transpose(-1, -2)).float() * scale + wider
        weight = scores.logsumexp(-1)
        out = (scores - weight.unsqueeze(-1)).exp().to(values.dtype) @ values
    out = out.reshape(n, groups, wide, many, size).transpose(1, 2).reshape(n, wide, heads, size)
    return out, weight.reshape(n, groups, wide, many).transpose(1, 2)


def length_mask(lengths: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[N, 1, 1, L] with 0 on the first `lengths` places of each row and minus infinity after them."""
    size = int(lengths.max(initial=0))
    real = torch.from_numpy(np.arange(size) < lengths[:, None]).to(device)
    zero = torch.zeros(real.shape, dtype=dtype, device=device)
    return zero.masked_fill_(~real, float("-inf"))[:, None, None]


def moves(gone: Sequence[int], size: int, before: int) -> list[tuple[int, int]]:
    """(from, to) moves that fill the holes below `size` with what stands above it."""
    out = set(gone)
    return list(zip([k for k in range(size, before) if k not in out], sorted(k for k in out if k < size), strict=True))
