"""The local engine: batched sampling with transformers, from the very weights the trainer updates."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from cothink.chat import Codec, TemplateCodec
from cothink.types import Completion, Message, PlayError, Sampling

if TYPE_CHECKING:
    import torch

    from cothink.policy import Policy


COMPACT = 0.75
"""Finished rows leave the batch once no more than this share of it is still speaking: leaving copies the cache."""


@dataclass(slots=True)
class Row:
    """One completion being sampled."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    place: int
    limit: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str | None = None
    reason: str = "length"


@dataclass(slots=True)
class _Request:
    policy: str
    rows: list[Row]
    done: asyncio.Future


class LocalEngine:
    """Collects the requests of all running episodes and samples them in batches of at most `max_rows` rows.

    Log-probs are those of the sampled distribution: after temperature, top-k and top-p. Each row draws from its own
    random stream, so what it says does not depend on its neighbours (up to rounding of the logits).
    """

    def __init__(self, policies: Mapping[str, Policy], max_rows: int):
        self.policies, self.max_rows = dict(policies), max_rows
        self._codecs = {name: _codec(p) for name, p in self.policies.items()}
        self._waiting: list[_Request] = []
        self._worker: asyncio.Task | None = None
        self._tails: dict[tuple[str, str], Any] = {}

    def codec(self, policy: str) -> Codec:
        """The chat codec of a policy's tokenizer."""
        return self._codecs[policy]

    def load(self, policy: str, weights: Any, version: int) -> None:
        """The engine samples from the policies' own models, so there is nothing to copy."""

    async def generate(
        self,
        policy: str,
        messages: Sequence[Message],
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        n: int,
        seed: int,
    ) -> list[Completion]:
        """See `Engine`; a prompt that leaves no room in the model's context is an error of that episode."""
        limit = getattr(self.policies[policy].model.config, "max_position_embeddings", 1 << 30)
        room = min(sampling.max_tokens, limit - len(prompt_ids))
        if room <= 0:
            raise PlayError(f"policy {policy}: a prompt of {len(prompt_ids)} tokens leaves no room in {limit}")
        codec = self._codecs[policy]
        sampling = replace(sampling, stop=tuple(dict.fromkeys((*sampling.stop, *codec.stop_strings))))
        rows = [Row(prompt_ids, sampling, seed, k, room) for k in range(n)]
        loop = asyncio.get_running_loop()
        request = _Request(policy, rows, loop.create_future())
        self._waiting.append(request)
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._drain())
        await request.done
        version = self.policies[policy].version
        return [
            Completion(
                row.text or "", prompt_ids, tuple(row.ids), tuple(row.logprobs), row.reason, version  # type: ignore[arg-type]
            )
            for row in rows
        ]  # fmt: skip

    async def _drain(self) -> None:
        while self._waiting:
            seen = -1
            while seen != len(self._waiting):  # let every runnable episode ask before the batch is closed
                seen = len(self._waiting)
                for _ in range(4):
                    await asyncio.sleep(0)
            policy, requests = self._take()
            rows = [row for request in requests for row in request.rows]
            try:
                for start in range(0, len(rows), self.max_rows):
                    await asyncio.to_thread(self._sample, policy, rows[start : start + self.max_rows])
            except Exception as error:
                for request in requests:
                    if not request.done.done():
                        request.done.set_exception(error)
                continue
            for request in requests:
                if not request.done.done():
                    request.done.set_result(None)

    def _take(self) -> tuple[str, list[_Request]]:
        """The requests of the policy with the most waiting rows: similar prompt lengths together, one batch at most."""
        load: dict[str, int] = {}
        for request in self._waiting:
            load[request.policy] = load.get(request.policy, 0) + len(request.rows)
        policy = max(load, key=lambda p: load[p])
        mine = sorted((r for r in self._waiting if r.policy == policy), key=lambda r: len(r.rows[0].prompt))
        taken, size = [], 0
        for request in mine:
            if taken and size + len(request.rows) > self.max_rows:
                break
            taken.append(request)
            size += len(request.rows)
        chosen = set(map(id, taken))
        self._waiting = [r for r in self._waiting if id(r) not in chosen]
        return policy, taken

    def _sample(self, policy: str, rows: list[Row]) -> None:
        owner = self.policies[policy]
        model = owner.activate()
        if model.training:
            model.eval()
        codec = self._codecs[policy]
        with owner.precision():
            sample_rows(model, rows, codec.stop_ids, lambda stop: self._tail(policy, stop), codec.read)
        for row in rows:
            if row.text is None or row.text.endswith(codec.stop_strings):  # the layout's own stop is no text
                row.text = codec.decode(tuple(row.ids))

    def _tail(self, policy: str, stop: str) -> Any:
        """Which token ids can complete a stop string: those whose text holds its last character."""
        if (policy, stop) not in self._tails:
            codec, size = self._codecs[policy], len(self.policies[policy].tokenizer)
            last = stop[-1]
            self._tails[policy, stop] = {i for i in range(size) if last in codec.read((i,))} if last.isascii() else None
        return self._tails[policy, stop]


def _codec(policy: Policy) -> TemplateCodec:
    """The policy's chat codec, with the end tokens its generation config names."""
    eos = getattr(getattr(policy.model, "generation_config", None), "eos_token_id", None)
    extra = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return TemplateCodec(policy.tokenizer, extra_stop_ids=extra)


def sample_rows(model: Any, rows: list[Row], stop_ids: Sequence[int], tail: Any, decode: Any) -> None:
    """Samples all rows to their end in one batch: equal prompts are read once, finished rows leave in groups."""
    import numpy as np
    import torch

    from cothink.engines.cache import growing_cache

    with torch.inference_mode():
        device = next(model.parameters()).device
        keyword, cache = cache_keyword(model), growing_cache(model)
        logits, mask, position = _read(model, rows, {keyword: cache})
        longest = max(row.limit for row in rows)
        dice = torch.from_numpy(
            np.stack([np.random.default_rng([row.seed, row.place]).random(longest) for row in rows])
        ).to(device)
        stops = torch.tensor(sorted(stop_ids), device=device)
        seats: list[Row | None] = list(rows)  # None: the row is done and its seat is empty
        step = 0
        while True:
            tokens, logprobs = draw(logits, [row or rows[0] for row in seats], dice[:, step])
            ended = torch.isin(tokens, stops).tolist() if len(stops) else [False] * len(seats)
            for k, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist())):
                row = seats[k]
                if row is None:
                    continue
                row.ids.append(token)
                row.logprobs.append(logprob)
                if ended[k]:
                    row.reason = "stop"
                if ended[k] or _stopped(row, token, tail, decode) or len(row.ids) >= row.limit:
                    seats[k] = None
            taken = [k for k, row in enumerate(seats) if row is not None]
            if not taken:
                return
            step += 1
            if len(taken) <= COMPACT * len(seats):
                chosen = torch.tensor(taken, device=device)
                seats = [seats[k] for k in taken]
                tokens, mask, position, dice = tokens[chosen], mask[chosen], position[chosen], dice[chosen]
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


def _read(model: Any, rows: Sequence[Row], cache: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reads the prompts, equal ones once; returns next-token logits [R, V], mask [R, L] and last positions [R]."""
    import torch

    device = next(model.parameters()).device
    unique = list(dict.fromkeys(row.prompt for row in rows))
    place = {prompt: i for i, prompt in enumerate(unique)}
    width = max(map(len, unique))
    ids = torch.zeros((len(unique), width), dtype=torch.long)
    mask = torch.zeros((len(unique), width), dtype=torch.long)
    for i, prompt in enumerate(unique):
        ids[i, width - len(prompt) :] = torch.tensor(prompt)
        mask[i, width - len(prompt) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1, **cache)
    index = torch.tensor([place[row.prompt] for row in rows], device=device)
    if len(unique) < len(rows):
        next(iter(cache.values())).batch_select_indices(index)
    else:  # every prompt is its own: rows and prompts stand in the same order
        index = torch.arange(len(rows), device=device)
    return out.logits[:, -1][index], mask[index], positions[index, -1]


def cache_keyword(model: Any) -> str:
    """transformers renamed the cache argument of `forward` within the range we support."""
    import inspect

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "cache" if "cache" in inspect.signature(inner.forward).parameters else "past_key_values"


def _stopped(row: Row, token: int, tail: Any, decode: Any) -> bool:
    """Whether a stop string is complete; the text is cut right after it, the sampled ids are kept."""
    for stop in row.sampling.stop:
        could = tail(stop)
        if could is not None and token not in could:
            continue
        text = decode(tuple(row.ids))
        if stop in text:
            row.text = text[: text.index(stop) + len(stop)]
            row.reason = "stop"
            return True
    return False


def draw(logits: torch.Tensor, rows: Sequence[Row], dice: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row by inverse CDF, and its log-prob under the distribution it was drawn from.

    `logits` is [R, V], `dice` [R] uniform in [0, 1). Temperature 0 takes the likeliest token, whose log-prob is 0.
    """
    import torch

    logits = logits.float()
    temperature = torch.tensor([r.sampling.temperature for r in rows], device=logits.device)
    greedy = temperature == 0
    scaled = logits / torch.where(greedy, 1.0, temperature).unsqueeze(1)
    for k, row in enumerate(rows):
        if row.sampling.top_k > 0 or row.sampling.top_p < 1.0:
            scaled[k] = _truncate(scaled[k], row.sampling.top_k, row.sampling.top_p)
    logp = scaled.log_softmax(-1)
    cdf = logp.double().exp().cumsum(-1)
    target = dice.unsqueeze(1) * cdf[:, -1:]
    tokens = torch.searchsorted(cdf, target, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)
    tokens = torch.where(greedy, logits.argmax(-1), tokens)
    chosen = logp.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return tokens, torch.where(greedy, 0.0, chosen)


def _truncate(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Sets everything outside the top-k and the top-p nucleus to minus infinity."""
    import torch

    order = logits.argsort(descending=True)
    sorted_logits = logits[order]
    keep = torch.ones_like(order, dtype=torch.bool)
    if top_k > 0:
        keep[top_k:] = False
    if top_p < 1.0:
        p = sorted_logits.masked_fill(~keep, float("-inf")).softmax(-1)
        keep &= p.cumsum(0) - p < top_p
    return torch.full_like(logits, float("-inf")).scatter(0, order[keep], sorted_logits[keep])


def engine(policies: Mapping[str, Policy], *, max_rows: int = 256) -> LocalEngine:
    """A local engine over the policies; `max_rows` bounds one batch, and with it the memory of its cache."""
    if max_rows < 1:
        raise ValueError(f"engine local: max_rows={max_rows}; it must be at least 1")
    return LocalEngine(policies, max_rows)
