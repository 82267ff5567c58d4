"""Draws one token per row from logits, and says its log-prob under exactly the distribution it was drawn from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cothink.types import Sampling

BLOCK = 256
CHUNK = 1 << 20
"""Logits looked at together: they should stay in the processor's cache between the passes."""


def draw(
    logits: Tensor,
    how: Sequence[Sampling],
    owner: Tensor,
    dice: Tensor,
    allowed: Mapping[int, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens [R] by inverse CDF and their log-probs [R].

    `logits` is [U, V], `how` says for each of the U how to sample, `owner` [R] (ascending) which of the U a row draws
    from, `dice` [R] is uniform in [0, 1). `allowed` masks tokens [V] of some of the U. Temperature 0 takes the
    likeliest token, whose log-prob is 0.
    """
    temperature = torch.tensor([h.temperature for h in how], device=logits.device)
    greedy = temperature == 0
    heat = torch.where(greedy, 1.0, temperature).unsqueeze(1)
    some_greedy = bool(greedy.any())
    cut = {u: (h.top_k, h.top_p) for u, h in enumerate(how) if h.top_k > 0 or h.top_p < 1.0}
    many = max(1, CHUNK // logits.shape[1])
    bounds = torch.searchsorted(owner, torch.arange(0, len(how) + many, many, device=owner.device)).tolist()
    tokens, logprobs = [], []
    for k, start in enumerate(range(0, len(how), many)):
        low, high = bounds[k], bounds[k + 1]
        if low == high:
            continue
        end = min(start + many, len(how))
        scaled = logits[start:end].float() / heat[start:end]
        for u in range(start, end) if cut or allowed else ():
            if allowed and u in allowed:
                scaled[u - start].masked_fill_(~allowed[u], float("-inf"))
            if u in cut:
                scaled[u - start] = _truncate(scaled[u - start], *cut[u])
        mine = owner[low:high] - start
        chosen, logp = _pick(scaled, mine, dice[low:high])
        if some_greedy:
            cold = greedy[start:end][mine]
            chosen = torch.where(cold, scaled.argmax(-1)[mine], chosen)
            logp = torch.where(cold, 0.0, logp)
        tokens.append(chosen)
        logprobs.append(logp)
    return torch.cat(tokens), torch.cat(logprobs)


def _pick(scaled: Tensor, mine: Tensor, dice: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse CDF in two stages: first a block of the vocabulary, then a token of the block."""
    peak = scaled.amax(-1, keepdim=True)
    weight = (scaled - peak).exp_()
    short = -weight.shape[1] % BLOCK
    blocks = (F.pad(weight, (0, short)) if short else weight).view(len(scaled), -1, BLOCK)
    mass = blocks.sum(-1).double().cumsum(-1)[mine]
    total = mass[:, -1:]
    target = _below(dice.unsqueeze(1) * total, total)
    place = torch.searchsorted(mass, target, right=True)
    before = torch.where(place > 0, mass.gather(1, (place - 1).clamp(min=0)), 0.0)
    inner = blocks[mine, place.squeeze(1)].double().cumsum(-1)
    # Rounding of the block sums must not lead past the block's last possible token.
    share = (target - before) / (mass.gather(1, place) - before)
    target = _below(share * inner[:, -1:], inner[:, -1:])
    tokens = place.squeeze(1) * BLOCK + torch.searchsorted(inner, target, right=True).squeeze(1)
    logp = scaled[mine, tokens].double() - peak[mine].squeeze(1) - total.squeeze(1).log()
    return tokens, logp.float()


def _below(value: Tensor, limit: Tensor) -> Tensor:
    return torch.minimum(value, torch.nextafter(limit, torch.zeros_like(limit)))


def _truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Sets everything outside the top-k and the top-p nucleus to minus infinity."""
    order = logits.argsort(descending=True)
    sorted_logits = logits[order]
    keep = torch.ones_like(order, dtype=torch.bool)
    if top_k > 0:
        keep[top_k:] = False
    if top_p < 1.0:
        p = sorted_logits.masked_fill(~keep, float("-inf")).softmax(-1)
        keep &= p.cumsum(0) - p < top_p
    return torch.full_like(logits, float("-inf")).scatter(0, order[keep], sorted_logits[keep])
