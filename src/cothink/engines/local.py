"""The local engine: samples from the very weights the trainer updates, all chats of all roles in one running batch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from cothink.chat import Codec, TemplateCodec
from cothink.types import Completion, Message, NoRoom, Sampling

if TYPE_CHECKING:
    from cothink.engines.requests import Request, Sampler
    from cothink.policy import Policy

CACHE_GIB = 4.0
"""Most memory the keys and values may take by default; a quarter of what is free if that is less."""

TURNS_OF_THE_LOOP = 24
"""An answer may end an episode, let another one in and start its tasks: a few turns each, all before the next pass.

Whoever asked too late would join a later pass, and the last digits of log-probs would depend on the clock.
"""


class LocalEngine:
    """Policies that share a model share one running batch; the batch with most to do goes first.

    Log-probs are those of the sampled distribution: after temperature, top-k and top-p. Each answer draws from its own
    random stream, so what it says does not depend on its neighbours (up to rounding of the logits).
    """

    def __init__(self, policies: Mapping[str, Policy], max_rows: int, dtype: str, cache_gib: float | None):
        from cothink.engines.requests import Counters, Stops

        self.policies = dict(policies)
        self.counters = Counters()
        self._codecs = {name: codec_of(p) for name, p in self.policies.items()}
        self._stops = {name: Stops(self._codecs[name], len(p.tokenizer)) for name, p in self.policies.items()}
        self._samplers: dict[str, Sampler] = {}
        by_model: dict[int, dict[str, Policy]] = {}
        for name, policy in self.policies.items():
            by_model.setdefault(id(policy.model), {})[name] = policy
        for together in by_model.values():
            made = _sampler(together, max_rows, dtype, cache_gib, len(by_model), self.counters)
            self._samplers |= dict.fromkeys(together, made)
        self._grammars: dict[tuple[str, str], Any] = {}
        self._worker: asyncio.Task | None = None
        self._arrived = 0

    def codec(self, policy: str) -> Codec:
        """The chat codec of a policy's tokenizer."""
        return self._codecs[policy]

    def load(self, policy: str, weights: Any, version: int) -> None:
        """The engine samples from the policies' own models, and follows their versions."""

    def forget(self) -> None:
        """Drops what is kept of earlier chats; to be called while nobody is speaking."""
        for sampler in self._samplers.values():
            if hasattr(sampler, "forget"):
                sampler.forget()  # type: ignore[attr-defined]

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
        from cothink.engines.requests import Answer, Request

        limit = getattr(self.policies[policy].model.config, "max_position_embeddings", 1 << 30)
        room = min(sampling.max_tokens, limit - len(prompt_ids))
        if room <= 0:
            raise NoRoom(f"policy {policy}: a prompt of {len(prompt_ids)} tokens leaves no room in {limit}")
        codec = self._codecs[policy]
        sampling = replace(sampling, stop=tuple(dict.fromkeys((*sampling.stop, *codec.stop_strings))))
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        answers = [Answer() for _ in range(n)]
        self._samplers[policy].submit(
            Request(
                policy,
                prompt_ids,
                sampling,
                seed,
                room,
                answers,
                self._stops[policy],
                None if sampling.schema is None else self.grammar(policy, sampling.schema),
                future,
            )
        )
        self._arrived += 1
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._drain())
        await future
        version = self.policies[policy].version
        done = []
        for answer in answers:
            text = answer.text
            if text is None or text.endswith(codec.stop_strings):  # the layout's own stop is no text
                text = codec.decode(tuple(answer.ids))
            ids, logprobs = tuple(answer.ids), tuple(answer.logprobs)
            done.append(Completion(text, prompt_ids, ids, logprobs, answer.reason, version, schema=sampling.schema))  # type: ignore[arg-type]
        return done

    def grammar(self, policy: str, schema: str) -> Any:
        """What a JSON schema allows, over the tokens of a policy; made once, and known to the policy from then on."""
        if (policy, schema) not in self._grammars:
            owner = self.policies[policy]
            made = grammar_of(owner, self._codecs[policy], schema)
            self._grammars[policy, schema] = owner.grammars[schema] = made
        return self._grammars[policy, schema]

    async def _drain(self) -> None:
        samplers = list(dict.fromkeys(self._samplers.values()))
        while True:
            seen = -1
            while seen != self._arrived:  # every episode that can go on asks before the next pass
                seen = self._arrived
                for _ in range(TURNS_OF_THE_LOOP):
                    await asyncio.sleep(0)
            busiest = max(samplers, key=lambda s: s.load)
            if not busiest.load:
                return
            try:
                done = await asyncio.to_thread(busiest.advance)
            except Exception as error:
                for request in busiest.fail():
                    _settle(request, error)
                continue
            for request in done:
                _settle(request, None)


def _settle(request: Request, error: Exception | None) -> None:
    future = request.future
    if future is not None and not future.done():
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def _sampler(
    policies: Mapping[str, Policy], max_rows: int, dtype: str, cache_gib: float | None, shares: int, counters: Any
) -> Sampler:
    import torch

    from cothink.attention import fits
    from cothink.engines import precision
    from cothink.engines.continuous import Continuous
    from cothink.engines.plain import Plain

    owner = next(iter(policies.values()))
    model: Any = owner.model
    if not fits(model):
        return Plain(policies, max_rows=max_rows, counters=counters)
    own = torch.bfloat16 if owner.mixed else model.dtype
    chosen = own if dtype == "own" else precision.fastest(model) if dtype == "auto" else getattr(torch, dtype)
    for policy in policies.values():
        policy.coarse = chosen.itemsize < model.dtype.itemsize
    tokens = precision.cache_tokens(model, chosen, cache_gib, CACHE_GIB / shares)
    return Continuous(model, policies, max_rows=max_rows, cache_tokens=tokens, dtype=chosen, counters=counters)


def codec_of(policy: Policy) -> TemplateCodec:
    """The policy's chat codec, with the end tokens its generation config names."""
    eos = getattr(getattr(policy.model, "generation_config", None), "eos_token_id", None)
    extra = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    known = policy.model.get_input_embeddings().weight.shape[0]
    return TemplateCodec(policy.tokenizer, extra_stop_ids=extra, vocabulary=known)


def grammar_of(policy: Policy, codec: TemplateCodec, schema: str) -> Any:
    """What a JSON schema allows over the tokens of a policy; every end token of its codec may end a text."""
    from cothink.attention import head
    from cothink.grammar import Grammar

    return Grammar(policy.tokenizer, schema, size=head(policy.model).weight.shape[0], stop_ids=codec.stop_ids)


def engine(
    policies: Mapping[str, Policy],
    *,
    max_rows: int = 256,
    dtype: Literal["own", "float32", "bfloat16", "auto"] = "own",
    cache_gib: float | None = None,
) -> LocalEngine:
    """A local engine over the policies.

    `max_rows` is the most answers sampled at once per model. `dtype` is the precision of sampling: the policy's own, or
    a copy of the weights in another; `auto` measures which is faster here. `cache_gib` bounds the memory of keys and
    values per model (default: 4 GiB, or a quarter of the free memory).
    """
    if max_rows < 1:
        raise ValueError(f"engine local: max_rows={max_rows}; it must be at least 1")
    if cache_gib is not None and cache_gib <= 0:
        raise ValueError(f"engine local: cache_gib={cache_gib}; it must be above 0")
    return LocalEngine(policies, max_rows, dtype, cache_gib)
