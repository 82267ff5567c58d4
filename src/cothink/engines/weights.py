"""Whose weights speak: the trainer's own or a copy of them, and which adapter for which token."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch


class Weights:
    """The model that samples for policies that share it; a copy where sampling has a precision of its own."""

    def __init__(self, model: Any, policies: Mapping[str, Any], dtype: torch.dtype):
        self._source, self._policies = model, policies
        self._copied = dtype != model.dtype
        self.model = copy.deepcopy(model).to(dtype) if self._copied else model
        self._versions: dict[str, int] = {}

    def refresh(self) -> list[str]:
        """Follows the trainer, to be called while nobody speaks; returns the policies whose weights are new."""
        versions = {name: p.version for name, p in self._policies.items()}
        new = [name for name, v in versions.items() if self._versions.get(name) != v]
        if new and self._copied:
            with torch.no_grad():
                for mine, theirs in zip(self.model.parameters(), self._source.parameters(), strict=True):
                    mine.copy_(theirs)
        if self.model.training:
            self.model.eval()
        self._versions = versions
        return new

    @contextlib.contextmanager
    def speaking(self, names: Sequence[str]) -> Iterator[None]:
        """Each token, one name per row of the batch, under the adapter of its policy."""
        adapters = {name: self._policies[name].adapter for name in set(names)}
        if None in adapters.values():
            yield
        elif len(adapters) == 1:
            (adapter,) = adapters.values()
            if self.model.active_adapter != adapter:
                self.model.set_adapter(adapter)
            yield
        else:
            with each_its_own(self.model, [adapters[name] for name in names]):
                yield


@contextlib.contextmanager
def each_its_own(model: Any, names: Sequence[str]) -> Iterator[None]:
    """Tells every adapted layer which adapter each row of the batch uses."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    def tell(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"adapter_names": names}

    hooks = [
        module.register_forward_pre_hook(tell, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, BaseTunerLayer) and isinstance(module, torch.nn.Module)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
