"""Skeletons for `cothink new`: the smallest part of each kind that works, and the test that it keeps the rules."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cothink.resolve import listing, nearest


@dataclass(frozen=True)
class Made:
    """The files written, the test last, and how a recipe names the new part."""

    files: tuple[Path, ...]
    usage: str


@dataclass(frozen=True)
class Skeleton:
    """Source and test of one kind; NAME stands for the module's name."""

    source: str
    test: str
    usage: str


def new(kind: str, name: str, folder: Path) -> Made:
    """Writes NAME.py and test_NAME.py into a folder; refuses to overwrite."""
    if kind not in SKELETONS:
        close = nearest(kind, SKELETONS)
        hint = f"; did you mean {close!r}?" if close else ""
        raise ValueError(f"there is no skeleton for {kind!r}{hint} Write one of: {listing(SKELETONS)}")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{name!r} is no Python module name; write letters, digits and _, such as my_{kind}")
    skeleton = SKELETONS[kind]
    texts = {folder / f"{name}.py": skeleton.source, folder / f"test_{name}.py": skeleton.test}
    for path in texts:
        if path.exists():
            raise FileExistsError(f"{path} is there already; choose another name or remove it")
    for path, text in texts.items():
        path.write_text(text.replace("NAME", name), encoding="utf-8")
    return Made(tuple(texts), skeleton.usage.replace("NAME", name))


def _test(kind: str, function: str, call: str) -> str:
    return f"""from cothink.checks import check_{kind}
from NAME import {function}


def test_NAME_keeps_the_rules():
    {call}
"""


WORKFLOW = '''"""NAME: one role drafts, another improves the draft."""

from __future__ import annotations

from cothink.types import FINISHED, Finish, Task

# Role name -> default system prompt; a recipe may write its own.
ROLES = {
    "writer": "Solve the problem step by step. Finish with the final answer inside \\\\boxed{}.",
    "editor": "You are given a problem and a draft. Correct it. Finish with the final answer inside \\\\boxed{}.",
}


def turns(**options: object) -> int:
    """The most turns one role has in an episode."""
    return 1


async def run(task: Task, team, *, show_question: bool = True) -> Finish:
    """Keyword-only parameters are the options a recipe can set."""
    draft = await team.chat("writer").say(task.question)
    question = f"Question:\\n{task.question}\\n\\n" if show_question else ""
    final = await team.chat("editor").say(f"{question}Draft:\\n{draft.text}", after=draft)
    return Finish(FINISHED, final.text, final.id)
'''

REWARD = '''"""NAME: a reward for short answers."""

from __future__ import annotations

from cothink.types import Episode, Task, Turn


def reward(task: Task, turn: Turn, episode: Episode, *, limit: int = 64) -> float | None:
    """1 for at most `limit` tokens, else 0; None where it does not apply (never 0 for that)."""
    if not turn.completion.output_ids:
        return None
    return float(len(turn.completion.output_ids) <= limit)
'''

ESTIMATOR = '''"""NAME: each turn's return against the mean of its row and role."""

from __future__ import annotations

from collections.abc import Sequence

from cothink.types import ScoredTurn


def estimator(scored: Sequence[ScoredTurn], *, scale: float = 1.0) -> list[float]:
    """One number per turn, in the order given; a turn without company gets 0."""
    groups: dict[tuple[str, str], list[float]] = {}
    for turn in scored:
        groups.setdefault((turn.task, turn.role), []).append(turn.value)
    return [scale * (t.value - sum(g) / len(g)) for t in scored if (g := groups[t.task, t.role])]
'''

LOSS = '''"""NAME: the plain policy gradient, through a clipped importance ratio."""

from __future__ import annotations


def loss(logprobs, batch, *, width: float = 0.2):
    """`logprobs` [B, L] are the policy's own; weights, advantages and behaviour log-probs are in the batch."""
    import torch

    trained = batch.turns >= 0
    ratio = (logprobs - batch.logprobs)[trained].clamp(-20, 20).exp()
    advantage, weight = batch.advantages[trained], batch.weights[trained]
    clipped = ratio.clamp(1 - width, 1 + width)
    loss = -(weight * torch.minimum(ratio * advantage, clipped * advantage)).sum()
    # Metrics are pairs (sum, count), so that those of micro-batches can be added.
    return loss, {"ratio": (float(ratio.detach().sum()), float(trained.sum()))}
'''

TASKS = '''"""NAME: small sums."""

from __future__ import annotations

import random

from cothink.types import Task


def load(split: str = "train", *, count: int = 100, seed: int = 0) -> list[Task]:
    """Rows with unique ids, the same for the same options; the two splits share none of their numbers."""
    dice, rows = random.Random(f"{split}/{seed}"), []
    odd = split == "train"
    for k in range(count):
        a, b = 2 * dice.randrange(50) + odd, dice.randrange(100)
        rows.append(Task(f"NAME/{split}/{k}", f"What is {a} + {b}?", str(a + b), {"kind": "number"}))
    return rows
'''

CONVERSATIONS = '''"""NAME: one short chat for every role."""

from __future__ import annotations

from collections.abc import Mapping

from cothink.conversations import Conversation, Conversations, chat
from cothink.types import Role


def load(roles: Mapping[str, Role], *, count: int = 10) -> Conversations:
    """Examples for the roles that a stage teaches: what each is told and says in turn, itself last."""
    made = [
        Conversation(role.name, chat(role, [f"What is {k} + {k}?", str(2 * k)]), f"NAME/{k}")
        for role in roles.values()
        for k in range(count)
    ]
    return Conversations(made, {"rows": len(made)})
'''

ENGINE = '''"""NAME: an engine that says one of a few fixed answers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from cothink.chat import InternCodec
from cothink.types import Completion, Message, Sampling


class Engine:
    """`policies` holds what the recipe loaded; this one has no weights and does not look at it."""

    def __init__(self, policies, answers: Sequence[str]):
        self._codec, self._answers = InternCodec(), list(answers)

    def codec(self, policy: str):
        """Turns messages into ids; engines with a tokenizer use cothink.chat.TemplateCodec."""
        return self._codec

    def load(self, policy: str, weights, version: int) -> None:
        """Takes new weights; called after every training step of an engine that keeps a copy."""

    async def generate(
        self, policy: str, messages: Sequence[Message], prompt_ids, sampling: Sampling, n: int, seed: int
    ) -> list[Completion]:
        """n completions of one prompt; the k-th may depend on weights, prompt, sampling and (seed, k) only."""
        found = []
        for k in range(n):
            greedy = sampling.temperature == 0
            text = self._answers[0] if greedy else random.Random(f"{seed}/{k}").choice(self._answers)
            logprob = 0.0 if greedy else -math.log(len(self._answers))
            ids = (self._codec.intern("assistant", text),)
            found.append(Completion(text, tuple(prompt_ids), ids, (logprob,)))
        return found


def engine(policies, *, answers: Sequence[str] = ("\\\\boxed{1}", "\\\\boxed{2}")) -> Engine:
    """Called once with the loaded policies; keyword-only parameters are the options a recipe can set."""
    return Engine(policies, answers)
'''

SKELETONS: Mapping[str, Skeleton] = {
    "workflow": Skeleton(WORKFLOW, _test("workflow", "run", "check_workflow(run)"), "workflow: {name: 'NAME:run'}"),
    "reward": Skeleton(REWARD, _test("reward", "reward", "check_reward(reward)"), "rewards: [{name: 'NAME:reward'}]"),
    "estimator": Skeleton(
        ESTIMATOR, _test("estimator", "estimator", "check_estimator(estimator)"), "estimator: {name: 'NAME:estimator'}"
    ),
    "loss": Skeleton(LOSS, _test("loss", "loss", "check_loss(loss)"), "loss: {name: 'NAME:loss'}"),
    "tasks": Skeleton(TASKS, _test("tasks", "load", "check_tasks(load)"), "tasks: {train: {name: 'NAME:load'}}"),
    "conversations": Skeleton(
        CONVERSATIONS,
        _test("conversations", "load", "check_conversations(load)"),
        "stages: [{kind: sft, data: {name: 'NAME:load'}, epochs: 1}]",
    ),
    "engine": Skeleton(
        ENGINE, _test("engine", "engine", 'check_engine(engine({}), "main")'), "engine: {name: 'NAME:engine'}"
    ),
}
