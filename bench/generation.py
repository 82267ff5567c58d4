"""Generation: cothink's local engine against `model.generate`, same model, prompts and lengths, in one run.

`python bench/generation.py [--model builtin:tiny] [--prompts 64] [--siblings 8] [--tokens 64] [--repeats 3]`
prints medians and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import torch
import transformers

from cothink import models
from cothink.engines.local import engine
from cothink.parts import PolicyPart
from cothink.policy import load_policies
from cothink.tasks.wordsums import load
from cothink.types import Message, Sampling


def main() -> None:
    """Times both ways and prints tokens per second."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--system", default="Solve.")
    for name, value in (("prompts", 64), ("siblings", 8), ("tokens", 64), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    o = parser.parse_args()
    policy = load_policies({"p": PolicyPart(model=o.model)}, models.where)["p"]
    local = engine({"p": policy})
    codec = local.codec("p")
    chats = [[Message("system", o.system), Message("user", t.question)] for t in load(levels=(1, 8), count=o.prompts)]
    prompts = [codec.start(chat) for chat in chats]

    def ours() -> int:
        async def everyone() -> int:
            sampling = Sampling(max_tokens=o.tokens)
            calls = [local.generate("p", c, p, sampling, o.siblings, k) for k, (c, p) in enumerate(zip(chats, prompts))]
            return sum(len(c.output_ids) for group in await asyncio.gather(*calls) for c in group)

        return asyncio.run(everyone())

    def theirs() -> int:
        width = max(map(len, prompts))
        pad = policy.tokenizer.pad_token_id
        rows = [[pad] * (width - len(p)) + list(p) for p in prompts for _ in range(o.siblings)]
        total = 0
        for start in range(0, len(rows), local.max_rows):
            ids = torch.tensor(rows[start : start + local.max_rows])
            mask = torch.tensor(
                [[0] * (width - len(p)) + [1] * len(p) for p in prompts for _ in range(o.siblings)]
            )[start : start + local.max_rows]  # fmt: skip
            stop = list(codec.stop_ids)
            with torch.inference_mode():
                out = policy.model.generate(
                    input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
                    max_new_tokens=o.tokens, pad_token_id=pad, eos_token_id=stop,
                )  # fmt: skip
            for row in out[:, width:].tolist():
                ends = [k for k, token in enumerate(row) if token in stop]
                total += ends[0] + 1 if ends else len(row)
        return total

    rates: dict[str, list[float]] = {"local": [], "generate": []}
    for _ in range(o.repeats):
        for name, work in (("local", ours), ("generate", theirs)):
            started = time.perf_counter()
            tokens = work()
            rates[name].append(tokens / (time.perf_counter() - started))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(
        f"{o.model}: {o.prompts} prompts x {o.siblings} siblings, at most {o.tokens} tokens; torch {torch.__version__}"
        f", transformers {transformers.__version__}, {torch.get_num_threads()} threads, median of {o.repeats}"
    )
    for name, value in medians.items():
        print(f"{name:>10}  {value:10.0f} tokens/s  {value / medians['generate']:6.2f} x")


if __name__ == "__main__":
    main()
