"""A cluster of several nodes, each with an object store of its own, all on this machine: joined, and one node lost."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.pool
pytest.importorskip("ray", reason="pip install 'cothink[ray]'")

SCRIPT = """
import asyncio, time
import torch
from ray.cluster_utils import Cluster
from cothink import models
from cothink.engines import local, ray as pools
from cothink.loading import load_policies
from cothink.parts import PolicyPart
from cothink.types import Message, Sampling

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
policies = load_policies({"a": PolicyPart(model="builtin:tiny")}, models.where)
engine, here = pools.engine(policies, workers=2, address=cluster.address), local.engine(policies)
ray, lines = engine._ray, []
engine.say = lines.append

async def asked(one, how):
    chats = [[Message("system", "Solve."), Message("user", f"{k} + {k}?")] for k in range(8)]
    codec = one.codec("a")
    found = await asyncio.gather(*(one.generate("a", c, codec.start(c), how, 2, k) for k, c in enumerate(chats)))
    return [(c.output_ids, c.version) for group in found for c in group]

def says(one, how=Sampling(max_tokens=24)):
    return asyncio.run(asked(one, how))

assert says(engine) == says(here)
with torch.no_grad():
    for weight in policies["a"].parameters():
        weight.add_(0.02)
policies["a"].version += 1
engine.load("a", None, policies["a"].version)
engine.settle()
assert says(engine) == says(here) and {v for _, v in says(engine)} == {1}
long = Sampling(max_tokens=300, temperature=2.0)
wanted = says(here, long)

async def lost():
    play = asyncio.ensure_future(asked(engine, long))
    while not engine.pool.seats[0].requests:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    cluster.remove_node(nodes[0], allow_graceful=False)
    return await play

assert asyncio.run(lost()) == wanted
assert len(lines) == 1 and "of 2 has ended" in lines[0], lines
assert says(engine) == says(here)
assert sum(seat.up for seat in engine.pool.seats) == 1
cluster.add_node(num_cpus=1)
for _ in range(400):
    if all(engine.pool._up(seat) for seat in engine.pool.seats):
        break
    time.sleep(0.25)
engine.settle()
assert says(engine) == says(here)
ray.shutdown()
cluster.shutdown()
print("all of it", lines[0])
"""


def test_a_node_that_is_lost_in_the_middle_takes_no_episode_with_it(tmp_path):
    """Two nodes with one worker each; one goes, the other answers alone; a new node gets a worker."""
    (tmp_path / "several.py").write_text(SCRIPT)
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, tmp_path / "several.py"], env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0 and "all of it" in done.stdout, done.stdout[-1000:] + done.stderr[-4000:]
