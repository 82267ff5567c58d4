"""Play the built-in model in every role and count right answers, per role and per level."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from cothink.builtin.chats import Chat
from cothink.builtin.prompts import FINISH, INSTRUCT, PROMPTS, REFINE, VERIFY
from cothink.builtin.tokenizer import END, render
from cothink.types import Message, Task

BATCH = 256
ROUNDS = 10


def boxed(text: str) -> str | None:
    """Return what the last `\\boxed{}` of a text holds."""
    found = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return found[-1].strip() if found else None


class Sampler:
    """Batched sampling from one model, with left padding."""

    def __init__(self, model, tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.end = tokenizer.convert_tokens_to_ids(END)

    def say(self, chats: Sequence[Chat], temperature: float = 1.0, max_tokens: int = 100) -> list[str | None]:
        """Answer each chat once, None where `max_tokens` was not enough; `temperature=0` is greedy."""
        import torch

        how = {"do_sample": False}
        if temperature > 0:
            how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        answers: list[str | None] = []
        for at in range(0, len(chats), BATCH):
            prompts = [f"{render(chat)}<|im_start|>assistant\n" for chat in chats[at : at + BATCH]]
            encoded = self.tokenizer(prompts, padding=True, return_tensors="pt")
            with torch.no_grad():
                rows = self.model.generate(
                    input_ids=encoded["input_ids"],
                    attention_mask=encoded["attention_mask"],
                    max_new_tokens=max_tokens,
                    **how,
                )
            for row in rows[:, encoded["input_ids"].shape[1] :].tolist():
                length = row.index(self.end) if self.end in row else None
                text = self.tokenizer.decode(row[:length], skip_special_tokens=True)
                answers.append(None if length is None else text)
        return answers

    def ask(self, role: str, users: Sequence[str], temperature: float = 1.0) -> list[str]:
        """Let one role answer one user message each."""
        chats = [[Message("system", PROMPTS[role]), Message("user", user)] for user in users]
        return [text or "" for text in self.say(chats, temperature)]


def measure(sampler: Sampler, tasks: Sequence[Task], temperature: float = 1.0) -> dict[str, list[str]]:
    """Play every team once on every task; the answers come back as texts by the name of the measurement."""
    questions = [task.question for task in tasks]

    def solve(plans: Sequence[str]) -> list[str]:
        users = [INSTRUCT.format(question=q, plan=p) for q, p in zip(questions, plans)]
        return sampler.ask("reasoning", users, temperature)

    plans = sampler.ask("meta", questions, temperature)
    first = sampler.ask("generator", questions, temperature)
    users = [VERIFY.format(question=q, answer=g) for q, g in zip(questions, first)]
    checks = sampler.ask("verifier", users, temperature)
    triples = zip(questions, first, checks)
    users = [REFINE.format(question=q, answer=g, verification=v) for q, g, v in triples]
    return {
        "solo": sampler.ask("solo", questions, temperature),
        "plan_solve": sampler.ask("plan_solve", questions, temperature),
        "meta": plans,
        "team": solve(plans),
        "full plan": solve([", ".join(task.meta["steps"]) for task in tasks]),
        "no plan": solve(["Solve it."] * len(tasks)),
        "multi-turn": dialogue(sampler, questions, temperature),
        "generator": first,
        "verifier": checks,
        "refiner": sampler.ask("refiner", users, temperature),
    }


def dialogue(sampler: Sampler, questions: Sequence[str], temperature: float = 1.0) -> list[str]:
    """Play the multi-turn team to `[FINISH]` or for `ROUNDS` rounds; return reasoning's last texts ('' unfinished)."""
    metas: list[Chat] = [[Message("system", PROMPTS["meta_multi"]), Message("user", q)] for q in questions]
    others: list[Chat] = [[Message("system", PROMPTS["reasoning_multi"])] for _ in questions]
    last = [""] * len(questions)
    live = list(range(len(questions)))
    for turn in range(ROUNDS):
        asks = sampler.say([metas[i] for i in live], temperature)
        heard = [(i, ask) for i, ask in zip(live, asks) if ask is not None]
        for i, ask in heard:
            metas[i].append(Message("assistant", ask))
            user = ask if turn else INSTRUCT.format(question=questions[i], plan=ask)
            others[i].append(Message("user", user))
        answers = sampler.say([others[i] for i, _ in heard], temperature)
        live = []
        for (i, ask), answer in zip(heard, answers):
            if answer is None:
                continue
            if FINISH in ask:
                last[i] = answer
                continue
            others[i].append(Message("assistant", answer))
            metas[i].append(Message("user", answer))
            live.append(i)
        if not live:
            break
    return last


def plan_kind(task: Task, plan: str) -> str:
    """Name a sampled plan: `leak`, `right` (the gold plan), `wrong` (other steps), `empty` or `vague`."""
    if "\\boxed" in plan:
        return "leak"
    if plan.startswith("start"):
        return "right" if plan.split(", ") == list(task.meta["steps"]) else "wrong"
    return "empty" if plan in ("", "Solve it.") else "vague"


def table(tasks: Sequence[Task], answers: dict[str, list[str]]) -> str:
    """Write the accuracies as a Markdown table, a column for each level, and the shares of the kinds of plan."""
    levels = sorted({int(task.meta["level"]) for task in tasks})
    lines = ["| played | all | " + " | ".join(f"level {k}" for k in levels) + " |", "|---|---|" + "---|" * len(levels)]
    for name, texts in answers.items():
        if name == "meta":
            continue
        marks = [(int(task.meta["level"]), _right(name, task, text)) for task, text in zip(tasks, texts)]
        cells = [[right for at, right in marks if level in (None, at)] for level in (None, *levels)]
        lines.append(f"| {name} | " + " | ".join(f"{sum(cell) / len(cell):.3f}" for cell in cells) + " |")
    kinds = Counter(plan_kind(task, plan) for task, plan in zip(tasks, answers["meta"]))
    shares = ", ".join(
        f"{kind} {kinds[kind] / len(tasks):.3f}" for kind in ("right", "wrong", "empty", "vague", "leak")
    )
    return "\n".join([*lines, "", f"Plans: {shares}."])


def _right(name: str, task: Task, text: str) -> bool:
    if name == "verifier":
        return text.rpartition("Final Answer: ")[2].strip() == task.answer
    return boxed(text) == task.answer
