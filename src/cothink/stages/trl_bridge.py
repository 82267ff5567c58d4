"""What the stages on TRL's trainers share: arguments, silence, metrics, and the model given back as it was."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cothink.types import Sample

if TYPE_CHECKING:
    from cothink.policy import Policy

Report = Callable[[int, Mapping[str, Any]], None]

TOKEN_IDS = ("eos_token_id", "bos_token_id", "pad_token_id")
PATCHED = ("forward", "_original_forward", "model_tags")
STATE = "trainer_state.json"
"""The file a trainer writes last: a checkpoint without it is half written."""


class SetupError(RuntimeError):
    """Training by a library that is not installed, or of something that has no weights to train."""


def require_trl() -> None:
    """Raises SetupError, with what to install, when TRL is not here."""
    try:
        import trl  # noqa: F401
    except ImportError:
        what = "sft and dpo stages run on TRL's trainers, which need an extra"
        raise SetupError(f"{what}: pip install 'cothink[trl]'") from None


def arguments(policy: Policy, folder: Path, *, scheduler: str, warmup_steps: int, **own: Any) -> dict[str, Any]:
    """Trainer arguments from a policy's own settings: optimiser, precision, device; no console, no trackers, no hub.

    TRL switches bfloat16 and gradient checkpointing on unless told otherwise, on a CPU too.
    """
    settings, cpu = policy.settings, policy.device.type == "cpu"
    kind = "constant_with_warmup" if scheduler == "constant" and warmup_steps else scheduler
    return {
        "output_dir": str(folder),
        "use_cpu": cpu,
        "bf16": policy.mixed,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "optim": "adamw_torch",
        "weight_decay": settings.weight_decay,
        "adam_beta1": settings.betas[0],
        "adam_beta2": settings.betas[1],
        "max_grad_norm": settings.max_grad_norm,
        "lr_scheduler_type": kind,
        "warmup_steps": warmup_steps,
        "logging_steps": 1,
        "logging_first_step": True,
        "save_total_limit": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": not cpu,
        **own,
    }


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences what the libraries print, warn about and send home; errors still come through."""
    import datasets
    from huggingface_hub import constants
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    bars = datasets.are_progress_bars_disabled()
    told = constants.HF_HUB_DISABLE_TELEMETRY
    constants.HF_HUB_DISABLE_TELEMETRY = True  # TRL reports every trainer that is made
    loggers = [logging.getLogger(name) for name in ("trl", "accelerate", "datasets")]
    levels = [logger.level for logger in loggers]
    transformers_logging.set_verbosity_error()
    datasets.disable_progress_bars()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        constants.HF_HUB_DISABLE_TELEMETRY = told
        transformers_logging.set_verbosity(level)
        if not bars:
            datasets.enable_progress_bars()
        for logger, old in zip(loggers, levels):
            logger.setLevel(old)


@contextlib.contextmanager
def lent(policy: Policy) -> Iterator[Any]:
    """The policy's model, ready to train its own weights alone; afterwards nothing but these weights has changed.

    Trainers patch `forward` (TRL's fused output layer, accelerate's mixed precision), the ids of special tokens and
    the tags of the model; a copy of a patched model would run the weights of the original.
    """
    model = policy.activate()
    base = model.get_base_model() if policy.adapter is not None else model
    places = (model, base)
    patched = [{k: copy.copy(vars(m)[k]) for k in PATCHED if k in vars(m)} for m in places]
    configs = [c for c in (base.config, base.generation_config) if c is not None]
    ids = [{name: copy.copy(getattr(c, name, None)) for name in TOKEN_IDS} for c in configs]
    pad, cached = policy.tokenizer.pad_token, base.config.use_cache
    hooked = bool(getattr(base, "_require_grads_hooks", None))
    flags = [(p, p.requires_grad) for p in model.parameters()]
    own = {id(p) for p in policy.parameters()}
    for p, _ in flags:
        p.requires_grad_(id(p) in own)
    try:
        yield model
    finally:
        for m, before in zip(places, patched):
            for key in PATCHED:
                vars(m).pop(key, None)
            vars(m).update(before)
        for config, values in zip(configs, ids):
            for name, value in values.items():
                setattr(config, name, value)
        policy.tokenizer.pad_token, base.config.use_cache = pad, cached
        if not hooked:
            base.disable_input_require_grads()
        for p, flag in flags:
            p.requires_grad_(flag)
        model.zero_grad(set_to_none=True)
        model.eval()


def fingerprint(policy: Policy) -> str:
    """A hash of the policy's own weights: the adapter's, or all of them."""
    import torch

    digest = hashlib.blake2b(digest_size=16)
    for parameter in policy.parameters():
        digest.update(f"{tuple(parameter.shape)}{parameter.dtype}".encode())
        digest.update(parameter.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint a trainer left in a folder; None without one."""
    steps = {int(p.name.rpartition("-")[2]): p for p in folder.glob("checkpoint-*") if (p / STATE).is_file()}
    return steps[max(steps)] if steps else None


def dataset(rows: Sequence[Sample]) -> Any:
    """Rows as a trainer takes them: `input_ids`, and `labels` that are -100 wherever nothing is trained."""
    from datasets import Dataset

    return Dataset.from_list([labelled(row) for row in rows])


def labelled(row: Sample) -> dict[str, list[int]]:
    """One row's ids and labels."""
    labels = [i if t >= 0 else -100 for i, t in zip(row.ids, row.turns)]
    return {"input_ids": list(row.ids), "labels": labels}


def mean_nll(policy: Policy, rows: Sequence[Sample]) -> float:
    """Mean negative log-likelihood, in nats, of the trained tokens of some rows under the policy as it stands."""
    import torch
    from torch.nn.functional import cross_entropy

    model, total, count = policy.activate(), 0.0, 0
    training = model.training
    model.eval()
    with torch.no_grad(), policy.precision():
        for row in rows:
            ids = torch.tensor([row.ids], device=policy.device)
            places = torch.tensor([k for k, t in enumerate(row.turns) if t >= 0], device=policy.device)
            logits = model(input_ids=ids, logits_to_keep=places - 1, use_cache=False).logits[0].float()
            total += float(cross_entropy(logits, ids[0, places], reduction="sum"))
            count += len(places)
    model.train(training)
    return total / count


def follower(report: Report, measure: Callable[[], Mapping[str, float]], every: int) -> Any:
    """A trainer's callback: passes figures on as they come, and saves and stops when the run is asked to stop.

    `report` gets the optimiser step and its figures; after a resume it gets those of the earlier attempt again.
    `measure` adds figures every `every` steps (the length of a pass over the data) and after the last one.
    """
    from transformers import TrainerCallback

    class Follower(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for entry in state.log_history:
                report(entry["step"], entry)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            report(state.global_step, dict(logs or {}))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step = state.global_step
            if step % every == 0 or step == state.max_steps:
                figures = {**measure(), "step": step}
                state.log_history.append(figures)  # before the trainer may save its place
                report(step, figures)
            # Ctrl-C cancels the task this code runs in, which takes effect once it awaits again.
            task = _current_task()
            if task is not None and task.cancelling():
                control.should_save = control.should_training_stop = True

    return Follower()


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no running loop: the stage is driven by other means
        return None


def ticker(advance: Callable[[int], None]) -> Any:
    """A trainer's callback that moves a progress bar."""
    from transformers import TrainerCallback

    class Ticker(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            advance(state.global_step)

    return Ticker()
