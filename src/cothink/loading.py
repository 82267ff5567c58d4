"""Models, tokenizers and adapters of a recipe's policies; adapters over one model share its weights."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from cothink.models import ModelError
from cothink.policy import Policy, lora_config


def load_policies(
    specs: Mapping[str, Any],
    where: Callable[[str], str | Path],
    total_steps: Mapping[str, int] | None = None,
    seed: int = 0,
) -> dict[str, Policy]:
    """Loads every policy of a recipe; adapters over one model share its weights in memory.

    `where` turns a model name into a folder or hub id; `total_steps` is the length of each policy's schedule. New
    adapters are drawn from `seed` and their policy's name.
    """
    bases: dict[tuple[str, str], Any] = {}
    policies: dict[str, Policy] = {}
    for name, spec in specs.items():
        source, dtype = str(where(spec.model)), _dtype(spec.dtype)
        mixed = spec.lora_r is None and dtype == torch.bfloat16
        dtype = torch.float32 if mixed else dtype
        tokenizer = _tokenizer(source)
        if spec.lora_r is None:
            model, adapter = _model(source, dtype, spec), None
        else:
            model = bases.get((source, str(dtype)))
            adapter = f"policy-{name}"  # never a part of PEFT's own prefix "lora_", which it would confuse
            model = model if model is not None else _model(source, dtype, spec)
            with torch.random.fork_rng():
                torch.manual_seed(random.Random(f"{seed}/adapter/{name}").getrandbits(63))
                model = _with_adapter(model, adapter, spec)
            bases[source, str(dtype)] = model
        if spec.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.eval()
        policies[name] = Policy(name, model, tokenizer, spec, adapter, mixed, (total_steps or {}).get(name, 0))
    return policies


def _model(source: str, dtype: torch.dtype, spec: Any) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with _readable(source):
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    return model.to(device)


def _tokenizer(source: str) -> Any:
    from transformers import AutoTokenizer

    with _readable(source):
        return AutoTokenizer.from_pretrained(source)


@contextlib.contextmanager
def _readable(source: str) -> Iterator[None]:
    """Says which model it was that could not be read: a file cut short, a folder half copied, a hub out of reach."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        raise ModelError(
            f"{source} cannot be read ({what}); download or copy it again, or name another policies.NAME.model"
        ) from error


def _with_adapter(model: Any, name: str, spec: Any) -> Any:
    from peft import PeftModel, get_peft_model

    if isinstance(model, PeftModel):
        model.add_adapter(name, lora_config(spec))
        return model
    return get_peft_model(model, lora_config(spec), adapter_name=name)


def _dtype(name: str) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
