"""What may go wrong on the way (docs/faults.md): each fault is said or counted, and a rerun loses nothing."""

from __future__ import annotations

import errno
import itertools
import json
import math
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
import types
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError

import cothink
from cothink import seal, verify
from cothink.cli import _outcome
from cothink.finite import TrainingError
from cothink.loading import ModelError
from cothink.record import RunError, last_checkpoint
from cothink.rewards import RewardError
from cothink.stages.guard import Collapse
from cothink.tasks import DataError
from cothink.types import PlayError
from cothink.verify import pool


def said(error: BaseException) -> str:
    """What the command line prints for an error; a traceback would begin with another word."""
    code, text = _outcome(error)  # type: ignore[arg-type]
    assert code == 1 and text.startswith("error: "), text
    return text


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rows = [{"question": f"{a} + {b}?", "answer": str(a + b)} for a in range(6) for b in range(4)]
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.fixture(autouse=True)
def mine(monkeypatch):
    """The user's own module of the recipes below; `before` is called with the number of each reward and loss call."""
    from cothink.engines.local import engine

    module = types.ModuleType("fault_parts")
    module.rewards = module.losses = module.asked = 0

    def nothing(count, *context):
        return None

    module.on_reward, module.on_loss, module.on_call = nothing, nothing, nothing

    def sums(task, turn, episode):
        module.rewards += 1
        found = module.on_reward(module.rewards, task)
        return (sum(turn.completion.output_ids) % 7) / 7 if found is None else found

    def pull(logprobs, batch):
        module.losses += 1
        value = -(logprobs * batch.weights * batch.advantages).sum()
        found = module.on_loss(module.losses, value)
        return (value if found is None else found), {}

    class Engine:
        def __init__(self, policies):
            self.inner = engine(policies)

        def __getattr__(self, name):
            return getattr(self.inner, name)

        async def generate(self, *args):
            module.asked += 1
            number = module.asked
            done = await self.inner.generate(*args)
            found = module.on_call(number, done)
            return done if found is None else await found if hasattr(found, "__await__") else found

    for function in (sums, pull):
        function.__module__ = "fault_parts"
    module.sums, module.pull, module.engine = sums, pull, Engine
    monkeypatch.setitem(sys.modules, "fault_parts", module)
    return module


def recipe_of(folder, data, **stage):
    return {
        "name": "faults",
        "team": {"workflow": "solo", "roles": {"solver": {"policy": "p", "system": "go", "max_tokens": 8}}},
        "policies": {"p": {"model": str(folder), "learning_rate": 1e-3}},
        "tasks": {"train": {"name": "files", "path": str(data)}},
        "stages": [
            {
                "kind": "rl", "steps": 3, "tasks_per_step": 2, "episodes_per_task": 4, "filter": "none",
                "rewards": [{"name": "fault_parts:sums"}], "unfinished": "keep", "checkpoint_every": 1, **stage,
            }
        ],
    }  # fmt: skip


@pytest.fixture
def recipe(tiny_folder, data):
    return recipe_of(tiny_folder, data)


def metrics(folder):
    """The rows of a run without what a clock says."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith(("time", "seconds"))} for r in rows]


def weights(folder):
    from safetensors.torch import load_file

    state = json.loads((folder / "state.json").read_text())
    return load_file(folder / "checkpoints" / state["checkpoint"] / "p" / "model.safetensors")


@pytest.fixture
def whole(recipe, tmp_path):
    """The folder of a run that nothing disturbed."""
    return cothink.run(recipe, out=tmp_path / "whole").folder


def same(one, other):
    """Whether two runs logged and learned the same, bit for bit."""
    a, b = weights(one), weights(other)
    return metrics(one) == metrics(other) and all(torch.equal(a[k], b[k]) for k in a)


def step(folder):
    return json.loads((folder / "state.json").read_text())["step"]


@pytest.fixture
def file_limit(monkeypatch):
    """Sets how many bytes a file may have, as a full disk would; Python ignores the signal that comes with it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if size is None else size, before[1]))

    yield limit
    limit(None)


def test_disk_full_at_a_checkpoint(recipe, whole, mine, file_limit, tmp_path):
    size = (tmp_path / "whole/checkpoints/stage00-step000003/p/model.safetensors").stat().st_size
    mine.rewards, mine.on_reward = 0, lambda n, task: file_limit(size // 2) if n == 9 else None
    out = tmp_path / "run"
    with pytest.raises((OSError, SafetensorError)) as caught:
        cothink.run(recipe, out=out)
    file_limit(None)
    assert "cannot write" in said(caught.value) and "free some space" in said(caught.value)
    assert step(out) == 1
    mine.on_reward = lambda n, task: None
    assert same(cothink.run(recipe, out=out).folder, whole)
    assert not list((out / "checkpoints").glob("*.part"))


def test_disk_full_at_a_line_of_metrics(recipe, whole, tmp_path):
    """A device that is always full: the lock, the folder and the files beside it are left usable."""
    out = tmp_path / "run"
    out.mkdir()
    (out / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError) as caught:
        cothink.run(recipe, out=out)
    assert "No space left on device; free some space" in said(caught.value)
    (out / "metrics.jsonl").unlink()
    assert same(cothink.run(recipe, out=out).folder, whole)


def test_run_folder_is_a_file(recipe, tmp_path):
    for place in ("file", "file/run"):
        (tmp_path / "file").write_text("notes")
        with pytest.raises(RunError) as caught:
            cothink.run(recipe, out=tmp_path / place)
        assert said(caught.value) == (
            f"error: {tmp_path / 'file'} is a file, and a run needs a folder: name another one with --out"
        )
    assert (tmp_path / "file").read_text() == "notes"


def test_run_folder_is_read_only(recipe, whole, monkeypatch, tmp_path):
    """A file system that was remounted read-only between two steps; root may write anywhere else."""
    out, real = tmp_path / "run", os.replace
    refused = []

    def replace(source, target):
        if str(target).startswith(str(out)) and step_of(target) == 2:
            refused.append(target)
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(target))
        real(source, target)

    def step_of(target):
        return 2 if "step000002" in str(target) else 0

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError) as caught:
        cothink.run(recipe, out=out)
    text = said(caught.value)
    assert refused and f"cannot write {out}" in text and "Read-only file system; name another folder" in text
    monkeypatch.setattr(os, "replace", real)
    assert step(out) == 1 and same(cothink.run(recipe, out=out).folder, whole)


def test_data_that_is_gone(recipe, data, whole, tmp_path):
    """Missing from the start: said before a model loads. Gone between two attempts: the run waits where it stood."""
    moved = tmp_path / "sums.jsonl"
    moved.write_bytes(data.read_bytes())
    recipe["tasks"]["train"]["path"] = str(moved)
    recipe["policies"]["p"]["model"] = str(tmp_path / "no such model")  # would be an error of its own
    content = moved.read_bytes()
    moved.unlink()
    with pytest.raises(DataError, match=f"no file {moved}; write path: with an existing"):
        cothink.run(recipe, out=tmp_path / "run")
    moved.write_bytes(content[:-5])
    with pytest.raises(DataError, match=r"sums\.jsonl, line 24: not JSON"):
        cothink.run(recipe, out=tmp_path / "run")


def test_a_model_file_cut_short(recipe, tiny_folder, tmp_path):
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    recipe["policies"]["p"]["model"] = str(folder)
    with pytest.raises(ModelError) as caught:
        cothink.run(recipe, out=tmp_path / "run")
    assert f"error: {folder} cannot be read" in said(caught.value) and "download or copy it again" in said(caught.value)
    file.write_bytes(content)
    assert len(metrics(cothink.run(recipe, out=tmp_path / "run").folder)) == 3


def test_a_checkpoint_cut_short(recipe, whole, mine, tmp_path):
    """The newest checkpoint lost half of its weights: the run goes on from the one before, and says so."""
    mine.rewards, mine.on_reward = 0, stop_at(17)
    out = tmp_path / "run"
    with pytest.raises(RuntimeError, match="the grader went away"):
        cothink.run(recipe, out=out)
    assert step(out) == 2
    file = out / "checkpoints/stage00-step000002/p/model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    mine.on_reward = lambda n, task: None
    heard = Console()
    assert same(cothink.run(recipe, out=out, console=heard).folder, whole)
    assert any("stage00-step000002 is damaged: p/model.safetensors has 1,000 bytes" in line for line in heard.lines)


class Console:
    """Keeps what a run says."""

    is_terminal = False

    def __init__(self):
        self.lines = []

    def print(self, text, **_):
        self.lines.append(str(text))


def stop_at(call):
    def fail(n, task):
        if n == call:
            raise RuntimeError("the grader went away")

    return fail


def test_half_a_checkpoint(recipe, whole, mine, monkeypatch, tmp_path):
    """Killed between the files of a checkpoint: its folder has no name yet, and is swept away."""
    out, real = tmp_path / "run", seal.seal

    def killed(folder, facts):
        if facts["step"] == 2:
            raise KeyboardInterrupt
        real(folder, facts)

    monkeypatch.setattr(seal, "seal", killed)
    with pytest.raises(KeyboardInterrupt):
        cothink.run(recipe, out=out)
    monkeypatch.setattr(seal, "seal", real)
    assert step(out) == 1 and (out / "checkpoints/stage00-step000002.part/p/model.safetensors").exists()
    assert same(cothink.run(recipe, out=out).folder, whole)
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["stage00-step000002", "stage00-step000003"]


def test_two_processes_on_one_folder(recipe, whole, tmp_path):
    """The lock is the system's: a process that was killed holds none."""
    out = tmp_path / "run"
    out.mkdir()
    child = os.fork()
    if child == 0:
        held = seal.lock(out)
        time.sleep(60)
        os._exit(held is None)
    try:
        ends = time.monotonic() + 10
        while not (out / seal.LOCK).exists() or not (out / seal.LOCK).read_text():
            assert time.monotonic() < ends
            time.sleep(0.01)
        with pytest.raises(RunError, match=rf"another process \({child}\) works in {out}: wait for it, or give"):
            cothink.run(recipe, out=out)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert same(cothink.run(recipe, out=out).folder, whole)


def test_loss_that_is_not_finite(recipe, mine, tmp_path):
    """One such update is left out and counted; the run goes on, and its weights stay finite."""
    recipe["stages"][0] |= {"loss": {"name": "fault_parts:pull"}}
    mine.on_loss = lambda n, value: value * math.nan if n == 2 else None
    folder = cothink.run(recipe, out=tmp_path / "run").folder
    rows = metrics(folder)
    assert [r.get("p/skipped_updates", 0) for r in rows] == [0, 1, 0]
    assert all(bool(t.isfinite().all()) for t in weights(folder).values())


def test_loss_that_stays_not_finite_stops_the_run(recipe, mine, tmp_path):
    recipe["stages"][0] |= {"loss": {"name": "fault_parts:pull"}, "steps": 5}
    whole = cothink.run(recipe, out=tmp_path / "whole").folder
    mine.losses, mine.on_loss = 0, lambda n, value: value * math.inf if n >= 2 else None
    out = tmp_path / "run"
    with pytest.raises(TrainingError) as caught:
        cothink.run(recipe, out=out)
    text = said(caught.value)
    assert "policy p: 3 updates in a row had a non-finite loss or gradient; none was applied. The loss is" in text
    assert "look at rewards and advantages" in text
    assert [r.get("p/skipped_updates", 0) for r in metrics(out)] == [0, 1, 1] and step(out) == 3
    mine.on_loss = lambda n, value: None
    done = cothink.run(recipe, out=out).folder
    assert len(metrics(done)) == 5 and metrics(done)[0] == metrics(whole)[0]


def test_gradient_that_is_not_finite(recipe, mine, tmp_path):
    """The loss is a fine number, its gradient is not: sqrt at 0."""
    recipe["stages"][0] |= {"loss": {"name": "fault_parts:pull"}}
    mine.on_loss = lambda n, value: (value - value.detach()).abs().sqrt() + 1 if n == 2 else None
    folder = cothink.run(recipe, out=tmp_path / "run").folder
    rows = metrics(folder)
    assert [r.get("p/skipped_updates", 0) for r in rows] == [0, 1, 0]
    assert math.isfinite(rows[1]["p/loss"]) and not math.isfinite(rows[1]["p/gradient_norm"])


def test_loss_that_is_infinite_with_a_finite_gradient(recipe, mine, tmp_path):
    recipe["stages"][0] |= {"loss": {"name": "fault_parts:pull"}}
    mine.on_loss = lambda n, value: value + math.inf if n == 2 else None
    rows = metrics(cothink.run(recipe, out=tmp_path / "run").folder)
    assert [r.get("p/skipped_updates", 0) for r in rows] == [0, 1, 0]
    assert rows[1]["p/loss"] == math.inf and math.isfinite(rows[1]["p/gradient_norm"])


def test_a_watch_that_acts_stops_at_the_first_update_that_is_not_finite(recipe, mine, tmp_path):
    recipe["stages"][0] |= {"loss": {"name": "fault_parts:pull"}, "watch": "act"}
    mine.on_loss = lambda n, value: value * math.nan if n == 2 else None
    out = tmp_path / "run"
    with pytest.raises(Collapse, match="stopped the run at step 2: gradient/p: p/loss is not finite"):
        cothink.run(recipe, out=out)
    mark = json.loads((out / "stopped.json").read_text())
    assert mark["collapsed"] and mark["first"] == {"signal": "gradient/p", "step": 2}
    with pytest.raises(RunError, match="the watch stopped this run at step 2"):
        cothink.run(recipe, out=out)
    (out / "stopped.json").unlink()
    assert len(metrics(cothink.run(recipe, out=out).folder)) == 3


def test_engine_that_fails_at_times(recipe, mine, tmp_path):
    """Two plays of step 2 are left out and counted; the others are learned from."""
    recipe["engine"] = "fault_parts:engine"

    def fail(n, done):
        if n in (10, 12):
            raise ConnectionError("the server closed the connection")

    mine.on_call = fail
    heard = Console()
    rows = metrics(cothink.run(recipe, out=tmp_path / "run", console=heard).folder)
    assert [r.get("failed/error", 0) for r in rows] == [0, 2, 0] and [r["episodes"] for r in rows] == [8, 6, 8]
    assert any("2 of 8 plays left out (2 error); the first, of task" in line for line in heard.lines)
    assert any("ConnectionError: the server closed the connection" in line for line in heard.lines)


def test_engine_that_is_gone(recipe, mine, tmp_path):
    recipe["engine"] = "fault_parts:engine"
    whole = cothink.run(recipe, out=tmp_path / "whole").folder

    def gone(n, done):
        if n > 16:
            raise ConnectionError("connection refused")

    mine.asked, mine.on_call = 0, gone
    out = tmp_path / "run"
    with pytest.raises(PlayError) as caught:
        cothink.run(recipe, out=out)
    assert said(caught.value) == "error: all 8 episodes failed; the first error: connection refused"
    assert step(out) == 2
    mine.on_call = lambda n, done: None
    assert same(cothink.run(recipe, out=out).folder, whole)


def test_engine_that_hangs(recipe, mine, tmp_path):
    """`team.deadline` ends a play; a step whose plays all hang ends the run instead of being followed by others."""
    import asyncio

    recipe["engine"], recipe["team"]["deadline"] = "fault_parts:engine", 1.0
    mine.on_call = lambda n, done: asyncio.sleep(60) if n in (10, 12) else None
    rows = metrics(cothink.run(recipe, out=tmp_path / "some").folder)
    assert [r.get("failed/deadline", 0) for r in rows] == [0, 2, 0] and [r["episodes"] for r in rows] == [8, 6, 8]

    mine.asked, mine.on_call = 0, lambda n, done: asyncio.sleep(60) if n > 8 else None
    out = tmp_path / "all"
    with pytest.raises(PlayError) as caught:
        cothink.run(recipe, out=out)
    assert "none of the 8 plays of step 2 was done within 1 s: write a longer team.deadline" in said(caught.value)
    assert step(out) == 1
    mine.on_call = lambda n, done: None
    assert len(metrics(cothink.run(recipe, out=out).folder)) == 3


def test_engine_that_answers_garbage(recipe, mine, tmp_path):
    """Ids beyond the vocabulary, too few log-probs, nothing at all: left out before anything learns from them."""
    recipe["engine"] = "fault_parts:engine"

    def garble(n, done):
        (one,) = done
        return {
            9: [replace(one, output_ids=(*one.output_ids[:-1], 300))],
            10: [replace(one, output_ids=(*one.output_ids[:-1], -1))],
            11: [replace(one, logprobs=one.logprobs[:-1])],
            12: [replace(one, logprobs=(math.nan,) * len(one.logprobs))],
            13: [None],
            14: [],
        }.get(n)

    mine.on_call = garble
    heard = Console()
    rows = metrics(cothink.run(recipe, out=tmp_path / "run", console=heard).folder)
    assert [r.get("failed/error", 0) for r in rows] == [0, 6, 0] and [r["episodes"] for r in rows] == [8, 2, 8]
    first = next(line for line in heard.lines if "6 of 8 plays left out" in line)
    assert "the engine of policy 'p' answered solver with the token id 300, and its vocabulary ends at 2" in first


def test_reward_that_fails(recipe, whole, mine, tmp_path):
    """The error names the reward, the turn, the task and the line; the steps before are kept."""
    mine.rewards, mine.on_reward = 0, lambda n, task: {}["weight"] if n == 12 else None
    out = tmp_path / "run"
    with pytest.raises(RewardError) as caught:
        cothink.run(recipe, out=out)
    text = said(caught.value)
    assert "reward fault_parts:sums failed for turn 0 (solver) of task sums/train/" in text
    assert "KeyError: 'weight' (" in text and "test_faults.py, line " in text and step(out) == 1
    mine.on_reward = lambda n, task: None
    assert same(cothink.run(recipe, out=out).folder, whole)


def test_reward_that_is_no_number(recipe, whole, mine, tmp_path):
    mine.rewards, mine.on_reward = 0, lambda n, task: math.nan if n == 20 else None
    out = tmp_path / "run"
    with pytest.raises(RewardError) as caught:
        cothink.run(recipe, out=out)
    assert "reward fault_parts:sums returned nan for turn 0 (solver) of task sums/train/" in said(caught.value)
    assert step(out) == 2
    mine.on_reward = lambda n, task: None
    assert same(cothink.run(recipe, out=out).folder, whole)


def graded_right():
    """An item that only the verifier's processes can grade."""
    return verify.verify("math", "x+1", "\\boxed{1+x}", timeout=20).right


def test_verifier_processes_that_die(recipe, mine, tmp_path):
    """All of them are killed between two items, and then the pool itself: new ones answer, nothing is graded wrong."""
    seen = []

    def graded(n, task):
        if n == 3:
            for worker in multiprocessing.active_children():
                os.kill(worker.pid, signal.SIGKILL)
        if n == 6:
            pool._pools["math_verify"].stop()
        if n in (1, 3, 4, 6, 7):
            seen.append(graded_right())

    mine.on_reward = graded
    recipe["stages"][0]["steps"] = 1
    rows = metrics(cothink.run(recipe, out=tmp_path / "run").folder)
    assert seen == [True] * 5 and len(rows) == 1


def test_verifier_process_that_is_killed_on_an_item(mine):
    """The item is an `error`, never `wrong`; `grading_errors` counts it, and the next one is graded."""
    word, _, detail, _ = pool.run(
        pool.Job("math_verify", subprocess.call, (["sh", "-c", "kill -9 $PPID; sleep 9"],)), 20
    )
    assert (word, detail) == ("error", "its process ended with exit code -9")
    assert graded_right()


def test_tracker_that_is_away(recipe, whole, monkeypatch, tmp_path):
    """It never ends a run; it is said once, and metrics.jsonl holds everything."""
    from accelerate import Accelerator

    def away(self, *args, **kwargs):
        raise ConnectionError("tracker.example: name or service not known")

    monkeypatch.setattr(Accelerator, "log", away)
    heard = Console()
    done = cothink.run({**recipe, "trackers": ["tensorboard"]}, out=tmp_path / "run", console=heard).folder
    assert same(done, whole)
    (line,) = [line for line in heard.lines if line.startswith("trackers: ")]
    assert "ConnectionError: tracker.example" in line and "The run goes on without them; metrics.jsonl holds" in line


def test_clock_that_jumps(recipe, whole, mine, monkeypatch, tmp_path):
    """An hour back and forth at every look: durations come from another clock, and an item keeps its time."""
    real, looks = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: real() + (3600 if next(looks) % 2 else -3600))
    done = cothink.run(recipe, out=tmp_path / "run").folder
    assert same(done, whole)
    for row in (done / "metrics.jsonl").read_text().splitlines():
        assert 0 <= json.loads(row)["seconds_collect"] < 100 and 0 <= json.loads(row)["seconds_learn"] < 100
    monkeypatch.setattr(time, "time", real)

    assert graded_right()  # the processes are there
    began = time.monotonic()
    monkeypatch.setattr(time, "time", lambda: real() + (3600 if time.monotonic() > began + 0.2 else 0))
    assert pool.run(pool.Job("math_verify", subprocess.call, (["sleep", "0.7"],)), 5) == 0


def test_state_that_is_damaged(recipe, whole, mine, tmp_path):
    """Every checkpoint carries its own place: the newest one is gone on from."""
    mine.rewards, mine.on_reward = 0, stop_at(17)
    out = tmp_path / "run"
    with pytest.raises(RuntimeError, match="the grader went away"):
        cothink.run(recipe, out=out)
    content = (out / "state.json").read_text()
    (out / "state.json").write_text(content[: len(content) // 2])
    with pytest.raises(RunError, match=r"state\.json is damaged: it is not what was written. Run the recipe again"):
        last_checkpoint(out)
    mine.on_reward = lambda n, task: None
    heard = Console()
    assert same(cothink.run(recipe, out=out, console=heard).folder, whole)
    assert "state.json is damaged: it is not what was written" in heard.lines
    assert "going back to checkpoint stage00-step000002" in heard.lines


def test_half_a_reference(recipe, tmp_path, monkeypatch):
    """Killed while the weights that a KL is measured from were written: the next attempt writes them again."""
    from transformers import PreTrainedModel

    recipe["stages"][0] |= {"loss": {"kl": "k3", "kl_beta": 0.1}}
    whole = cothink.run(recipe, out=tmp_path / "whole").folder
    real = PreTrainedModel.save_pretrained

    def killed(self, place, *args, **kwargs):
        if "reference" in str(place):
            self.config.save_pretrained(place)
            raise KeyboardInterrupt
        real(self, place, *args, **kwargs)

    out = tmp_path / "run"
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", killed)
    with pytest.raises(KeyboardInterrupt):
        cothink.run(recipe, out=out)
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", real)
    assert same(cothink.run(recipe, out=out).folder, whole)
