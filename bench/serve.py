"""Many clients against one: a served team asked through the official client, on this machine.

Prints the time of an answer (p50, p95), answers and sampled tokens per second, and their ratio; no answer may be lost.
`python bench/serve.py [--team TARGET] [--clients 64] [--requests 5]`, or `--url` for a server that runs already.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from cothink.tasks import wordsums

DEMO = Path(__file__).parents[1] / "recipes" / "rema-demo.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--team", default=str(DEMO), help="what `cothink serve` takes")
    parser.add_argument("--url", help="of a server that runs already, such as http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=5, help="of each client, one after the other")
    options = parser.parse_args()
    with contextlib.nullcontext(options.url) if options.url else served(options.team) as url:
        asyncio.run(measure(url, 1, 1))  # the first request of a server warms it up
        one = asyncio.run(measure(url, 1, max(20, options.requests)))
        many = asyncio.run(measure(url, options.clients, options.requests))
    show(one, many)


@contextlib.contextmanager
def served(team: str) -> Iterator[str]:
    """A server of the team in a process of its own; yields its address."""
    command = [sys.executable, "-m", "cothink.cli", "serve", team, "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert server.stderr is not None
    try:
        for line in server.stderr:
            if found := re.search(r"listens on (http\S+)/v1", line):
                yield found[1]
                return
        raise SystemExit(f"the server of {team} did not start")
    finally:
        server.terminate()
        server.wait()


async def measure(url: str, clients: int, requests: int) -> dict[str, float | list[float]]:
    """Seconds of each answer, sampled tokens and wall time of `clients` that ask `requests` questions each."""
    import httpx
    from openai import AsyncOpenAI

    asked = [task.question for task in wordsums.load("test", count=clients * requests)]
    pools = [httpx.AsyncClient(verify=False) for _ in range(clients)]
    who = [AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=pool) for pool in pools]
    name = (await who[0].models.list()).data[0].id
    seconds: list[float] = []
    tokens = 0

    async def client(k: int) -> None:
        nonlocal tokens
        for text in asked[k * requests : (k + 1) * requests]:
            began = time.perf_counter()
            reply = await who[k].chat.completions.create(model=name, messages=[{"role": "user", "content": text}])
            seconds.append(time.perf_counter() - began)
            assert reply.usage is not None and reply.choices[0].finish_reason in ("stop", "length")
            tokens += reply.usage.completion_tokens

    began = time.perf_counter()
    await asyncio.gather(*(client(k) for k in range(clients)))
    wall = time.perf_counter() - began
    for pool in pools:
        await pool.aclose()
    return {"clients": clients, "asked": clients * requests, "seconds": seconds, "tokens": tokens, "wall": wall}


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 100) // 100) - 1)]


def show(one: dict, many: dict) -> None:
    """The table, and the ratio of tokens per second."""
    print(f"{'clients':>8} {'asked':>6} {'lost':>5} {'p50 s':>7} {'p95 s':>7} {'answers/s':>10} {'tokens/s':>9} ratio")
    rate = one["tokens"] / one["wall"]
    for row in (one, many):
        lost = row["asked"] - len(row["seconds"])
        middle, slow = quantile(row["seconds"], 0.5), quantile(row["seconds"], 0.95)
        speed, tokens = len(row["seconds"]) / row["wall"], row["tokens"] / row["wall"]
        print(f"{row['clients']:8d} {row['asked']:6d} {lost:5d} {middle:7.3f} {slow:7.3f} {speed:10.1f} {tokens:9.0f} "
              f"{tokens / rate:.2f}x")  # fmt: skip


if __name__ == "__main__":
    main()
