"""Policies that speak for a while as if they had never learned: for ablations of one role of a trained team."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from cothink import models
from cothink.session import Session


@contextlib.contextmanager
def untrained(session: Session, names: Iterable[str]) -> Iterator[None]:
    """The named policies have the weights that the recipe names while the block runs; then their own again."""
    changed = [(n, session.policies[n]) for n in dict.fromkeys(names) if getattr(session.policies.get(n), "version", 0)]
    kept = [_keep(policy) for _, policy in changed]
    versions = [policy.version for _, policy in changed]
    try:
        for name, policy in changed:
            _forget(policy)
            policy.version = 0  # the version of untrained weights; engines follow whatever differs from the last one
            session.engines[name].load(name, None, 0)
        yield
    finally:
        for (name, policy), weights, version in zip(changed, kept, versions, strict=True):
            _restore(policy, weights)
            policy.version = version
            session.engines[name].load(name, None, version)


def _keep(policy: Any) -> list[Any]:
    return [weight.detach().clone() for weight in policy.parameters()]


def _restore(policy: Any, weights: list[Any]) -> None:
    import torch

    with torch.no_grad():
        for weight, own in zip(policy.parameters(), weights, strict=True):
            weight.copy_(own)


def _forget(policy: Any) -> None:
    """An adapter that adds nothing, or the weights that the recipe names."""
    import torch

    with torch.no_grad():
        if policy.adapter is None:
            source = str(models.where(policy.settings.model))
            fresh = type(policy.model).from_pretrained(source, dtype=policy.model.dtype)
            policy.model.load_state_dict(fresh.state_dict())
            return
        for name, weight in policy.model.named_parameters():
            if f".{policy.adapter}." in name and "lora_B" in name:
                weight.zero_()
