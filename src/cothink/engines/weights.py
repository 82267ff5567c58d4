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
        self.model, self._dtype, self._form = _copy(model, dtype) if self._copied else model, dtype, _form(model)
        self._versions: dict[str, int] = {}

    def refresh(self) -> list[str]:
        """Follows the trainer, to be called while nobody speaks; returns the policies whose weights are new."""
        versions = {name: p.version for name, p in self._policies.items()}
        new = [name for name, v in versions.items() if self._versions.get(name) != v]
        if new and self._copied:
            if _form(self._source) != self._form:  # an adapter was replaced: nothing lies where it did
                self.model, self._form = _copy(self._source, self._dtype), _form(self._source)
            with torch.no_grad():
                for mine, theirs in zip(self.model.modules(), self._source.modules(), strict=True):
                    _follow(mine, theirs)
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


class Packed(torch.nn.Module):
    """A linear layer without gradients whose weights lie in the order in which oneDNN multiplies them on a CPU."""

    def __init__(self, layer: torch.nn.Linear, dtype: torch.dtype):
        super().__init__()
        self._dtype = dtype
        self.follow(layer)

    def follow(self, layer: torch.nn.Linear) -> None:
        """Takes over the weights of a layer."""
        self._weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().to(self._dtype), None)
        self._bias = None if layer.bias is None else layer.bias.detach().to(self._dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the layer would give, in the dtype of the packed weights."""
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")


def _copy(model: Any, dtype: torch.dtype) -> Any:
    """The model in another precision; in bfloat16 on a CPU that has it, its linear layers are packed."""
    made = copy.deepcopy(model).to(dtype)
    if dtype == torch.bfloat16 and model.device.type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        for parent in list(made.modules()):
            if isinstance(parent, torch.nn.ModuleDict):  # adapters: small, and PEFT asks for the dtype of their weights
                continue
            for name, layer in list(parent.named_children()):
                if type(layer) is torch.nn.Linear:
                    setattr(parent, name, Packed(layer, dtype))
    return made


def _form(model: Any) -> list[tuple[str, torch.Size]]:
    return [(name, weight.shape) for name, weight in model.named_parameters()]


def _follow(mine: torch.nn.Module, theirs: torch.nn.Module) -> None:
    if isinstance(mine, Packed):
        assert isinstance(theirs, torch.nn.Linear)
        mine.follow(theirs)
        return
    for own, other in zip(mine.parameters(recurse=False), theirs.parameters(recurse=False), strict=True):
        own.copy_(other)


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
