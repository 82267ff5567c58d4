"""A pool of engines in processes of their own, on this machine or on those of a Ray cluster."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from cothink.chat import Codec
from cothink.engines import ray_worker
from cothink.engines.routing import Gone, Pool
from cothink.types import Completion, Message, PlayError, Sampling

if TYPE_CHECKING:
    from cothink.policy import Policy

AT_ONCE = 1 << 14
"""Requests that one worker may hold; each is no more than a waiting coroutine."""
HERE = "cothink-here"
"""The namespace of a Ray that we started for ourselves."""
PATIENCE = 600.0
"""Seconds that a cluster has to find room for the workers and to start them."""


class Hand:
    """The driver's hand on one worker: a Ray actor around a `Speaker`."""

    def __init__(self, ray: Any, actor: Any, start: tuple[Any, ...]):
        self._ray, self.actor = ray, actor
        self.started = actor.start.remote(*start)

    def ready(self) -> bool:
        """Whether it has started; raises Gone if it ended before."""
        if not self._ray.wait([self.started], timeout=0)[0]:
            return False
        self.wait()
        return True

    def wait(self) -> dict[str, bool]:
        """What its start returned; raises Gone if its process ended, else what went wrong."""
        try:
            return self._ray.get(self.started)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayActorError as error:
            raise Gone(reason(error)) from None

    async def generate(self, *asked: Any) -> list[Completion]:
        """One request; cancelling it here takes it out of the worker too."""
        answer = self.actor.generate.remote(*asked)
        try:
            return await answer
        except asyncio.CancelledError:
            self._ray.cancel(answer)
            raise
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayActorError as error:
            raise Gone(reason(error)) from None

    def end(self) -> None:
        """Ends its process, if it has not ended."""
        self._ray.kill(self.actor)


class RayEngine:
    """Samples from copies of the policies' weights in `workers` processes, which `load` renews.

    Weights are put in Ray's object store once for all workers. Every request names the last order that its worker must
    have followed, so that the bound on the age of weights is 0 versions; a worker that is new begins with the newest.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        ray: Any,
        workers: int,
        resources: Mapping[str, Any],
        inner: tuple[str, int, Mapping[str, Any]],
    ):
        from cothink.engines.local import codec_of

        self.policies, self._inner = dict(policies), inner
        self.say = lambda text: print(text, file=sys.stderr)
        self._ray, self._told = ray, (0, 0)
        self._codecs = {name: codec_of(p) for name, p in self.policies.items()}
        self._versions = {name: p.version for name, p in self.policies.items()}
        self._actor = ray.remote(ray_worker.Speaker).options(max_concurrency=AT_ONCE, **resources)
        self._bundle = ray.put(ray_worker.bundle(self.policies))
        self._parcels: dict[str, Any] = {}
        self._orders = self._stale = 0
        me = weakref.proxy(self)  # the workers end with the engine, not when a cycle is found
        self.pool = Pool(lambda: me._start(), workers, lambda text: me.say(f"engine ray: {text}"))
        self._first(resources)

    def codec(self, policy: str) -> Codec:
        """The chat codec of a policy's tokenizer."""
        return self._codecs[policy]

    def load(self, policy: str, weights: Any, version: int) -> None:
        """Sends the policy's weights of this moment to all workers; whoever asks next waits until they are there."""
        parcel = self._ray.put(ray_worker.parcel(self.policies[policy], version))
        self._parcels[policy], self._versions[policy] = parcel, version
        self._order(parcel)

    def forget(self) -> None:
        """Drops what is kept of earlier chats; to be called while nobody is speaking."""
        self._order(None)

    async def generate(
        self,
        policy: str,
        messages: Sequence[Message],
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        n: int,
        seed: int,
    ) -> list[Completion]:
        """See `Engine`; a request whose worker ends is asked again with the same seed."""
        owner = self.policies[policy]
        if owner.version != self._versions[policy]:  # a resumed run has read a checkpoint
            self.load(policy, None, owner.version)
        if sampling.schema is not None:
            self.grammar(policy, sampling.schema)
        after, version = self._orders, self._versions[policy]
        found = await self.pool.ask(
            policy, prompt_ids, n, lambda worker: worker.generate(after, policy, prompt_ids, sampling, n, seed)
        )
        if any(c.version != version for c in found):
            raise PlayError(f"policy {policy}: a worker answered with weights other than those of version {version}")
        self._stale = max(self._stale, owner.version - version)
        return found

    def grammar(self, policy: str, schema: str) -> None:
        """Makes the grammar that the workers follow for a schema, once, for the policy's trainer."""
        owner = self.policies[policy]
        if schema not in owner.grammars:
            if self._inner[0] == "vllm":
                from cothink.engines.vllm_core import keep_grammar

                keep_grammar(owner, schema)
            else:
                from cothink.engines.local import grammar_of

                owner.grammars[schema] = grammar_of(owner, self._codecs[policy], schema)

    def figures(self) -> dict[str, float]:
        """What happened since this was last asked: workers lost, requests asked again, age of weights in versions."""
        now = self.pool.deaths, self.pool.repeated
        (deaths, repeated), self._told, stale, self._stale = self._told, now, self._stale, 0
        return {
            "engine/workers_lost": float(now[0] - deaths),
            "engine/asked_again": float(now[1] - repeated),
            "engine/staleness": float(stale),
        }

    def settle(self) -> None:
        """Waits until every worker has followed every order."""
        self._ray.get([seat.worker.actor.caught_up.remote(self._orders) for seat in self.pool.seats])

    def close(self) -> None:
        """Ends the workers; Ray itself goes on."""
        for seat in self.pool.seats:
            seat.worker.end()

    def _first(self, resources: Mapping[str, Any]) -> None:
        """Waits for the first workers; raises PlayError when one does not start."""
        seats = self.pool.seats
        _, missing = self._ray.wait([s.worker.started for s in seats], num_returns=len(seats), timeout=PATIENCE)
        if missing:
            self.close()
            free = {k: v for k, v in self._ray.available_resources().items() if k in ("CPU", "GPU")}
            raise PlayError(
                f"engine ray: {len(missing)} of {len(seats)} workers did not start in {PATIENCE:g} s; each takes "
                f"{dict(resources)}, and {free or 'nothing'} is free: write fewer workers, cpus or gpus"
            )
        for seat in seats:
            try:
                coarse = seat.worker.wait()
            except Gone as error:
                raise PlayError(
                    f"engine ray: worker {seat.number} of {len(seats)} ended while it started ({error})"
                ) from None
            for name, policy in self.policies.items():
                policy.coarse = coarse[name]

    def _start(self) -> Hand:
        start = (self._bundle, *self._inner, self._orders, *self._parcels.values())
        return Hand(self._ray, self._actor.remote(), start)

    def _order(self, parcel: Any) -> None:
        self._orders += 1
        self.pool.forget()
        for seat in self.pool.seats:
            seat.worker.actor.order.remote(self._orders, parcel)


def reason(error: Exception) -> str:
    """Which process it was, and Ray's word for why it ended."""
    text = str(error)
    found = {name: re.search(rf"{name}: (\S+)", text) for name in ("pid", "ip")}
    where = [f"{name} {match[1]}" for name, match in found.items() if match]
    told = re.search(r"Worker exit detail: (.+?)(?: Some common causes|$)", text, re.M)
    return ", ".join([*where, told[1] if told else text.strip().splitlines()[-1]])


def connected(address: str | None, workers: int) -> tuple[Any, bool]:
    """The ray module, joined to the cluster at `address` or RAY_ADDRESS, else to one that is started here, for us."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise PlayError(f"engine ray needs an extra ({error}): pip install 'cothink[ray]'") from None
    if not ray.is_initialized():
        where = address or os.environ.get("RAY_ADDRESS") or "local"
        here = {"num_cpus": workers, "include_dashboard": False, "namespace": HERE} if where == "local" else {}
        before = signal.getsignal(signal.SIGTERM)
        ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR, **here)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray's own ends a run at once, without its last checkpoint
    return ray, ray.get_runtime_context().namespace == HERE


def engine(
    policies: Mapping[str, Policy],
    *,
    workers: int = 2,
    inner: Literal["local", "vllm"] = "local",
    address: str | None = None,
    cpus: float = 1,
    gpus: float = 0,
    **options: Any,
) -> RayEngine:
    """`workers` engines of the kind `inner` in processes of their own, each with `cpus` and `gpus` of Ray's.

    `address` is that of a running cluster (default: RAY_ADDRESS, or Ray is started on this machine); all its machines
    have cothink and this Python. The other options are those of the inner engine.
    """
    if workers < 1:
        raise ValueError(f"engine ray: workers={workers}; it must be at least 1")
    ray, here = connected(address, workers)
    resources = {"num_cpus": 0 if here else cpus, "num_gpus": gpus}  # what is ours alone need not be counted
    return RayEngine(policies, ray, workers, resources, (inner, max(1, int(cpus)), options))
