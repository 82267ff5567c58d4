"""TRL's DPOTrainer on a policy's own weights: ids as they were sampled, a stored reference, one adapter or two."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cothink.stages.trl_bridge import lent

if TYPE_CHECKING:
    from cothink.policy import Policy


@dataclass(frozen=True, slots=True)
class Seat:
    """A policy's model while it learns preferences; `adapters` are those that speak, first the one that learns."""

    model: Any
    adapters: tuple[str, ...] = ()

    def activate(self) -> None:
        """Makes two adapters speak together and only the first one learn; anything else is left as it is."""
        if len(self.adapters) < 2:
            return
        self.model.base_model.set_adapter(list(self.adapters))
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(f".{self.adapters[0]}." in name and "lora_" in name)


@contextlib.contextmanager
def contending(policy: Policy, scale: float | None, seed: int) -> Iterator[Seat]:
    """The policy's model, lent without dropout, so that it starts exactly at its reference.

    With a `scale` a fresh adapter learns on top of the policy's own, which stays as it is; afterwards the two are one
    adapter, in which the fresh one counts `scale` times.
    """
    if scale is None:
        with lent(policy) as model, _still(model):
            yield Seat(model)
        return
    import torch

    from cothink.policy import lora_config

    own, extra = str(policy.adapter), f"{policy.adapter}-dpo"
    model = policy.activate()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.add_adapter(extra, lora_config(policy.settings))
    try:
        with lent(policy), _still(model):
            seat = Seat(model, (extra, own))
            seat.activate()
            try:
                yield seat
            finally:
                model.set_adapter(own)
        _stack(policy, extra, scale)
    finally:
        model.delete_adapter(extra)


@contextlib.contextmanager
def _still(model: Any) -> Iterator[None]:
    """Switches dropout off: with it, the policy and its reference differ before anything is learned."""
    from torch import nn

    known = [(m, m.p) for m in model.modules() if isinstance(m, nn.Dropout)]
    for module, _ in known:
        module.p = 0.0
    try:
        yield
    finally:
        for module, p in known:
            module.p = p


def _stack(policy: Policy, extra: str, scale: float) -> None:
    """Puts own + scale x extra in the place of the policy's adapter: low-rank matrices side by side, ranks added."""
    import torch
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    model, own = policy.model, str(policy.adapter)
    states = [
        {k: v.detach().clone() for k, v in get_peft_model_state_dict(model, adapter_name=n).items()}
        for n in (own, extra)
    ]
    configs = [model.peft_config[name] for name in (own, extra)]
    factors = [c.lora_alpha / c.r * f for c, f in zip(configs, (1.0, scale))]
    merged: Mapping[str, Any] = {
        key: torch.cat([f * s[key] for f, s in zip(factors, states)], 0)
        if "lora_A" in key
        else torch.cat([s[key] for s in states], 1)
        for key in states[0]
    }
    config = copy.copy(configs[0])
    config.r = sum(c.r for c in configs)
    config.lora_alpha = config.r  # the factors lie in the matrices now
    policy.replace_adapter(config)
    set_peft_model_state_dict(model, dict(merged), own)


def dpo_trainer(policy: Policy, seat: Seat, config: Any, rows: Any) -> Any:
    """TRL's DPOTrainer that takes ids and reference log-probs from the rows, on whatever adapter the policy has.

    TRL looks for an adapter called `default` and tokenises texts. So the trainer is built around the bare model, whose
    layers hold the adapters all the same, and gets the model with its adapters afterwards.
    """
    from transformers import PrinterCallback
    from trl.trainer.dpo_trainer import DPOTrainer

    class Trainer(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

        def _precompute_ref_logps(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

        def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            super()._load_from_checkpoint(*args, **kwargs)
            seat.activate()  # the trainer activates one adapter

    model = seat.model
    base = model.get_base_model() if policy.adapter is not None else model
    trainer = Trainer(base, args=config, train_dataset=rows, processing_class=policy.tokenizer)
    trainer.model = trainer.model_wrapped = trainer.callback_handler.model = model
    trainer.remove_callback(PrinterCallback)
    return trainer


def loss_of(trainer: Any, row: Mapping[str, Any]) -> float:
    """The trainer's own loss of one pair under the model as it stands."""
    import torch

    model = trainer.model
    training = model.training
    model.eval()
    batch = trainer._prepare_inputs(trainer.data_collator([dict(row)]))
    with torch.no_grad(), trainer.compute_loss_context_manager():
        value = float(trainer.compute_loss(model, batch))
    trainer._metrics["eval"].clear()
    model.train(training)
    return value
