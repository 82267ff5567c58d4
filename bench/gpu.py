"""Generation, one RL step and training on a GPU in bfloat16: the other benchmarks' own code, one run under 8 minutes.

`python bench/gpu.py [--model random:135m] [--parts generation step training]`. `random:135m` and `random:1.5b` are
models with weights drawn at random (a rate does not depend on them), so that nothing has to be fetched. vLLM joins in
when this Python has it, or the one that COTHINK_VLLM_PYTHON names.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

import common
import generation
import step
import torch
import training

from cothink import models

SHAPES = {
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "layers": 30, "heads": 9, "groups": 3},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "layers": 28, "heads": 12, "groups": 2},
}
VOCABULARY, CONTEXT = 49152, 4096
PARTS = {"generation": generation, "step": step, "training": training}
SIZES: Mapping[str, Mapping[str, int]] = {
    "generation": {"prompts": 64, "siblings": 8, "shortest": 64, "longest": 256, "rows": 512, "repeats": 3},
    "step": {"prompts": 16, "siblings": 8, "longest": 256, "repeats": 3},
    "training": {
        "prompts": 32, "siblings": 8, "shortest": 64, "longest": 256, "rows": 512, "microbatch": 16384, "repeats": 3,
    },
}  # fmt: skip
ENOUGH = 330
"""Seconds after which no further part is begun: the longest takes about two minutes."""


def random_model(shape: str, folder: str) -> str:
    """Writes a model with random weights and the built-in tokenizer, its vocabulary filled up, into a folder."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    if shape not in SHAPES:
        raise SystemExit(f"random:{shape}: write one of {', '.join('random:' + s for s in SHAPES)}")
    tokenizer = AutoTokenizer.from_pretrained(models.where("builtin:tiny"))
    tokenizer.add_tokens([f"<{k}>" for k in range(len(tokenizer), VOCABULARY)])
    size = SHAPES[shape]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size["hidden_size"],
        intermediate_size=size["intermediate_size"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["groups"],
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(model: str, parts: Sequence[str], sizes: Mapping[str, Mapping[str, int]]) -> None:
    """The parts one after the other, in bfloat16, each with the sizes given for it."""
    begun = time.monotonic()
    for name in parts:
        used = time.monotonic() - begun
        if used > ENOUGH:
            print(f"\n{name}: skipped, {used:.0f} s are used already; ask for it alone with --parts {name}")
            continue
        words = [w for key, value in sizes[name].items() for w in (f"--{key}", str(value))]
        if name == "generation" and (python := _vllm()):
            words += ["--vllm", python]
        part = PARTS[name]
        part.measure(common.parse(part.build(), ["--model", model, "--dtype", "bfloat16", *words]))
        print(f"({name}: {time.monotonic() - begun - used:.0f} s)")


def _vllm() -> str | None:
    return os.environ.get("COTHINK_VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else None)


def main() -> None:
    """Reads the options and measures."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="random:135m")
    made.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    options = made.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench/gpu.py needs a CUDA GPU, and this torch sees none; the other benchmarks run on a CPU")
    with tempfile.TemporaryDirectory() as folder:
        kind, _, shape = options.model.partition(":")
        run(random_model(shape, folder) if kind == "random" else options.model, options.parts, SIZES)


if __name__ == "__main__":
    main()
