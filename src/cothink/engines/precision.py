"""What this machine does best: which precision is fastest, how many tokens of keys and values fit."""

from __future__ import annotations

import math
import os
import time
from typing import Any

import torch

from cothink.attention import states

ROWS = 256
MARGIN = 1.1
"""bfloat16 must be this much faster to be worth its rounding."""


def fastest(model: Any) -> torch.dtype:
    """float32 or bfloat16, whichever multiplies a batch by one of the model's own layers faster; half a second."""
    if next(model.parameters()).device.type != "cpu":
        return torch.bfloat16
    shapes = {tuple(p.shape) for n, p in model.named_parameters() if p.dim() == 2 and "layers.0." in n}
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        layers = [torch.ones(shape, dtype=dtype) for shape in sorted(shapes)]
        inputs = [torch.ones(ROWS, layer.shape[1], dtype=dtype) for layer in layers]
        best = float("inf")
        for _ in range(5):
            started = time.perf_counter()
            for _ in range(4):
                for x, w in zip(inputs, layers, strict=True):
                    torch.nn.functional.silu(torch.nn.functional.linear(x, w))
            best = min(best, time.perf_counter() - started)
        seconds[dtype] = best
    return torch.bfloat16 if seconds[torch.float32] > MARGIN * seconds[torch.bfloat16] else torch.float32


def stored(model: Any, dtype: torch.dtype) -> torch.dtype:
    """What keys and values are kept in: on a CPU attention over float32 is faster, whatever the rest computes in."""
    return torch.float32 if next(model.parameters()).device.type == "cpu" else dtype


def cache_tokens(model: Any, dtype: torch.dtype, asked: float | None, default: float) -> int:
    """Tokens whose keys and values fit in `asked` GiB, or in `default` GiB or a quarter of the free memory."""
    each = 2 * math.prod(states(model)) * stored(model, dtype).itemsize
    gib = asked if asked is not None else min(default, _free(next(model.parameters()).device) / 4)
    return max(1, int(gib * 2**30 / each))


def _free(device: torch.device) -> float:
    """Free memory in GiB."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 2**30
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    except (ValueError, OSError):  # not every system says
        return 4.0
