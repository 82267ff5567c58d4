"""Log-probs of the trained tokens: each distinct token passes the model once, no vocabulary-wide tensor is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cothink.attention import Packed, causal, fits, head, hidden
from cothink.batch import Batch

NEVER = -1e30
"""The logit of a token that could not be sampled: finite, because 0 times minus infinity is no number."""
CHUNK = 1 << 24
"""Logits held at once (64 MiB in float32): tokens x vocabulary."""


def token_logprobs(
    model: Any, batch: Batch, *, entropy_in_loss: bool = False, allowed: Tensor | None = None
) -> tuple[Tensor, Tensor, int]:
    """Log-probs [B, L] of the trained tokens and their entropies [B, L], 0 elsewhere; and the tokens computed.

    The entropies carry a graph only when they are part of the loss. `allowed` [N, V] says which tokens each of the N
    trained ones could have been, in the order of the batch. The caller holds `attention.flat(model)` where
    `is_flat(model)`; other models get padded rows.
    """
    target = (batch.turns >= 0)[:, 1:]
    empty = torch.zeros(batch.ids.shape, device=batch.ids.device)
    if not target.any():
        return empty, empty.clone(), 0
    rows, cols = target.nonzero(as_tuple=True)
    place = (rows, cols + 1)
    targets, temperature = batch.ids[place], batch.temperature[rows]
    if not is_flat(model):
        values, entropies = _padded(model, batch, rows, cols, targets, temperature, entropy_in_loss, allowed)
        return empty.index_put(place, values), empty.index_put(place, entropies), int(batch.ids.numel())
    states, computed = _flat(model, batch, rows, cols)
    layer = head(model)
    values, entropies = _TokenLogprob.apply(
        states, layer.weight, layer.bias, targets, temperature, allowed, entropy_in_loss
    )  # type: ignore[misc]
    return empty.index_put(place, values), empty.index_put(place, entropies), computed


def allowed_tokens(masks: Sequence[list[np.ndarray] | None], batch: Batch) -> Tensor | None:
    """Masks [N, V] of all trained tokens of a batch, None if no schema limited any of them."""
    limited = [m for m in masks if m]
    if not limited:
        return None
    everything = np.ones_like(limited[0][0])
    counts = (batch.turns >= 0).sum(1).tolist()
    rows = [row for m, n in zip(masks, counts, strict=True) for row in (m if m is not None else [everything] * n)]
    return torch.from_numpy(np.stack(rows)).to(batch.ids.device)


def is_flat(model: Any) -> bool:
    """Whether this model's tokens can be laid out flat, in training as in sampling."""
    dropout = getattr(causal(model).config, "attention_dropout", 0.0)
    return fits(model) and not dropout and type(head(model)) is nn.Linear


def _flat(model: Any, batch: Batch, rows: Tensor, cols: Tensor) -> tuple[Tensor, int]:
    """Hidden states [N, d] that predict the trained tokens; equal beginnings of rows are computed once."""
    ids, lengths = batch.ids.tolist(), batch.mask.sum(1).tolist()
    packed = Packed.of([tuple(row[:n]) for row, n in zip(ids, lengths, strict=True)], batch.ids.device)
    states = hidden(model, packed.ids, packed.positions, packed)
    where = [packed.places[r][c] for r, c in zip(rows.tolist(), cols.tolist(), strict=True)]
    return states[torch.tensor(where, device=states.device)], len(packed.ids)


def _padded(
    model: Any,
    batch: Batch,
    rows: Tensor,
    cols: Tensor,
    targets: Tensor,
    temperature: Tensor,
    entropy_in_loss: bool,
    allowed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The same through the model's own forward pass, for models that have more to their attention or their logits."""
    columns = cols.unique()
    logits = model(
        input_ids=batch.ids, attention_mask=batch.mask.long(), logits_to_keep=columns, use_cache=False
    ).logits
    chosen = logits[rows, torch.searchsorted(columns, cols)].float() / temperature.unsqueeze(1)
    if allowed is not None:
        chosen = chosen.masked_fill(~allowed, NEVER)
    norm = chosen.logsumexp(-1)
    with torch.set_grad_enabled(entropy_in_loss and torch.is_grad_enabled()):
        entropies = norm - ((chosen - norm.unsqueeze(1)).exp() * chosen).sum(-1)
    return chosen.gather(1, targets.unsqueeze(1)).squeeze(1) - norm, entropies


class _TokenLogprob(torch.autograd.Function):
    """(log-prob, entropy) of one token per hidden state; the logits are computed again for the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        allowed: Tensor | None,
        entropy_in_loss: bool,
    ) -> tuple[Tensor, Tensor]:
        values, entropies, norms = [], [], []
        for part in _parts(len(states), len(weight)):
            logits = F.linear(states[part], weight, bias)
            ctx.dtype = logits.dtype  # autocast chose it; the gradient must be computed in the same precision
            logits = logits.float() / temperature[part].unsqueeze(1)
            if allowed is not None:
                logits.masked_fill_(~allowed[part], NEVER)
            norm = logits.logsumexp(-1)
            values.append(logits.gather(1, targets[part].unsqueeze(1)).squeeze(1) - norm)
            entropies.append(norm - ((logits - norm.unsqueeze(1)).exp_() * logits).sum(-1))
            norms.append(norm)
        found = torch.cat(values), torch.cat(entropies)
        ctx.save_for_backward(states, weight, bias, targets, temperature, allowed, torch.cat(norms), found[1])
        ctx.entropy_in_loss = entropy_in_loss
        if not entropy_in_loss:
            ctx.mark_non_differentiable(found[1])
        return found

    @staticmethod
    def backward(ctx: Any, grad_value: Tensor, grad_entropy: Tensor) -> Any:  # type: ignore[override]
        states, weight, bias, targets, temperature, allowed, norms, entropies = ctx.saved_tensors
        wide = weight.to(ctx.dtype)
        grad_states = torch.empty_like(states)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for part in _parts(len(states), len(weight)):
            here = states[part].to(ctx.dtype)
            logits = F.linear(here, wide, None if bias is None else bias.to(ctx.dtype)).float()
            heat = temperature[part].unsqueeze(1)
            logits.div_(heat)
            if allowed is not None:
                logits.masked_fill_(~allowed[part], NEVER)
            logp = logits.sub_(norms[part].unsqueeze(1))
            p = logp.exp()
            gradient = -grad_value[part].unsqueeze(1) * p
            if ctx.entropy_in_loss:
                gradient -= grad_entropy[part].unsqueeze(1) * p * (logp + entropies[part].unsqueeze(1))
            gradient.scatter_add_(1, targets[part].unsqueeze(1), grad_value[part].unsqueeze(1))
            narrow = gradient.div_(heat).to(ctx.dtype)
            grad_states[part] = (narrow @ wide).to(states.dtype)
            if grad_weight is not None:
                grad_weight += (narrow.T @ here).to(weight.dtype)
            if grad_bias is not None:
                grad_bias += narrow.sum(0).to(grad_bias.dtype)
        return grad_states, grad_weight, grad_bias, None, None, None, None


def _parts(many: int, vocabulary: int) -> list[slice]:
    each = max(1, CHUNK // vocabulary)
    return [slice(k, min(k + each, many)) for k in range(0, many, each)]
