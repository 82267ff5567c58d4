from __future__ import annotations

import asyncio
import importlib
import json
import random
import subprocess
import sys
import tempfile
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cothink import checks, engines, scaffold
from cothink.engines import scripted, table
from cothink.resolve import KINDS, names, resolve
from cothink.tasks import data_root
from cothink.types import Completion, Finish, Task

# Options a function cannot do without, or that make its data small.
OPTIONS = {
    "length.overlong": {"max_length": 4, "cache": 2},
    "gdpo": {"weights": {"a": 1.0}},
    "wordsums": {"count": 50},
    "wordpairs": {"count": 50},
    "math": {"split": "minimal"},
    "gym": {"generator": "basic_arithmetic", "size": 20},
}
# Same law, another setting: what the defaults do not reach.
MORE = [
    ("workflow", "rema", {"max_turns": 1}),
    ("workflow", "rema", {"max_turns": 3, "stop_on_truncation": False}),
    ("workflow", "rema", {"max_turns": 2, "order": ["meta", "critic", "reasoning"], "finisher": "critic"}),
    ("workflow", "rema", {"max_turns": 1, "n_solutions": 4}),
    ("workflow", "rema", {"max_turns": 1, "actions": True, "constrain": True}),
    ("workflow", "malt", {"branching": [2, 2, 3]}),
    ("workflow", "malt", {"order": ["generator", "refiner"], "branching": [1, 2]}),
    ("workflow", "malt", {"order": ["generator", "verifier"], "carry_forward": True}),
    ("workflow", "malt", {"order": ["generator", "verifier", "refiner", "verifier", "refiner"]}),
    *(("workflow", "judge", {"form": form}) for form in ("vrp", "mrp")),
    ("estimator", "grpo", {"scope": "task", "weighting": "episode"}),
    ("estimator", "rloo", {"scope": "anchor"}),
    ("estimator", "rfpp", {"whiten_scope": "batch"}),
    *(("loss", "policy", {"ratio": "turn_geo", "clip": clip}) for clip in ("gspo", "none")),
    *(("loss", "policy", {"clip": clip}) for clip in ("ppo", "cispo", "sapo")),
    ("loss", "policy", {"ratio": "turn_arith", "clip": "ppo", "log_ratio_max": 3.0}),
    ("loss", "policy", {"log_ratio_max": None, "dual_clip": None}),
    ("loss", "policy", {"kl": "k3_iw", "kl_beta": 0.1}),
]


def engine_files() -> list[Path]:
    """The modules of the folder that make an engine; the others are their helpers."""
    return [path for path in Path(engines.__file__).parent.glob("*.py") if "\ndef engine(" in path.read_text()]


OFF_DATA = ("gsm8k", "math", "csqa", "judgebench", "dialogues")


class Server:
    """Stands in for the official client of a chat server."""

    def __init__(self):
        self.chat = self.completions = self.with_streaming_response = self

    @asynccontextmanager
    async def create(self, *, n, **asked):
        choices = [{"message": {"content": "\\boxed{4}"}, "finish_reason": "stop"}] * n
        yield Arriving(json.dumps({"choices": choices, "usage": {"completion_tokens": 3 * n}}).encode())


class Arriving:
    """A reply on its way."""

    def __init__(self, data: bytes):
        self.data = data

    async def iter_bytes(self):
        yield self.data


def openai():
    pytest.importorskip("openai")
    made = importlib.import_module("cothink.engines.openai").engine("openai:some@http://localhost/v1")
    made._make = Server
    return made


def local(folder: Path):
    from cothink.loading import load_policies
    from cothink.parts import PolicyPart

    loaded = load_policies({"main": PolicyPart(model="tiny")}, lambda name: folder)
    return resolve("engine", "local")(loaded)


def vllm(folder: Path):
    import fake_vllm

    from cothink.loading import load_policies
    from cothink.parts import PolicyPart

    loaded = load_policies({"main": PolicyPart(model="tiny", lora_r=4)}, lambda name: folder)
    with fake_vllm.installed():
        return resolve("engine", "vllm")(loaded)


def ray(folder: Path):
    import fake_ray

    from cothink.loading import load_policies
    from cothink.parts import PolicyPart

    loaded = load_policies({"main": PolicyPart(model="tiny", lora_r=4)}, lambda name: folder)
    with fake_ray.installed():
        return resolve("engine", "ray")(loaded)


ENGINES = {
    "scripted": lambda folder: scripted.engine(lambda call: "\\boxed{4}"),
    "table": lambda folder: table.engine({"main": ("\\boxed{1}", "\\boxed{2}", "\\boxed{3}")}),
    "local": local,
    "openai": lambda folder: openai(),
    "vllm": vllm,
    "ray": ray,
}


def parts() -> list:
    found = [(kind, name, OPTIONS.get(name, {})) for kind in KINDS if kind != "engine" for name in names(kind)]
    return [pytest.param(*p, id=f"{p[0]}-{p[1]}-{k}") for k, p in enumerate([*found, *MORE])]


def test_the_walk_finds_every_kind():
    for kind, least in {"workflow": 3, "tasks": 5, "reward": 6, "estimator": 6, "loss": 1, "engine": 1}.items():
        assert len(names(kind)) >= least, kind
    assert {"local", "table", "scripted", "openai"} <= {path.stem for path in engine_files()}


@pytest.mark.parametrize(("kind", "name", "options"), parts())
def test_it_keeps_the_rules(kind, name, options):
    function, options = resolve(kind, name), dict(options)
    if kind == "workflow":
        checks.check_workflow(function, options=options)
    elif kind == "reward":
        checks.check_reward(function, options=options)
    elif kind == "estimator":
        checks.check_estimator(function, options=options, ordered=name == "rae")
    elif kind == "loss":
        checks.check_loss(function, options=options, on_policy="kl" not in options)
    elif kind == "conversations":
        if name in OFF_DATA and not data_root().is_dir():
            pytest.skip("needs the data folder, see COTHINK_DATA")
        mine = {"files": {"path": str(_chats())}, "tree": {"store": str(_trees())}}
        given = mine.get(name, {"count": 20} if name.startswith("word") else {})
        checks.check_conversations(function, options=given)
    else:
        if name in OFF_DATA and not data_root().is_dir():
            pytest.skip("needs the data folder, see COTHINK_DATA")
        if name == "gym":
            pytest.importorskip("reasoning_gym")
        if name in OFF_DATA:
            options["limit"] = 100
        if name == "files":
            options["path"] = str(_rows())
        if name == "judge":
            options |= {"path": str(_pairs()), "test": 1}
        checks.check_tasks(function, options=options)


def _rows() -> Path:
    path = Path(tempfile.mkdtemp()) / "train.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "2"}\n{"question": "2 + 2?", "answer": "4"}\n')
    return path


def _pairs() -> Path:
    path = Path(tempfile.mkdtemp()) / "pairs.jsonl"
    path.write_text("".join(f'{{"prompt": "q{k}", "chosen": "a{k}", "rejected": "b{k}"}}\n' for k in range(4)))
    return path


def _trees() -> Path:
    """A collected tree: two plans, the first with two right answers, the second with two wrong ones."""

    def call(role: str, parents: list[str], *said: tuple[str, str]) -> dict:
        turns = [{"id": name, "text": text, "output_ids": [k + 5], "finish_reason": "stop", "version": 0}
                 for k, (name, text) in enumerate(said)]  # fmt: skip
        return {"task": "t", "parents": parents, "role": role, "policy": "main", "round": len(parents), "place": 0,
                "prompt_ids": [1, 2, *map(ord, "".join(parents))], "turns": turns}  # fmt: skip

    lines = [
        {"task": "t", "question": "1 + 1?", "answer": "2", "meta": {}},
        call("meta", [], ("a", "Add."), ("b", "Take.")),
        call("reasoning", ["a"], ("c", "2"), ("d", "so 2")),
        call("reasoning", ["b"], ("e", "0"), ("f", "so 0")),
        {"task": "t", "finish": ["finished", "2", "2"], "holes": 0,
         "grades": {"2": ["right", "2"], "3": ["right", "2"], "4": ["wrong", "0"], "5": ["wrong", "0"]}},
    ]  # fmt: skip
    folder = Path(tempfile.mkdtemp())
    facts = {"format": 1, "split": "train", "round": 0, "roles": {}, "workflow": {"name": "malt", "branching": [2, 2]}}
    (folder / "header.json").write_text(json.dumps(facts))
    (folder / "trees.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def _chats() -> Path:
    path = Path(tempfile.mkdtemp()) / "chats.jsonl"
    path.write_text('{"role": "meta", "prompt": "1 + 1?", "completion": "Add."}\n')
    return path


@pytest.mark.parametrize("name", sorted(path.stem for path in engine_files()))
def test_an_engine_keeps_the_rules(name, tiny_folder):
    assert name in ENGINES, f"engine {name!r} has no entry in ENGINES: nothing checks it"
    checks.check_engine(ENGINES[name](tiny_folder), "main", tokens=name != "openai", repeatable=name != "openai")


async def leaks(task, team):
    turn = await team.chat("only").say(f"{task.question} (the answer is {task.answer})")
    return Finish("finished", turn.text, turn.id)


async def rolls_dice(task, team):
    turn = await team.chat("only").say(f"{task.question} {random.random()}")
    second = await team.chat("only").say(f"{random.random()}", after=turn)
    return Finish("finished", f"{random.random()}", second.id)


HEARD: list[str] = []


async def remembers(task, team):
    turn = await team.chat("only").say(task.question)
    HEARD.append(task.id)
    return Finish("finished", turn.text + str(len(HEARD) % 2), turn.id)


async def wrong_reason(task, team):
    turn = await team.chat("only").say(task.question)
    return Finish("done", turn.text, turn.id)


async def falls(task, team):
    turn = await team.chat("only").say(task.question)
    return Finish("finished", turn.text.split()[0], turn.id)


async def outside(task, team):
    chat = team.chat("only")
    engine = team.engine(chat.role)
    await engine.generate("only", [], (), chat.role.sampling, 1, 0)
    turn = await chat.say(task.question)
    return Finish("finished", turn.text, turn.id)


async def silent(task, team):
    await asyncio.sleep(0)
    return Finish("finished", "")


@pytest.mark.parametrize("run", [leaks, rolls_dice, remembers, wrong_reason, falls, outside, silent])
def test_a_broken_workflow_is_refused(run):
    with pytest.raises(AssertionError):
        checks.check_workflow(run, roles=["only"])


@pytest.mark.parametrize(
    "reward",
    [
        lambda task, turn, episode: "good",
        lambda task, turn, episode: float("nan"),
        lambda task, turn, episode: random.random(),
        lambda task, turn, episode: float(turn.text.split("{")[1][0] == "7"),
    ],
)
def test_a_broken_reward_is_refused(reward):
    with pytest.raises(AssertionError):
        checks.check_reward(reward)


@pytest.mark.parametrize(
    "estimator",
    [
        lambda scored: [t.value for t in scored],  # a group of one gets the raw reward
        lambda scored: [0.0] * 3,
        lambda scored: [0.0 if len(scored) < 2 else t.value - scored[0].value for t in scored],
        lambda scored: [0.0 if len(scored) < 2 else (t.value - 0.3) * (t.task == "a") for t in scored],
        lambda scored: [0.0 if len(scored) < 2 else (t.value - 0.3) / 0.0 if t.value == 2 else 0.1 for t in scored],
        lambda scored: [[0.0] * (t.tokens + 1) for t in scored],
    ],
)
def test_a_broken_estimator_is_refused(estimator):
    with pytest.raises(AssertionError):
        checks.check_estimator(estimator)


def _gradient(scale: str):
    """The plain policy gradient with one thing wrong."""

    def loss(logprobs, batch):
        import torch

        trained = batch.turns >= 0
        ratio = (logprobs - batch.logprobs).clamp(-20, 20).exp()
        parts = -batch.weights * batch.advantages * ratio
        total = parts[trained].sum()
        if scale == "mean":
            total = parts[trained].mean()
        if scale == "everything":
            total = total + 0.1 * logprobs.sum()
        if scale == "sign":
            total = -total
        if scale == "unclamped":
            total = (parts * (logprobs - batch.logprobs).exp())[trained].sum()
        if scale == "detached":
            total = total.detach()
        metrics = {"ratio": float(ratio.detach().mean())} if scale == "metric" else {}
        return (torch.stack([total, total]) if scale == "vector" else total), metrics

    return loss


def test_a_sound_loss_passes():
    checks.check_loss(_gradient("nothing"))


@pytest.mark.parametrize("scale", ["mean", "everything", "sign", "unclamped", "detached", "metric", "vector"])
def test_a_broken_loss_is_refused(scale):
    with pytest.raises((AssertionError, RuntimeError)):
        checks.check_loss(_gradient(scale))


class Faulty(scripted.ScriptedEngine):
    def __init__(self, fault):
        super().__init__(lambda call: "\\boxed{4}")
        self.fault = fault

    async def generate(self, policy, messages, prompt_ids, sampling, n, seed) -> list[Completion]:
        found = await super().generate(policy, messages, prompt_ids, sampling, n, seed)
        if self.fault == "count":
            return found[:1]
        if self.fault == "dice":
            text = str(random.random())
            return [replace(c, text=text, output_ids=(self.codec(policy).intern("assistant", text),)) for c in found]
        changes = {
            "prompt": {"prompt_ids": (0,)},
            "logprobs": {"logprobs": ()},
            "above": {"logprobs": (0.5,)},
            "text": {"text": "other"},
            "reason": {"finish_reason": "eos"},
        }
        return [replace(c, **changes[self.fault]) for c in found]  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", ["count", "dice", "prompt", "logprobs", "above", "text", "reason"])
def test_a_broken_engine_is_refused(fault):
    with pytest.raises(AssertionError):
        checks.check_engine(Faulty(fault), "main")


@pytest.mark.parametrize(
    "load",
    [
        list,
        lambda: [Task("a", "q", "1"), Task("a", "r", "2")],
        lambda: [Task("a", "q", "")],
        lambda: [Task("a", "q", "1", {"set": {1}})],
        lambda: [("a", "q", "1")],
        lambda: [Task("a", f"{random.random()}", "1")],
    ],
)
def test_a_broken_loader_is_refused(load):
    with pytest.raises(AssertionError):
        checks.check_tasks(load)


@pytest.mark.parametrize("kind", scaffold.SKELETONS)
def test_a_new_skeleton_passes_its_own_test_and_resolves(kind, tmp_path, monkeypatch):
    name = f"fresh_{kind}"
    made = scaffold.new(kind, name, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    test = importlib.import_module(f"test_{name}")
    getattr(test, f"test_{name}_keeps_the_rules")()
    function = KINDS[kind].function or kind
    assert callable(resolve(kind, f"{name}:{function}")) and f"{name}:{function}" in made.usage
    with pytest.raises(FileExistsError):
        scaffold.new(kind, name, tmp_path)


def test_skeletons_cover_every_kind_and_refuse_bad_names(tmp_path):
    assert set(scaffold.SKELETONS) == set(KINDS)
    for kind, name in (("reword", "x"), ("reward", "not a name"), ("reward", "class"), ("reward", "../x")):
        with pytest.raises(ValueError, match=r"Write one of|write letters"):
            scaffold.new(kind, name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_kits_import_without_torch():
    code = "import cothink.checks, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
