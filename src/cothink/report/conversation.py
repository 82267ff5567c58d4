"""One episode as HTML: a chat, or a tree of turns, with what each turn was credited with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from cothink.report.episodes import facts
from cothink.report.markup import first_line, fold, shortened, signed, text

Row = Mapping[str, Any]
View = Literal["chat", "tree"]

TEXT = 6_000
"""Characters of a turn that are shown unless somebody asks for all."""
TOKENS = 2_000
"""Tokens of a turn that are shown one by one."""
LOOKS = ("right", "wrong", "warn", "fixed", "spoilt", "changed", "unparsable", "failed", "error")
NESTED = 100
"""Branchings below one another that are drawn as such."""


def branches(row: Row) -> bool:
    """Whether some turn has several answers, so that a chat would mix what was never said together."""
    seen = [tuple(t.get("parents") or ()) for t in row["turns"]]
    return len(set(seen)) < len(seen)


def episode(row: Row, view: View | None = None, limit: int = TEXT) -> str:
    """An article of one episode; without a `view`, a tree where turns branch and a chat where they do not."""
    view = view or ("tree" if branches(row) else "chat")
    roles = {name: k for k, name in enumerate(dict.fromkeys(t["role"] for t in row["turns"]))}
    turns = _tree(row, roles, limit) if view == "tree" else _chat(row, roles, limit)
    question, name = shortened(str(row.get("question", "")), limit)[0], shortened(str(row.get("id", "")), 200)[0]
    return (
        f'<article class="episode {view}"><header><code>{text(name)}</code>{badges(row)}</header>'
        f'<p class="question">{text(question)}</p>'
        f'<p class="gold">gold answer <b>{text(shortened(str(row.get("gold", "")), 400)[0])}</b>{_answer(row)}</p>'
        f"{turns}{_rewards(row)}</article>"
    )


def badges(row: Row) -> str:
    """The verdict, how it ended, the reward and the rest that lists show."""
    known = facts(row)
    found = [(known.verdict, known.verdict)]
    if row.get("finish") not in (None, "finished", known.verdict):
        found.append((str(row["finish"]), "warn"))
    if known.truncated and row.get("finish") != "truncated":
        found.append(("cut", "warn"))
    if known.flip:
        found.append((known.flip, known.flip))
    if known.reward is not None:
        found.append((f"reward {signed(known.reward)}", "plain"))
    if row.get("level") is not None:
        found.append((f"level {row['level']}", "plain"))
    return "".join(
        f'<span class="badge {look if look in LOOKS else "plain"}">{text(name)}</span>' for name, look in found
    )


def _answer(row: Row) -> str:
    return f", answered <b>{text(shortened(str(row['answer']), 400)[0])}</b>" if row.get("answer") is not None else ""


def _rewards(row: Row) -> str:
    scores = row.get("rewards") or ()
    if not scores:
        return ""
    shown = (f"{s['name']} {signed(s['value'])} on turn {s['turn']}, to {s['to']}" for s in scores[:40])
    more = f"; {len(scores) - 40} more" if len(scores) > 40 else ""
    return f'<p class="rewards">rewards: {text("; ".join(shown))}{more}</p>'


def _chat(row: Row, roles: Mapping[str, int], limit: int) -> str:
    items = "".join(f"<li>{_turn(row, t, roles, limit)}</li>" for t in row["turns"])
    return f'<ol class="turns">{items}</ol>'


def _tree(row: Row, roles: Mapping[str, int], limit: int) -> str:
    """Turns below the (first) turn they answer; a line of single answers stays on one level."""
    turns = row["turns"]
    first = {}
    for k, turn in enumerate(turns):
        first.setdefault(turn.get("id"), k)
    children: dict[int, list[int]] = {-1: []}
    for k, turn in enumerate(turns):
        parent = next((first[p] for p in turn.get("parents") or () if first.get(p, k) < k), -1)
        children.setdefault(parent, []).append(k)
    return _level(row, children[-1], children, roles, limit, 0)


def _level(
    row: Row,
    here: Sequence[int],
    children: Mapping[int, Sequence[int]],
    roles: Mapping[str, int],
    limit: int,
    depth: int,
) -> str:
    items = []
    for k in here:
        parts = [_turn(row, row["turns"][k], roles, limit)]
        below = children.get(k, ())
        while len(below) == 1 or (below and depth >= NESTED):
            parts.append(_turn(row, row["turns"][below[0]], roles, limit))
            below = [*children.get(below[0], ()), *below[1:]]
        nested = _level(row, below, children, roles, limit, depth + 1) if below else ""
        items.append(f"<li>{''.join(parts)}{nested}</li>")
    return f'<ul class="branches">{"".join(items)}</ul>'


def _turn(row: Row, turn: Row, roles: Mapping[str, int], limit: int) -> str:
    said, _ = shortened(str(turn.get("text", "")), limit)
    graded = turn.get("id") == row.get("graded")
    seen = ""
    if "shown" in turn and turn["shown"] != turn.get("text"):
        seen = fold("what the others saw", f'<pre class="say">{text(shortened(str(turn["shown"]), limit)[0])}</pre>')
    silent = '<span class="void">(nothing)</span>'
    return (
        f'<section class="turn r{roles[turn["role"]] % 6}{" graded" if graded else ""}"><div class="meta">'
        f"<b>{text(first_line(turn['role'], 60))}</b> {' '.join(_notes(turn, graded))}</div>"
        f'<pre class="say">{text(said) if said.strip() else silent}</pre>{seen}{_tokens(turn)}</section>'
    )


def _notes(turn: Row, graded: bool) -> list[str]:
    notes = [f"turn {turn.get('id')}"]
    if turn.get("parents"):
        notes.append(f"answers {', '.join(map(str, turn['parents']))}")
    tokens = turn.get("tokens") or 0
    notes.append(f"{tokens:,} token{'s' * (tokens != 1)}")
    if turn.get("round"):
        notes.append(f"round {turn['round'] + 1}")
    plain = [f"<span>{text(note)}</span>" for note in notes]
    if turn.get("finish_reason") == "length":
        plain.append('<span class="badge warn">cut at the limit</span>')
    if graded:
        plain.append('<span class="badge plain">graded</span>')
    for name in ("verdict", "value", "label"):
        if turn.get(name) is not None:
            plain.append(f'<span class="figure">{name} <b>{text(_short(turn[name]))}</b></span>')
    if turn.get("return") is not None:
        plain.append(f'<span class="figure">return <b>{signed(turn["return"])}</b></span>')
    if turn.get("advantage") is not None:
        plain.append(f'<span class="figure">advantage <b>{_advantage(turn["advantage"])}</b></span>')
    if turn.get("logprobs"):
        mean = math.fsum(turn["logprobs"]) / len(turn["logprobs"])
        plain.append(f'<span class="figure">mean log-prob <b>{mean:.3g}</b></span>')
    return plain


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _advantage(value: float | Sequence[float]) -> str:
    if isinstance(value, int | float):
        return signed(value)
    low, high = (min(value), max(value)) if value else (0.0, 0.0)
    return signed(low) if high - low < 1e-9 else f"{signed(low)} to {signed(high)}"


def _tokens(turn: Row) -> str:
    """The sampled tokens one by one, darker the less likely; empty where the run did not record them."""
    pieces, logprobs = turn.get("pieces"), turn.get("logprobs")
    if not pieces or not logprobs:
        return ""
    each = turn.get("advantage")
    spans = []
    for k, (piece, logprob) in enumerate(zip(pieces[:TOKENS], logprobs)):
        told = f"log-prob {logprob:.3f}, p {math.exp(min(logprob, 0.0)):.3f}"
        if isinstance(each, list) and k < len(each):
            told += f", advantage {signed(each[k])}"
        shown = text(piece).replace("\n", "\u21b5\n") or "\u2205"
        spans.append(f'<span class="p{_rarity(logprob)}" title="{told}">{shown}</span>')
    more = f"<i>and {len(pieces) - TOKENS:,} more</i>" if len(pieces) > TOKENS else ""
    return fold(f"{len(pieces)} tokens with log-probs", f'<pre class="tokens">{"".join(spans)}</pre>{more}')


def _rarity(logprob: float) -> int:
    """0 for what was nearly certain (p > 0.9) to 4 for p < 0.05."""
    return sum(logprob < math.log(p) for p in (0.9, 0.5, 0.2, 0.05))


def line(row: Row) -> str:
    """One episode in a list: its badges and the beginning of its question."""
    return f"{badges(row)} <span>{text(first_line(str(row.get('question', ''))))}</span>"
