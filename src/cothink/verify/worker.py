"""What runs inside a killable process: algebra on untrusted text. Imports math_verify or reasoning_gym."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import math
import resource
import signal
import time
from typing import Any

Reply = tuple[str, str | None, str, float]
"""Verdict word, parsed answer, detail, seconds."""

# The first tuple, interval or sine costs sympy 0.1 s and more, the next ones a few milliseconds. Paid before any item's
# clock runs, it cannot make a right answer late on a busy machine.
_WARM_UP = (
    ("x+1", "1+x"),
    (r"2\sqrt{3}", r"\frac{7}{2}"),
    (r"(3,\frac{\pi}{2})", r"(\frac{\pi}{2},3)"),
    (r"[0,1)\cup(2,\infty)", "(0,1)"),
    ("x^2-2x+1", "(x-1)^2"),
    (r"\sin x", r"\cos x"),
)


def start(module: str, gibibytes: float) -> None:
    """Prepare a fresh process: die at once when told to, load `module`, cap the memory."""
    # A Python-level handler would wait for the C code that a hostile answer is stuck in.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    importlib.import_module(module)
    logging.disable(logging.CRITICAL)
    if module == "math_verify":
        for gold, answer in _WARM_UP:
            _maths(gold, False, answer)
    size = int(gibibytes * 2**30)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


def maths(gold: str, prose: bool, answer: str, seconds: float) -> Reply:
    """Whether two LaTeX or plain expressions are equivalent; `prose` lets math-verify find the expression itself."""
    began = _begin(seconds)
    try:
        return *_maths(gold, prose, answer), time.perf_counter() - began
    except MemoryError:
        return "error", None, "out of memory", time.perf_counter() - began
    except Exception as error:
        return "error", None, f"{type(error).__name__}: {error}"[:300], time.perf_counter() - began


def gym(recipe: str, index: int, gold: str, answer: str, seconds: float) -> Reply:
    """Whether reasoning-gym gives full marks. `recipe` is JSON: generator name and options; partial credit is wrong."""
    began = _begin(seconds)
    try:
        dataset = _dataset(recipe)
        entry = dataset[index]
        if str(entry["answer"]) != gold:
            detail = "this reasoning-gym version generates another row here; make the tasks again"
            return "error", answer, detail, time.perf_counter() - began
        score = float(dataset.score_answer(answer, entry))
        return ("right" if score == 1.0 else "wrong"), answer, f"score {score:g}", time.perf_counter() - began
    except MemoryError:
        return "error", None, "out of memory", time.perf_counter() - began
    except Exception as error:
        return "error", None, f"{type(error).__name__}: {error}"[:300], time.perf_counter() - began


def _begin(seconds: float) -> float:
    # Should the parent die and leave this process inside a hostile item, the kernel ends it.
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    limit = math.ceil(time.process_time() + seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    return time.perf_counter()


def _maths(gold: str, prose: bool, answer: str) -> tuple[str, str | None, str]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    wanted = _gold(gold)
    if not wanted:
        return "error", None, f"the gold answer {gold[:80]!r} cannot be parsed"
    text = answer if prose else f"\\boxed{{{answer}}}"
    # The parent holds the clock: math-verify's own alarms only work on a main thread and do not stop C code.
    got = parse(text, [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=None)  # type: ignore[arg-type]
    if not got:
        return "unparsable", None, "no expression found"
    right = verify(wanted, got, timeout_seconds=None)
    return ("right" if right else "wrong"), str(got[-1])[:200], ""


@functools.lru_cache(maxsize=512)
def _gold(gold: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    return parse(f"\\boxed{{{gold}}}", [LatexExtractionConfig()], parsing_timeout=None)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=16)
def _dataset(recipe: str) -> Any:
    import reasoning_gym

    asked = json.loads(recipe)
    return reasoning_gym.create_dataset(asked["name"], **asked["options"])
