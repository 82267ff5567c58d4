"""A pool of two Ray workers with a real vLLM each, beside the local engine over the same weights."""

import os
import signal

import pytest
import teams

from cothink import checks
from cothink.types import Sampling

pytest.importorskip("ray", reason="pip install 'cothink[ray]'")

from cothink.engines import ray as pools


def test_two_workers_with_a_vllm_each_say_what_the_local_engine_says_also_when_one_is_killed():
    made = teams.policies(a={"lora_r": 4}, b={"lora_r": 8})
    engine, here, lines = (
        pools.engine(made, workers=2, inner="vllm", max_rows=32, cache_gib=0.25),
        teams.beside(made),
        [],
    )
    engine.say = lines.append
    try:
        for name in made:
            checks.check_engine(engine, name)
            assert teams.says(engine, name) == teams.says(here, name)
        before = teams.says(engine, "a")
        teams.shake(made["a"], seed=9)
        engine.load("a", None, made["a"].version)
        engine.settle()
        assert teams.says(engine, "a") == teams.says(here, "a") != before
        said = teams.says(engine, "a", Sampling(max_tokens=16), n=3)
        gaps = [abs(p - q) for c in said for p, q in zip(c.logprobs, teams.logprobs(made["a"], c), strict=True)]
        assert max(gaps) < 1e-4
        os.kill(engine._ray.get(engine.pool.seats[0].worker.actor.process.remote()), signal.SIGKILL)
        assert teams.says(engine, "b") == teams.says(here, "b")
        assert len(lines) == 1 and engine.figures()["engine/workers_lost"] == 1
    finally:
        engine.close()
