"""Batch after batch, for models whose attention the running batch cannot express (windows, recurrent layers)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cothink.engines.requests import Counters, Request
from cothink.engines.sampler import draw

COMPACT = 0.75
"""Finished rows leave the batch once no more than this share of it is still speaking: leaving copies the cache."""


class Plain:
    """Samples waiting requests of one policy to their end, then the next ones, through the model's own cache."""

    def __init__(self, policies: Mapping[str, Any], *, max_rows: int, counters: Counters):
        self._policies, self._max, self._counters = dict(policies), max_rows, counters
        # `submit` runs on the event loop while a thread is in `advance`: it touches nothing but this.
        self._arrived: deque[Request] = deque()
        self._waiting: list[Request] = []

    @property
    def load(self) -> int:
        """Rows that wait."""
        self._receive()
        return sum(len(r.answers) for r in self._waiting)

    def submit(self, request: Request) -> None:
        """Puts a request in the line."""
        self._arrived.append(request)

    def _receive(self) -> None:
        while self._arrived:
            self._waiting.append(self._arrived.popleft())

    def fail(self) -> list[Request]:
        """Drops everything after an error and returns the requests that were lost."""
        self._receive()
        lost, self._waiting = self._waiting, []
        return lost

    def advance(self) -> list[Request]:
        """Samples one batch: requests of the policy that waits most, similar prompt lengths together."""
        self._receive()
        self._waiting = [r for r in self._waiting if not r.abandoned]
        if not self._waiting:
            return []
        load: dict[str, int] = {}
        for request in self._waiting:
            load[request.policy] = load.get(request.policy, 0) + len(request.answers)
        policy = max(load, key=lambda p: load[p])
        taken: list[Request] = []
        size = 0
        for request in sorted((r for r in self._waiting if r.policy == policy), key=lambda r: len(r.prompt)):
            if taken and size + len(request.answers) > self._max:
                break
            taken.append(request)
            size += len(request.answers)
        owner = self._policies[policy]
        model = owner.activate()
        if model.training:
            model.eval()
        rows = [(request, place) for request in taken for place in range(len(request.answers))]
        with owner.precision():
            for start in range(0, len(rows), self._max):
                self._counters.steps += sample(model, rows[start : start + self._max])
        self._counters.prefilled += sum(len(r.prompt) for r in taken)
        self._counters.generated += sum(len(a.ids) for r in taken for a in r.answers)
        self._waiting = [r for r in self._waiting if all(r is not t for t in taken)]
        return taken


def sample(model: Any, rows: Sequence[tuple[Request, int]]) -> int:
    """Samples answers to their end in one batch: equal prompts are read once, finished rows leave in groups."""
    from cothink.engines.growing import growing_cache

    with torch.inference_mode():
        device = next(model.parameters()).device
        keyword, cache = cache_keyword(model), growing_cache(model)
        logits, mask, position = _read(model, [r.prompt for r, _ in rows], {keyword: cache})
        dice = [request.dice(place) for request, place in rows]
        seats: list[tuple[Request, int] | None] = list(rows)  # None: the row is done and its seat is empty
        step = 0
        while True:
            numbers = torch.tensor([d[min(step, len(d) - 1)] for d in dice], dtype=torch.float64, device=device)
            how = [(seat or rows[0])[0].sampling for seat in seats]
            allowed = {
                k: torch.from_numpy(seat[0].answers[seat[1]].matcher.allowed()).to(device)
                for k, seat in enumerate(seats)
                if seat is not None and seat[0].grammar is not None
            }
            tokens, logprobs = draw(logits, how, torch.arange(len(seats), device=device), numbers, allowed)
            for k, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True)):
                seat = seats[k]
                if seat is not None and (_say(*seat, token, logprob) or seat[0].abandoned):
                    seats[k] = None
            taken = [k for k, seat in enumerate(seats) if seat is not None]
            step += 1
            if not taken:
                return step
            if len(taken) <= COMPACT * len(seats):
                chosen = torch.tensor(taken, device=device)
                seats, dice = [seats[k] for k in taken], [dice[k] for k in taken]
                tokens, mask, position = tokens[chosen], mask[chosen], position[chosen]
                cache.batch_select_indices(chosen)
            position = position + 1
            mask = torch.cat([mask, mask.new_ones((len(seats), 1))], 1)
            logits = model(
                input_ids=tokens.unsqueeze(1),
                attention_mask=mask,
                position_ids=position.unsqueeze(1),
                use_cache=True,
                **{keyword: cache},
            ).logits[:, -1]


def _say(request: Request, place: int, token: int, logprob: float) -> bool:
    """Adds a token to an answer; returns whether it ends there."""
    answer, stops = request.answers[place], request.stops
    answer.ids.append(token)
    answer.logprobs.append(logprob)
    if request.grammar is not None:
        answer.matcher.advance(token)
    if token in stops.ids:
        answer.reason = "stop"
        return True
    strings = request.sampling.stop
    if strings:
        maybe = stops.maybe(strings)
        if token < len(maybe) and maybe[token]:
            answer.text = stops.cut(answer.ids, strings)
        if answer.text is not None:
            answer.reason = "stop"
            return True
    return len(answer.ids) >= request.limit


def _read(model: Any, prompts: Sequence[tuple[int, ...]], cache: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Reads the prompts, equal ones once; returns next-token logits [R, V], mask [R, L] and last positions [R]."""
    device = next(model.parameters()).device
    unique = list(dict.fromkeys(prompts))
    place = {prompt: i for i, prompt in enumerate(unique)}
    width = max(map(len, unique))
    ids, mask = np.zeros((2, len(unique), width), np.int64)
    for i, prompt in enumerate(unique):
        ids[i, width - len(prompt) :] = prompt
        mask[i, width - len(prompt) :] = 1
    ids, mask = (torch.from_numpy(x).to(device) for x in (ids, mask))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1, **cache)
    index = torch.tensor([place[prompt] for prompt in prompts], device=device)
    if len(unique) < len(prompts):
        next(iter(cache.values())).batch_select_indices(index)
    return out.logits[:, -1][index], mask[index], positions[index, -1]


def cache_keyword(model: Any) -> str:
    """transformers renamed the cache argument of `forward` within the range we support."""
    import inspect

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "cache" if "cache" in inspect.signature(inner.forward).parameters else "past_key_values"
