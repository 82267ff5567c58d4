"""Right answers for a tree whose model solves nothing, so that every role has something to learn.

`python tests/e2e/synthetic_leaves.py STORE OUT` copies a finished store. In every tree the refiners below one generator
turn state the gold answer: all of them below its first verifier turn, all but the last below its second one. Turns
that ended by themselves are taken first, as a turn that was cut is never an example. The header says `synthetic`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cothink.team import in_order
from cothink.types import Completion, Turn

Line = dict[str, Any]
Encode = Callable[[str], list[int]]


def top_up(store: Path, out: Path, encode: Encode) -> int:
    """Writes the copy and says how many leaves are synthetic; `encode` gives a text's ids, its end included."""
    out.mkdir(parents=True)
    header = json.loads((store / "header.json").read_text())
    (out / "header.json").write_text(json.dumps({**header, "synthetic": "right answers of the refiner"}, indent=2))
    trees: dict[str, list[Line]] = {}
    for text in (store / "trees.jsonl").read_text().splitlines():
        line = json.loads(text)
        trees.setdefault(line["task"], []).append(line)
    made = [_topped(lines, encode) for lines in trees.values()]
    with (out / "trees.jsonl").open("w") as file:
        file.writelines(json.dumps(line) + "\n" for lines in trees.values() for line in lines)
    return sum(made)


def _topped(lines: list[Line], encode: Encode) -> int:
    gold = next(line["answer"] for line in lines if "question" in line)
    calls = {(line["role"], *line["parents"]): line for line in lines if "turns" in line}
    new = _numbers(list(calls.values()))
    grades = next(line for line in lines if "grades" in line)["grades"]
    count = 0
    generator = _ended(calls["generator",]["turns"])[0]
    checks = _ended(calls["verifier", generator["id"]]["turns"])
    for verifier, keep in zip(checks, (0, 1)):
        leaves = calls["refiner", verifier["id"]]["turns"]
        for leaf in leaves[: len(leaves) - keep]:
            text = f"The steps hold.\nFinal Answer: {gold}"
            leaf.update(text=text, output_ids=encode(text), finish_reason="stop")
            grades[new[leaf["id"]]] = ["right", gold]
            count += 1
    return count


def _ended(turns: list[Line]) -> list[Line]:
    return sorted(turns, key=lambda turn: turn["finish_reason"] != "stop")


def _numbers(calls: list[Line]) -> dict[str, str]:
    """Name in the finished tree, by which grades are kept, of every stored turn."""
    pairs = list(_turns(calls))
    return {name: str(k) for k, name in enumerate(in_order([t for t, _ in pairs], {t.id: at for t, at in pairs}))}


def _turns(calls: list[Line]) -> Iterator[tuple[Turn, int]]:
    said = Completion("", (), (), (), "stop")
    for call in calls:
        for k, turn in enumerate(call["turns"]):
            made = Turn(turn["id"], tuple(call["parents"]), call["role"], call["policy"], said, "", call["round"])
            yield made, call["place"] + k


def main() -> None:
    from transformers import AutoTokenizer

    from cothink import models

    tokenizer = AutoTokenizer.from_pretrained(models.where("smollm2"))
    store, out = map(Path, sys.argv[1:])
    print(top_up(store, out, lambda text: [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]), "synthetic leaves")


if __name__ == "__main__":
    main()
