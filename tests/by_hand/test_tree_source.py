"""Trees as a data source of sft and dpo stages: options, rounds, holes in the data, epochs (malt §3, §4.3, §4.4)."""

from __future__ import annotations

import pytest
from test_trees import FIGURE_1, N2, ROLES, tree

from cothink import store
from cothink.conversations import NotHere
from cothink.conversations.tree import load, pages, pairs
from cothink.credit import returns
from cothink.sft_rules import passes
from cothink.tasks import DataError
from cothink.types import Completion, Role, Turn

TEAM = {name: Role(name, name) for name in ROLES}


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Two collections: the paper's figure in round 0, the n = 2 tree in round 1."""
    made = {"one": [tree(FIGURE_1)], "two": [tree(N2, "gsm8k/train/1", round=1)]}
    for name in made:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(store, "load", lambda folder: made[folder.rpartition("/")[2]])
    return [str(tmp_path / name) for name in made]


def count(rows):
    return [sum(row.role == role for row in rows) for role in ROLES]


NO_CAPS = {"max_rows_per_task": None}


def test_the_last_collection_counts_or_all_of_them(folders):
    """malt §10 rows 15 and 35: the oracles' counts through the source; a threshold of its own for each round."""
    one, two = folders
    assert count(load(TEAM, store=one, **NO_CAPS)) == [2, 4, 12] and count(pairs(TEAM, store=one, **NO_CAPS)) == [
        2,
        4,
        12,
    ]
    assert count(load(TEAM, store=one, sft_source="chosen_of_pairs", **NO_CAPS)) == [2, 4, 9]
    assert count(load(TEAM, store=folders, **NO_CAPS)) == [1, 1, 4]
    assert count(load(TEAM, store=folders, earlier=True, **NO_CAPS)) == [3, 5, 16]
    strict = load(TEAM, store=folders, earlier=True, theta_by_round=[0.7, 0.5], **NO_CAPS)
    assert count(strict) == [1, 2, 16]
    thetas = {(row["round"], row["theta"]) for row in strict.lineage.values()}
    assert thetas == {(0, "0.7"), (1, "0.5")}
    later = {row["theta"] for row in load(TEAM, store=two, theta_by_round=[0.1], **NO_CAPS).lineage.values()}
    assert later == {"0.1"}, "the last threshold is for all rounds after it"
    assert count(pairs(TEAM, store=one)) == [2, 4, 4], "the default caps: 2 of a task for G, 4 for V and R"


def test_the_card_of_a_source(folders):
    """malt §10 row 15: both counts on the card, and what is trained after the caps."""
    found = load(TEAM, store=folders[0])
    facts = found.facts["roles"]["refiner"]
    assert (facts["examples_all_positive"], facts["examples_chosen_of_pairs"], facts["trained_examples"]) == (12, 9, 4)
    assert facts["pairs"] == 12 and facts["trained_pairs"] == 0
    files = pages(found.facts, "Card")
    assert "| examples chosen of pairs | 2 | 4 | 9 |" in files["md"] and files.keys() == {"json", "md"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"theta": 0.4, "theta_by_round": [0.5]}, "theta does nothing beside theta_by_round"),
        ({"theta": 1.0}, "write numbers from 0 to below 1"),
        ({"theta_by_round": []}, "write numbers from 0 to below 1"),
        ({"min_scored_children": 0}, "it must be at least 1"),
        ({"value": "own", "pooling": "local"}, "do nothing for value: own"),
    ],
)
def test_options_that_contradict_one_another(folders, options, words):
    for source in (load, pairs):
        with pytest.raises(DataError, match=words):
            source(TEAM, store=folders, **options)


def test_a_role_without_rows_stops_the_run_with_its_name(folders, monkeypatch, tmp_path):
    """malt §10 row 26: the message names the role and how its labels lie."""
    monkeypatch.setattr(store, "load", lambda folder: [tree([[[0, 0], [0, 0]], [[0, 0], [0, 0]]])])
    with pytest.raises(DataError, match=r"no example for the role 'generator': of its 2 turns 0 are good, 2 bad"):
        load(TEAM, store=folders)
    with pytest.raises(DataError, match=r"no pair for the role 'verifier': of its 4 turns .* 0 of 2 prompts have both"):
        pairs({"verifier": TEAM["verifier"]}, store=folders)
    with pytest.raises(DataError, match="hold no turn of 'judge'; they hold generator, verifier, refiner"):
        load({"judge": Role("judge", "j")}, store=folders)
    with pytest.raises(NotHere, match="run the collect stage first, or write store: FOLDER"):
        load(TEAM, store=str(tmp_path / "nowhere"))
    with pytest.raises(NotHere, match="the recipe's own collect stage, which has not run yet"):
        load(TEAM)
    monkeypatch.setattr(store, "load", lambda folder: [])
    with pytest.raises(DataError, match="no tree is complete enough"):
        load(TEAM, store=folders)
    with pytest.raises(DataError, match="min_gap and min_gap: NUMBER go together"):
        pairs(TEAM, store=folders, min_gap=0.5)


def test_the_epoch_rule():
    """malt §10 row 26: O10, halves up."""
    rows = {500: 10, 1000: 10, 2000: 5, 4000: 3, 6000: 2, 6666: 2, 6667: 1, 20000: 1}
    assert {n: passes("auto", n) for n in rows} == rows
    assert passes(2.5, 7) == 2.5 and passes(None, 7) == 1


def test_a_chain_is_a_tree_too():
    """malt §10 row 10: O7, reward-to-go on a chain; None is no 0."""
    chain = [Turn(n, (p,) if p else (), n, n, Completion(""), "") for n, p in (("g", ""), ("v", "g"), ("r", "v"))]
    assert returns(chain, {"r": 1}) == {"g": 1, "v": 1, "r": 1}
    assert returns(chain, {"r": 1, "v": 0.25}) == {"g": 1.25, "v": 1.25, "r": 1}
    assert returns(chain, {}) == dict.fromkeys("gvr") and returns(chain, {"r": 0}) == dict.fromkeys("gvr", 0)
