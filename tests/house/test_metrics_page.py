"""docs/metrics.md names every key that real runs log, and no key that none does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import cothink
from cothink.signals import NAMES, SIGNALS

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
TABLES, _, SIGNALS_TABLE = PAGE.partition("### Signals")
WORDS = {"ROLE": "(?:meta|reasoning)", "POLICY": "(?:one|two)", "NAME": r"[\w.]+", "K": r"\d+"}
RARE = {
    "failed/NAME", "required_rounds", "early_finish", "watch", "watch/action", "POLICY/skipped_updates",
    "solo/accuracy", "solo/gain", "POLICY/offpolicy_fraction", "POLICY/ROLE/offpolicy_fraction",
    "action/NAME/level", "action/NAME/share", "action/NAME/count",
    "engine/workers_lost", "engine/asked_again", "engine/staleness",
    "POLICY/server_requests", "POLICY/server_retries", "POLICY/server_prompt_tokens", "POLICY/server_output_tokens",
    "POLICY/server_cost",
    "accuracy_low", "accuracy_high", "reward_low", "reward_high", "ROLE/reward_low", "ROLE/reward_high",
}  # fmt: skip
"""Keys of things that do not happen in these runs; other tests make them happen."""


def documented():
    cells = [line.split("|")[1] for line in TABLES.splitlines() if line.startswith("| `")]
    return [key for cell in cells for key in re.findall(r"`([^`]+)`", cell)]


def pattern(key):
    return re.sub("|".join(WORDS), lambda found: WORDS[found[0]], re.escape(key))


def logged(tmp_path, name, team, **stage):
    recipe = {
        "name": name,
        "output": str(tmp_path),
        "team": team,
        "policies": {p: {"model": "builtin:tiny", "learning_rate": 1e-4}
                     for p in {r["policy"] for r in team["roles"].values()}},
        "tasks": {"train": {"name": "wordsums", "levels": [1, 3], "count": 6},
                  "test": {"name": "wordsums", "split": "test", "count": 2}},
        "stages": [{"kind": "rl", "steps": 1, "tasks_per_step": 2, "episodes_per_task": 4, **stage}],
    }  # fmt: skip
    folder = cothink.run(recipe).folder
    return {key for line in (folder / "metrics.jsonl").read_text().splitlines() for key in json.loads(line)}


def team(turns, policies, prompts):
    seats = zip(("meta", "reasoning"), policies, prompts)
    return {
        "workflow": {"name": "rema", "max_turns": turns, "max_context": 400, "finish_tag": "[NEVER SAID]"},
        "roles": {role: {"policy": p, "system": system, "max_tokens": 12} for role, p, system in seats},
    }


def test_every_key_is_on_the_page_and_every_key_on_the_page_is_logged(tmp_path):
    """rema §4.5, §4.7, issue item 8: all figures per role, documented in one place."""
    multi = logged(
        tmp_path, "multi", team(3, ("one", "one"), ("Guide.", "Follow.")), updates_per_step=2, filter="none",
        evaluate={"every": 1}, curriculum={"start": 1}, kl_stop=None, unfinished="keep",
        influence={"every": 1, "episodes": 2},
    )  # fmt: skip
    single = logged(
        tmp_path, "single", team(1, ("one", "two"), ("Plan.", "Follow the plan.")), preset="rema_single",
        schedule={"filter_plays": 4}, filter={"low": 0.0, "high": 0.9},
    )  # fmt: skip
    keys, page = multi | single, documented()
    assert len(keys) > 90 and len(page) > 70 and len(set(page)) == len(page)
    patterns = {key: re.compile(pattern(key)) for key in page}
    unknown = sorted(k for k in keys if not any(p.fullmatch(k) for p in patterns.values()))
    assert not unknown
    never = {key for key, p in patterns.items() if not any(p.fullmatch(k) for k in keys)}
    assert never == RARE


def test_the_page_lists_the_signals():
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in SIGNALS_TABLE.splitlines() if line.startswith("| `")]
    assert [row[0].strip("`") for row in rows] == list(NAMES)
    for name, reads, warns, stops in rows:
        mine = [s for s in SIGNALS if s.name == name.strip("`")]
        for s in mine:
            assert s.key.format(role="ROLE", policy="POLICY") in reads
            ending = "" if s.warn is None or not s.back else "back if falling" if s.falling else "back"
            assert (re.search("back.*", warns) or [""])[0] == ending, name
            for limit, cell in ((s.warn, warns), (s.stop, stops)):
                if limit is not None and name.strip("`") != "mask_full":
                    assert float(limit) in [float(x) for x in re.findall(r"\d*\.?\d+", cell)], (name, limit, cell)
