"""Rebuild the built-in model with one command: `python -m cothink.builtin.make OUT`."""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cothink.builtin.chats import CLEAN, MIXED, chats
from cothink.builtin.measure import Sampler, measure, table
from cothink.builtin.tokenizer import END, PAD, START, build, render
from cothink.tasks.wordsums import MAX_LEVEL, load

ROW_TOKENS = 1536
"""Padded tokens in one training batch."""
PEAK, FLOOR, WARMUP = 2e-3, 0.02, 0.03
"""Learning rate at its peak, the share of it kept at the end, the share of the time spent warming up."""
EASY, EASY_LEVEL = 0.12, 3
"""Share of the time spent on short problems first, and the highest level among them."""
SKILL = 0.6
"""Share of the time spent on clean chats, before the bad habits are mixed in."""
OTHER_WEIGHT = 0.05
"""Loss weight of a token that no assistant wrote, against 1 for one that an assistant did."""
SAVE_SECONDS, LOG_STEPS = 300, 100
"""Save this often, measure at every second save, log the loss this often."""


def new_model(tokenizer) -> LlamaForCausalLM:
    """Return an untrained Llama of about 0.9 million weights: 4 layers of width 128, tied embeddings."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.08,  # about 1/sqrt(width): copying is learnt faster than from the usual 0.02
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    return LlamaForCausalLM(config)


class Rows:
    """Endless batches of chats of similar length: ids [B, L] right-padded, and the loss weight of each token [B, L].

    Attention needs no mask: padding is on the right and attention is causal. Positions start at 0 in every row;
    a random offset would change nothing, because rotary attention only sees differences of positions.
    """

    def __init__(self, tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.random = random.Random(f"rows/{seed}")
        self.habits, self.hardest = CLEAN, EASY_LEVEL
        self.pad, self.end, self.start, self.assistant = (
            tokenizer.convert_tokens_to_ids(token) for token in (PAD, END, START, "assistant")
        )

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            texts = [render(chat) for chat in islice(chats(self.random, self.habits, self.hardest), 1000)]
            rows = sorted(self.tokenizer(texts)["input_ids"], key=len)
            batches: list[list[list[int]]] = [[]]
            for row in rows:
                if (len(batches[-1]) + 1) * len(row) > ROW_TOKENS:
                    batches.append([])
                batches[-1].append(row)
            self.random.shuffle(batches)
            for batch in batches:
                longest = max(map(len, batch))
                ids = [row + [self.pad] * (longest - len(row)) for row in batch]
                weights = [self._weights(row) + [0.0] * (longest - len(row)) for row in batch]
                yield torch.tensor(ids), torch.tensor(weights)

    def _weights(self, row: list[int]) -> list[float]:
        weights, speaking = [], False
        for at, token in enumerate(row):
            weights.append(1.0 if speaking else OTHER_WEIGHT)
            if token == self.end:
                speaking = False
            elif at >= 2 and row[at - 2] == self.start and row[at - 1] == self.assistant:
                speaking = True
        return weights


def train(model, tokenizer, out: Path, minutes: float, seed: int) -> int:
    """Train for so many minutes, saving and measuring on the way; return the number of tokens seen."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.98), weight_decay=0.05, fused=True)
    rows = Rows(tokenizer, seed)
    began = saved = time.monotonic()
    spent, losses, tokens, saves = 0.0, [], 0, 0
    for step, (ids, weights) in enumerate(rows):
        progress = (time.monotonic() - began - spent) / (60 * minutes)
        if progress >= 1:
            break
        rows.habits = CLEAN if progress < SKILL else MIXED
        rows.hardest = EASY_LEVEL if progress < EASY else MAX_LEVEL
        for group in optimizer.param_groups:
            group["lr"] = PEAK * schedule(progress)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (each * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        tokens += int((weights > 0).sum())
        if step % LOG_STEPS == 0:
            mean = sum(losses) / len(losses)
            losses.clear()
            print(f"{progress:6.1%}  step {step}  tokens {tokens:,}  loss {mean:.4f}", flush=True)
        if time.monotonic() - saved > min(SAVE_SECONDS, 15 * minutes):
            pause = time.monotonic()
            save(model, tokenizer, out)
            saves += 1
            if saves % 2 == 0:
                print(report(model, tokenizer, 120), flush=True)
            saved = time.monotonic()
            spent += saved - pause
    return tokens


def schedule(progress: float) -> float:
    """Return the share of the peak learning rate: a linear start, then a cosine down to `FLOOR`."""
    if progress < WARMUP:
        return max(progress / WARMUP, 1e-3)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP)))


def report(model, tokenizer, count: int, levels: tuple[int, int] = (2, 5)) -> str:
    """Measure on test problems at temperature 1 and show a few texts."""
    model.eval()
    tasks = load("test", levels=levels, count=count, seed=1)
    sampler = Sampler(model, tokenizer)
    answers = measure(sampler, tasks)
    model.train()
    texts = [f"  {name}: {answers[name][at]!r}" for at in range(2) for name in answers]
    lengths = [f"{name} {sum(map(len, tokenizer(said)['input_ids'])) / count:.0f}" for name, said in answers.items()]
    return "\n".join([table(tasks, answers), f"Mean tokens: {', '.join(lengths)}.", *texts])


def save(model, tokenizer, out: Path) -> None:
    """Write model and tokenizer into `out`, as a whole or not at all."""
    fresh = out.with_name(f".{out.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    model.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    for file in fresh.iterdir():
        file.chmod(0o644)  # safetensors writes 0600
    shutil.rmtree(out, ignore_errors=True)
    os.replace(fresh, out)


def main() -> None:
    """Parse the command line, build the tokenizer, train, measure and save."""
    parser = argparse.ArgumentParser(description="Rebuild the built-in model and its tokenizer.")
    parser.add_argument("out", type=Path, help="folder to write (an older one is replaced)")
    parser.add_argument("--minutes", type=float, default=24, help="training time (default 24)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = build(args.seed)
    model = new_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} weights, {len(tokenizer)} tokens", flush=True)
    tokens = train(model, tokenizer, args.out, args.minutes, args.seed)
    save(model, tokenizer, args.out)
    print(f"{tokens:,} tokens seen\n{report(model, tokenizer, 800, (1, 8))}", flush=True)


if __name__ == "__main__":
    main()
