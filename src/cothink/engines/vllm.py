"""vLLM as the engine of policies that learn: in this process, or a server that `vllm serve` runs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from cothink.chat import Codec
from cothink.engines import vllm_core as core
from cothink.types import Completion, Message, NoRoom, PlayError, Sampling

if TYPE_CHECKING:
    from cothink.policy import Policy


class Backend(Protocol):
    """A running vLLM. `context` is the most tokens of prompt and answer together.

    `ask` answers one prompt, in the name of an adapter or of the base. `adapter` takes a new adapter in the place of
    an older one, `weights` new full weights; both forget what was computed with the old ones.
    """

    context: int

    async def ask(
        self, adapter: str | None, prompt: tuple[int, ...], settings: Mapping[str, Any], schema: str | None
    ) -> core.Answer: ...

    def adapter(self, name: str, folder: Path, old: str | None) -> None: ...

    def weights(self, folder: Path) -> None: ...


class VllmEngine:
    """Samples from copies of the policies' weights, which `load` renews; one adapter for each policy that has one.

    Each answer is a request of its own with its own seed, so what it says does not depend on its neighbours (up to
    rounding). `load` is to be called while nobody is speaking.
    """

    def __init__(self, policies: Mapping[str, Policy], backend: Backend, handover: core.Handover):
        from cothink.engines.local import codec_of
        from cothink.engines.requests import Stops

        self.policies = dict(policies)
        self._backend, self._handover = backend, handover
        self._codecs = {name: codec_of(p) for name, p in self.policies.items()}
        self._stops = {name: Stops(self._codecs[name], len(p.tokenizer)) for name, p in self.policies.items()}
        self._adapters: dict[str, str] = {}
        self._versions = {name: p.version for name, p in self.policies.items() if p.adapter is None}
        for name, policy in self.policies.items():
            if policy.adapter is not None:
                self.load(name, None, policy.version)

    def codec(self, policy: str) -> Codec:
        """The chat codec of a policy's tokenizer."""
        return self._codecs[policy]

    def load(self, policy: str, weights: Any, version: int) -> None:
        """Hands the policy's weights of this moment to vLLM; PlayError where it cannot take them."""
        owner = self.policies[policy]
        if owner.adapter is None and len(self.policies) > 1:
            raise PlayError(
                f"policy {policy}: its full weights changed, but vLLM holds the adapters of "
                f"{', '.join(self._adapters)} over them; give it lora_r, or use engine: local"
            )
        name, place = self._handover.put(owner)
        if owner.adapter is None:
            self._backend.weights(place)
        else:
            self._backend.adapter(name, place, self._adapters.get(policy))
            self._adapters[policy] = name
        self._handover.done(policy, place)
        self._versions[policy] = version

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
        owner, codec, limit = self.policies[policy], self._codecs[policy], self._backend.context
        room = min(sampling.max_tokens, limit - len(prompt_ids))
        if room <= 0:
            raise NoRoom(f"policy {policy}: a prompt of {len(prompt_ids)} tokens leaves no room in {limit}")
        if owner.version != self._versions[policy]:  # a resumed run has read a checkpoint
            self.load(policy, None, owner.version)
        if sampling.schema is not None:
            core.keep_grammar(owner, sampling.schema)
        speaker, version = self._adapters.get(policy), self._versions[policy]
        asked = [core.settings(sampling, codec, room, core.place_seed(seed, k)) for k in range(n)]
        answers = await asyncio.gather(*(self._backend.ask(speaker, prompt_ids, one, sampling.schema) for one in asked))
        stops = self._stops[policy]
        done = [core.completion(answer, prompt_ids, sampling, codec, stops, version) for answer in answers]
        for one in done if sampling.schema is not None else ():
            core.check_schema(owner, one)
        return done


class InsideEngine(VllmEngine):
    """A `VllmEngine` whose vLLM runs in this process, and whose cache can be emptied."""

    def forget(self) -> None:
        """Drops what is kept of earlier chats; to be called while nobody is speaking."""
        self._backend.forget()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Ends vLLM and gives its memory back."""
        self._backend.close()  # type: ignore[attr-defined]


def engine(
    policies: Mapping[str, Policy],
    *,
    server: str | None = None,
    folder: str | None = None,
    dtype: Literal["own", "float32", "bfloat16"] = "own",
    max_rows: int = 256,
    max_model_len: int | None = None,
    max_lora_rank: int | None = None,
    cache_gib: float | None = None,
    gpu_memory_utilization: float | None = None,
    tensor_parallel_size: int = 1,
    enforce_eager: bool | None = None,
    timeout: float = 600.0,
    retries: int = 3,
) -> VllmEngine:
    """vLLM over the policies, in this process or, with `server` (`http://host:port`), behind `vllm serve`.

    Weights go through `folder` (default: a temporary one; a server must be able to read it). `dtype` is the precision
    of sampling. `max_rows` is the most answers sampled at once; `cache_gib` the memory of keys and values, otherwise
    `gpu_memory_utilization` of a GPU. `max_lora_rank` makes room for adapters that grow (default: the rank they have),
    `enforce_eager` runs without compiled graphs (default: on a CPU). A server has its own `vllm serve` options for
    these; `timeout` (seconds) and `retries` are of requests to it.
    """
    for name, value in {"max_rows": max_rows, "tensor_parallel_size": tensor_parallel_size}.items():
        if value < 1:
            raise ValueError(f"engine vllm: {name}={value}; it must be at least 1")
    what = core.hosted(policies, dtype, max_lora_rank)
    for policy in policies.values():
        policy.coarse = what.dtype == "bfloat16" and str(policy.model.dtype) == "torch.float32"
    handover = core.Handover(folder)
    if server is not None:
        from cothink.engines.vllm_server import Server

        return VllmEngine(policies, Server(server, what, timeout, retries), handover)
    from cothink.engines.vllm_inside import Inside

    if what.whole is not None and not what.adapters:  # a resumed run's weights are not those of the model's folder
        _, place = handover.put(policies[what.whole])
        handover.done(what.whole, place)
        what = core.moved(what, place)
    inside = Inside(
        what, max_rows, max_model_len, cache_gib, gpu_memory_utilization, tensor_parallel_size, enforce_eager
    )
    return InsideEngine(policies, inside, handover)
