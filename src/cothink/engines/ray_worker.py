"""What runs in a worker's process: the inner engine over its own copies of the policies, and the orders it follows."""

from __future__ import annotations

import asyncio
import importlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cothink.types import Completion, Sampling

if TYPE_CHECKING:
    from cothink.policy import Policy


@dataclass(frozen=True, slots=True)
class Parcel:
    """A policy's trained weights as bytes by name, and the adapter's config where it has one."""

    policy: str
    version: int
    config: Any
    weights: Mapping[str, Any]


class Speaker:
    """An inner engine in a process of its own, which follows numbered orders: new weights, and what to forget.

    A request says which order it comes after and waits for that one, so that no answer is by older weights. Within the
    worker a policy's version is the number of its last order: versions of a run may come twice, these do not.
    """

    def __init__(self) -> None:
        self._policies: dict[str, Policy] = {}
        self._engine: Any = None
        self._versions: dict[str, int] = {}
        self._orders: dict[int, Parcel | None] = {}
        self._done = 0
        self._error: Exception | None = None
        self._moved = asyncio.Condition()

    async def start(
        self, made: Any, inner: str, threads: int, options: Mapping[str, Any], done: int, *parcels: Parcel
    ) -> dict[str, bool]:
        """Makes policies and engine as they stand after order `done`; returns which policies it samples coarsely."""
        import torch

        torch.set_num_threads(threads)
        self._policies = _opened(made, inner)
        self._versions = {name: p.version for name, p in self._policies.items()}
        for policy in self._policies.values():
            policy.version = 0
        for number, parcel in enumerate(parcels, 1):
            self._take(number, parcel)
        module = importlib.import_module(f"cothink.engines.{inner}")
        self._engine = module.engine(self._policies, **options)
        self._done = done
        await self._follow()  # perhaps an order was here first
        return {name: p.coarse for name, p in self._policies.items()}

    async def order(self, number: int, parcel: Parcel | None) -> None:
        """One order; they may come in any sequence and are followed in theirs. None: forget earlier chats."""
        self._orders[number] = parcel
        await self._follow()

    async def caught_up(self, number: int) -> None:
        """Waits until an order has been followed; raises what went wrong with one."""
        async with self._moved:
            await self._moved.wait_for(lambda: self._done >= number or self._error is not None)
        if self._error is not None:
            raise self._error

    async def generate(
        self, after: int, policy: str, prompt_ids: tuple[int, ...], sampling: Sampling, n: int, seed: int
    ) -> list[Completion]:
        """As the inner engine's, with the versions that the run knows."""
        await self.caught_up(after)
        found = await self._engine.generate(policy, (), prompt_ids, sampling, n, seed)
        return [replace(c, version=self._versions[policy]) for c in found]

    async def _follow(self) -> None:
        """Follows the orders that are next."""
        try:
            while self._engine is not None and self._done + 1 in self._orders:
                following = self._orders.pop(self._done + 1)
                if following is None:
                    self._engine.forget()
                else:
                    self._take(self._done + 1, following)
                    self._engine.load(following.policy, None, self._done + 1)
                self._done += 1
        except Exception as error:
            self._error = error
        async with self._moved:
            self._moved.notify_all()

    def process(self) -> int:
        """The number of this process."""
        return os.getpid()

    def _take(self, number: int, parcel: Parcel) -> None:
        policy = self._policies[parcel.policy]
        _fill(policy, parcel)
        policy.version, self._versions[parcel.policy] = number, parcel.version


def bundle(policies: Mapping[str, Policy]) -> Any:
    """Policies as bytes [n] for workers: models, adapters and tokenizers, without what only training needs."""
    import numpy as np
    import torch

    bare = {
        name: replace(p, grammars={}, _optimizer=None, _scheduler=None, _reference=None, _parameters=[])
        for name, p in policies.items()
    }
    buffer = io.BytesIO()
    torch.save(bare, buffer)
    return np.frombuffer(buffer.getbuffer(), np.uint8)


def parcel(policy: Policy, version: int) -> Parcel:
    """The weights of this moment: an adapter's own, or all."""
    if policy.adapter is None:
        return Parcel(policy.name, version, None, _bytes(policy.model.state_dict()))
    from peft import get_peft_model_state_dict

    found = get_peft_model_state_dict(policy.model, adapter_name=policy.adapter)
    return Parcel(policy.name, version, policy.model.peft_config[policy.adapter], _bytes(found))


def _opened(made: Any, inner: str) -> dict[str, Policy]:
    """The policies of a bundle, where the inner engine wants them: vLLM holds weights of its own."""
    import torch

    there = "cuda" if inner == "local" and torch.cuda.is_available() else "cpu"
    return torch.load(io.BytesIO(memoryview(made)), map_location=there, weights_only=False)  # written by this very run


def _bytes(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors as bytes, which travel without a copy; numpy has no bfloat16."""
    import torch

    return {k: w.detach().cpu().contiguous().flatten().view(torch.uint8).numpy() for k, w in weights.items()}


def _fill(policy: Policy, given: Parcel) -> None:
    """Puts the weights of a parcel in the place of a policy's own."""
    import torch

    if policy.adapter is None:
        own = policy.model.state_dict()
    else:
        from peft import get_peft_model_state_dict

        if given.config.r != policy.model.peft_config[policy.adapter].r:  # adapters were stacked into one
            policy.replace_adapter(given.config)
        own = get_peft_model_state_dict(policy.model, adapter_name=policy.adapter)
    if own.keys() != given.weights.keys():
        raise RuntimeError(f"policy {policy.name}: the worker's weights have other names than the trainer's")
    with torch.no_grad():
        for name, mine in own.items():
            mine.copy_(torch.from_numpy(given.weights[name].copy()).view(mine.dtype).view(mine.shape))
