"""What many turns cost: prompt tokens the local engine computes for ReMA's dialogues and MALT's trees.

`python bench/turns.py [--turns 1 10 30] [--branches 1 3]` plays both workflows with answers of at most `--tokens`
tokens and compares the prompt tokens computed with the least possible: every distinct beginning once, sampled tokens
never again. The texts mean nothing; only their lengths count.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import common
from common import Measured

from cothink.builtin.prompts import PROMPTS, REFINE, VERIFY
from cothink.policy import Policy
from cothink.team import Job, Team, play
from cothink.types import FINISHED, Episode, Finish, Role, Sampling, Task, Turn
from cothink.workflows import rema

CONTEXT = 1 << 15
"""Longest prompt: far more than the built-in model was trained on, which does not matter to a count of tokens."""


async def tree(task: Task, team: Team, *, n: int) -> Finish:
    """MALT's search tree: n answers, n checks of each, n corrections of each check."""
    answers = await team.chat("generator").sample(task.question, n, after=())

    async def checked(answer: Turn) -> list[Turn]:
        text = VERIFY.format(question=task.question, answer=answer.text)
        checks = await team.chat("verifier").sample(text, n, after=answer)
        return [leaf for part in await asyncio.gather(*(refined(answer, c) for c in checks)) for leaf in part]

    async def refined(answer: Turn, check: Turn) -> list[Turn]:
        text = REFINE.format(question=task.question, answer=answer.text, verification=check.text)
        return await team.chat("refiner").sample(text, n, after=check)

    leaves = [leaf for part in await asyncio.gather(*map(checked, answers)) for leaf in part]
    return Finish(FINISHED, leaves[0].text, leaves[0].id)


def team_of(prompts: dict[str, str], tokens: int) -> dict[str, Role]:
    """Roles that share one policy and speak about `tokens` tokens a turn."""
    return {name: Role(name, "p", text, sampling=Sampling(max_tokens=tokens)) for name, text in prompts.items()}


def cost(policy: Policy, options: argparse.Namespace, workflow: Any, roles: dict[str, Role], repeat: int) -> Measured:
    """Plays the workflow on all tasks at once, with an empty cache, and counts."""
    speaker = common.local(policy, options.rows)
    jobs = [Job(task, task.id, options.seed + repeat) for task in common.tasks(options.tasks, options.seed)]
    seconds, played = common.timed(lambda: asyncio.run(play(jobs, workflow, roles, {"p": speaker})))
    if played.failures:
        raise RuntimeError(f"{len(played.failures)} episodes failed: {played.failures[0].message}")
    prefixes = common.Prefixes()
    for turn in (t for e in played.episodes for t in e.turns):
        prefixes.add(turn.completion.prompt_ids, turn.completion.output_ids)
    turns = sum(len(e.turns) for e in played.episodes)
    figures = {
        "turns": turns / len(played.episodes),
        "final": sum(map(final, played.episodes)),
        "anew": sum(len(t.completion.prompt_ids) for e in played.episodes for t in e.turns),
        "least": prefixes.least,
        "prefilled": speaker.counters.prefilled,
        "milliseconds": 1000 * seconds / turns,
    }
    return Measured(seconds, {k: float(v) for k, v in figures.items()})


def final(episode: Episode) -> int:
    """Length of each role's last context, added up."""
    last = {t.role: len(t.completion.prompt_ids) + len(t.completion.output_ids) for t in episode.turns}
    return sum(last.values())


def build() -> argparse.ArgumentParser:
    """The options."""
    made = common.parser(__doc__, tasks=(4, 2), tokens=(16, 16), rows=(256, 64), repeats=(3, 1))
    made.add_argument("--turns", type=int, nargs="+", default=[1, 2, 5, 10, 20, 30])
    made.add_argument("--branches", type=int, nargs="+", default=[1, 2, 3, 4])
    return made


def measure(options: argparse.Namespace) -> None:
    """Plays both workflows in every size and prints a table of each."""
    policy = common.policy(options.model, options.dtype)
    policy.model.config.max_position_embeddings = CONTEXT
    names = ("meta_multi", "reasoning_multi")
    pair = team_of({n.removesuffix("_multi"): PROMPTS[n] for n in names}, options.tokens)
    talk = {
        n: partial(rema.run, max_turns=n, max_context=CONTEXT, finish_tag=None, stop_on_truncation=False)
        for n in options.turns
    }
    trio = team_of({name: PROMPTS[name] for name in ("generator", "verifier", "refiner")}, options.tokens)
    search = {n: partial(tree, n=n) for n in options.branches}
    for workflow, roles in ((next(iter(talk.values())), pair), (next(iter(search.values())), trio)):
        cost(policy, options, workflow, roles, 0)  # warm-up
    dialogues = common.alternate({n: partial(cost, policy, options, w, pair) for n, w in talk.items()}, options.repeats)
    trees = common.alternate({n: partial(cost, policy, options, w, trio) for n, w in search.items()}, options.repeats)
    peak = common.ceiling(policy.model, options.dtype)
    common.header("Turns", options, ceiling=f"{peak / 1e9:,.0f} GFLOP/s")
    print(f"\nReMA, {options.tasks} tasks, {options.tokens} tokens a turn; final: each role's last context, added up")
    _table("rounds", dialogues, with_final=True)
    print(f"\nMALT tree, {options.tasks} tasks, {options.tokens} tokens a turn")
    _table("n", trees, with_final=False)
    print("ratio to ...: prompt tokens prefilled over it; `anew` reads every turn's whole prompt")


def _table(size: str, runs: Mapping[int, Sequence[Measured]], *, with_final: bool) -> None:
    kinds = (*(("final",) if with_final else ()), "least", "anew")
    rows = []
    for n, found in runs.items():
        value = {k: common.median(found, k) for k in ("turns", "milliseconds", "prefilled", *kinds)}
        ratios = [common.times(value["prefilled"] / value[k]) for k in kinds]
        rows.append(
            (n, value["turns"], value["milliseconds"], *(round(value[k]) for k in ("prefilled", *kinds)), *ratios)
        )
    head = (size, "turns/task", "ms/turn", "prefilled", *kinds, *(f"ratio to {k}" for k in kinds))
    common.table(head, rows)


def main() -> None:
    """Reads the options and measures."""
    made = build()
    options = common.parse(made)
    if min(*options.turns, *options.branches) < 1:
        made.error("--turns and --branches must be at least 1")
    measure(options)


if __name__ == "__main__":
    main()
