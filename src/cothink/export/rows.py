"""The episodes an rl stage learned from, as training rows: TRL's shapes and verl's, in parquet files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cothink import wiring
from cothink.export import replay
from cothink.parts import RL
from cothink.recipe import Recipe
from cothink.types import Message

Row = dict[str, Any]
ABOUT = {
    "turns": "each turn as prompt and completion (TRL's SFT shape), with its return and advantage",
    "pairs": "turns of one step that answer one prompt: best and worst by return (TRL's DPO shape)",
    "chats": "each role's whole chat of an episode as messages (TRL's SFT and verl's multi-turn SFT shape)",
    "verl": "the questions with their gold answers (verl's RL shape)",
}


def write(run: Path, recipe: Recipe, to: Path) -> list[str]:
    """Writes the rows of a run into a folder and says what came out; evaluations are not training data."""
    to.mkdir(parents=True)
    lines = []
    if (run / "examples").is_dir():  # of sft and dpo stages: they are in TRL's shapes already
        shutil.copytree(run / "examples", to / "examples")
        lines.append(f"rows/examples: {len(list((to / 'examples').iterdir()))} files, as the trainers read them")
    stages = [k for k, stage in enumerate(recipe.stages) if isinstance(stage, RL)]
    files = [(k, file) for k in stages for file in sorted((run / "episodes" / f"{k:02d}-rl").glob("*.jsonl"))]
    if not files:
        return lines or ["rows: this run holds no training episodes and no examples"]
    if needs := wiring.needs(recipe):
        return [*lines, f"rows: the prompts cannot be built again, the workflow reads {' and '.join(needs)} of a task"]
    counts, lost = _tables(recipe, files, to)
    lines += [f"rows/{name}.parquet: {counts[name]:,} rows, {about}" for name, about in ABOUT.items()]
    if lost:
        lines.append(f"rows: {lost:,} turns left out, their prompts could not be built again")
    return lines


def _tables(recipe: Recipe, files: list[tuple[int, Path]], to: Path) -> tuple[dict[str, int], int]:
    import pyarrow
    import pyarrow.parquet

    writers = {name: pyarrow.parquet.ParquetWriter(to / f"{name}.parquet", kind) for name, kind in _schemas().items()}
    counts, lost, asked = dict.fromkeys(writers, 0), 0, set[str]()
    try:
        for stage, file in files:
            episodes = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            found = list(_turns(recipe, episodes, stage, int(file.stem)))
            lost += sum(t["finish_reason"] != "void" for e in episodes for t in e["turns"]) - len(found)
            new = {e["task"]: e for e in episodes}
            tables = {
                "turns": found,
                "pairs": list(pairs(found)),
                "chats": list(chats(found)),
                "verl": [_question(recipe, stage, e) for name, e in new.items() if name not in asked],
            }
            asked |= new.keys()
            for name, rows in tables.items():
                counts[name] += len(rows)
                if rows:
                    kind = writers[name].schema
                    plain = [{field: row[field] for field in kind.names} for row in rows]
                    writers[name].write_table(pyarrow.Table.from_pylist(plain, kind))
    finally:
        for writer in writers.values():
            writer.close()
    return counts, lost


def _turns(recipe: Recipe, episodes: list[Row], stage: int, step: int) -> Iterator[Row]:
    """Each turn that was said, with the chat it answered."""
    for episode, heard in zip(episodes, replay.prompts(recipe, episodes), strict=True):
        for turn in episode["turns"]:
            if turn["id"] in heard and turn["finish_reason"] != "void":
                yield {
                    "prompt": _plain(heard[turn["id"]]),
                    "completion": [{"role": "assistant", "content": turn["text"]}],
                    "role": turn["role"], "policy": turn["policy"], "task": episode["task"], "episode": episode["id"],
                    "turn": turn["id"], "round": turn["round"], "tokens": turn["tokens"],
                    "finish_reason": turn["finish_reason"], "return": turn["return"],
                    "advantage": _mean(turn["advantage"]), "accuracy": episode["accuracy"],
                    "verdict": episode["verdict"], "stage": stage, "step": step,
                }  # fmt: skip


def pairs(turns: Iterable[Row]) -> Iterator[Row]:
    """The best and the worst answer to each prompt that has answers of different returns; the first of equal ones."""
    graded = [turn for turn in turns if turn["return"] is not None]
    for group in _together(graded, lambda t: json.dumps([t["role"], t["prompt"]])):
        best, worst = max(group, key=lambda t: t["return"]), min(group, key=lambda t: t["return"])
        if best["return"] > worst["return"] and best["completion"] != worst["completion"]:
            shared = {k: best[k] for k in ("prompt", "role", "policy", "task", "stage", "step")}
            sides = {"chosen": best["completion"], "rejected": worst["completion"]}
            names = {
                f"{side}_turn": f"{t['episode']}/{t['turn']}" for side, t in (("chosen", best), ("rejected", worst))
            }
            returns = {"chosen_return": best["return"], "rejected_return": worst["return"]}
            yield {**shared, **sides, **names, **returns}


def chats(turns: Iterable[Row]) -> Iterator[Row]:
    """The chats of each role and episode that no later turn of the role goes on from."""
    for group in _together(turns, lambda t: t["episode"] + "/" + t["role"]):
        whole = [(turn, [*turn["prompt"], *turn["completion"]]) for turn in group]
        for turn, messages in whole:
            if not any(t["prompt"][: len(messages)] == messages for t in group):
                yield {**turn, "messages": messages}


def _together(rows: Iterable[Row], key: Any) -> Iterator[list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    yield from groups.values()


def _question(recipe: Recipe, stage: int, episode: Row) -> Row:
    part = recipe.stages[stage]
    assert isinstance(part, RL)
    return {
        "data_source": f"cothink/{recipe.tasks[part.on].name}",
        "prompt": [{"role": "user", "content": episode["question"]}],
        "ability": "reasoning",
        "reward_model": {"style": "rule", "ground_truth": episode["gold"]},
        "extra_info": {"split": part.on, "index": episode["task"], "question": episode["question"]},
    }


def _plain(messages: Iterable[Message]) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.content} for m in messages]


def _mean(value: Any) -> float | None:
    """One number for a turn whose tokens have several."""
    return sum(value) / len(value) if isinstance(value, list) else value


def _schemas() -> Mapping[str, Any]:
    from pyarrow import float64, int64, list_, schema, string, struct

    chat = list_(struct([("role", string()), ("content", string())]))
    who = [("role", string()), ("policy", string()), ("task", string())]
    when = [("stage", int64()), ("step", int64())]
    verdict = [("accuracy", float64()), ("verdict", string())]
    turn = [
        ("episode", string()),
        ("turn", string()),
        ("round", int64()),
        ("tokens", int64()),
        ("finish_reason", string()),
    ]
    model = struct([("style", string()), ("ground_truth", string())])
    info = struct([(name, string()) for name in ("split", "index", "question")])
    worth = [("return", float64()), ("advantage", float64())]
    sides = [(f"{side}_{what}", kind) for what, kind in (("turn", string()), ("return", float64()))
             for side in ("chosen", "rejected")]  # fmt: skip
    asked = [("data_source", string()), ("prompt", chat), ("ability", string()), ("reward_model", model)]
    fields = {
        "turns": [("prompt", chat), ("completion", chat), *who, *turn, *worth, *verdict, *when],
        "pairs": [("prompt", chat), ("chosen", chat), ("rejected", chat), *who, *sides, *when],
        "chats": [("messages", chat), *who, ("episode", string()), *verdict, *when],
        "verl": [*asked, ("extra_info", info)],
    }
    return {name: schema(columns) for name, columns in fields.items()}
