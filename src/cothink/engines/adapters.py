"""Several adapters of one base in one forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch


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
