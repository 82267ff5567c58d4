"""MALT's labels, rows and pairs against numbers worked on paper (spec/malt.md sections 2, 3 and 9)."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from fractions import Fraction as F

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cothink.credit import scored
from cothink.estimators import dr_grpo
from cothink.trees import Grade, Tree
from cothink.trees.card import card, good_chance, markdown
from cothink.trees.choice import choose, difficulties, per_task
from cothink.trees.labels import Rules, groups, shape
from cothink.trees.rows import pair_rows, sft_rows, told
from cothink.types import Completion, Episode, Finish, Score, Task, Turn

ROLES = ("generator", "verifier", "refiner")
FIGURE_1 = [[[1, 1, 0], [1, 0, 0], [0, 1, 1]], [[0, 0, 1], [0, 0, 0], [0, 1, 0]], [[1, 0, 1], [0, 0, 0], [1, 1, 1]]]
PAPER = Rules()
N2 = [[[1, 1], [1, 0]], [[0, 1], [0, 0]]]


def tree(leaves, task="gsm8k/train/0", texts=None, stops=None, roles=ROLES, **facts):
    """A tree whose leaves are 1, 0 or None (no turn); texts by index path, distinct where nothing is said."""
    turns, grades, stops, texts = [], {}, stops or {}, texts or {}

    def grow(part, path, prompt):
        depth = len(path)
        for k, child in enumerate(part):
            if child is None:
                continue
            at = f"{path}{k}"
            text = texts.get(at, f"says {at}")
            done = Completion(text, prompt, tuple(map(ord, text)), (0.0,) * len(text), stops.get(at, "stop"))
            turns.append(Turn(at, (path,) if path else (), roles[depth], roles[depth], done, text))
            if isinstance(child, list):
                grow(child, at, (*prompt, 0, *done.output_ids))
            else:
                grades[at] = Grade("right" if child else "wrong", str(child))

    grow(leaves, "", tuple(map(ord, task)))
    episode = Episode(f"{task}#0", Task(task, "q", "1"), tuple(turns), Finish("finished", ""))
    return Tree(episode, grades, **facts)


def made(leaves, rules=PAPER, **options):
    found = groups([tree(leaves, **options)], rules)
    return found, {m.turn.id: m for g in found for m in g.members}


def counts(found, rules=PAPER):
    each = {role: [g for g in found if g.role == role] for role in ROLES}
    return [
        [len(rows(g)) for g in each.values()]
        for rows in (
            lambda g: pair_rows(g, rules),
            lambda g: sft_rows(g, rules, "all_positive"),
            lambda g: sft_rows(g, rules, "chosen_of_pairs"),
        )
    ]


def test_the_papers_tree():
    """malt §10 rows 10, 11, 15: O1, exact values, labels and both counts of examples."""
    found, by_id = made(FIGURE_1)
    assert [by_id[k].value for k in "012"] == [F(5, 9), F(2, 9), F(5, 9)]
    assert [by_id[k].pair for k in ("0", "1", "01", "22")] == [(5, 9), (2, 9), (1, 3), (3, 3)]
    assert [by_id[k].good for k in "012"] == [True, False, True]
    assert [by_id[f"{g}{v}"].good for g in range(3) for v in range(3)] == [True, False, True, *[False] * 3, True, False,
                                                                          True]  # fmt: skip
    assert counts(found) == [[2, 4, 12], [2, 4, 12], [2, 4, 9]]


def test_two_by_two_by_two():
    """malt §10 row 15: O2, where exactly half is bad."""
    found, by_id = made(N2)
    assert [by_id[k].value for k in ("00", "01", "10", "11", "0", "1")] == [1, F(1, 2), F(1, 2), 0, F(3, 4), F(1, 4)]
    assert [by_id[k].good for k in ("0", "1", "00", "01", "10", "11")] == [True, False, True, False, False, False]
    assert counts(found) == [[1, 1, 2], [1, 1, 4], [1, 1, 2]]


@pytest.mark.parametrize(
    ("leaves", "pair", "good"),
    [
        ([[[1, 0]]], (1, 2), False), ([[[1, 1, 0]]], (2, 3), True), ([[[1, 1, 1], [1, 0, 0], [0] * 3]], (4, 9), False),
        ([[[1, 1, 1], [1, 1, 0], [0] * 3]], (5, 9), True), ([[[1, 1, 0, 0]]], (2, 4), False),
        ([[[1, 1, 1, 0]]], (3, 4), True), ([[[1] * k + [0] * (6 - k) for k in (0, 0, 3, 5, 5, 5)]], (18, 36), False),
    ],
)  # fmt: skip
def test_the_threshold_is_strict_and_exact(leaves, pair, good):
    """malt §10 row 11: O3, with the case where a float mean of means is above one half."""
    _, by_id = made(leaves)
    assert (by_id["0"].pair, by_id["0"].good) == (pair, good)


def test_theta_is_read_from_its_decimals_and_local_pooling_differs_in_six_patterns():
    """malt §10 row 11: O4."""
    _, by_id = made([[[1, 1, 0]]], Rules(theta="0.7"))
    assert by_id["0"].good is False
    wrong = []
    for pattern in itertools.product(range(4), repeat=3):
        leaves = [[[1] * k + [0] * (3 - k) for k in pattern]]
        (one, two) = (made(leaves, Rules(pooling=pooling))[1] for pooling in ("global", "local"))
        assert all(one[v].good == two[v].good for v in ("00", "01", "02")) and one["0"].value == two["0"].value
        wrong += [(pattern, one["0"].good)] if one["0"].good != two["0"].good else []
    assert len(wrong) == 6
    assert {(tuple(sorted(p)), g) for p, g in wrong} == {((1, 1, 3), True), ((0, 2, 2), False)}


def test_a_hole_is_not_a_zero():
    """malt §10 row 13: O5; what stopped on length may be rejected and never chosen."""
    _, by_id = made([[[1, 1, 1], [0, None, None], [None] * 3]])
    assert (by_id["0"].value, by_id["0"].good, by_id["0"].pair) == (F(1, 2), False, (1, 2))
    assert by_id["01"].good is None and by_id["02"].value is None  # one of three leaves: no label of its own
    _, by_id = made([[[1, 1, 0], [1, 0, None]]])
    assert (by_id["0"].value, by_id["0"].pair, by_id["0"].leaves) == (F(7, 12), (7, 12), 5)
    _, by_id = made([[[None], [None]], [[1], [1]]])
    assert by_id["0"].value is None and by_id["0"].good is None and by_id["1"].good is True
    strict = Rules(complete_only=True)
    _, by_id = made([[[1, 1, 0], [1, 1, None], [1, 1, 1]]], strict)
    assert [by_id[k].good for k in ("0", "00", "01")] == [None, True, None]
    found, _ = made(FIGURE_1, stops={"0": "length", "000": "length", "002": "length"})
    refined = [g for g in found if g.role == "refiner"]
    assert len(pair_rows(found[:1], Rules())) == 1 and len(sft_rows(found[:1], Rules())) == 1
    assert len(pair_rows(refined, Rules())) == 11 and len(sft_rows(refined, Rules())) == 11


def test_equal_texts_are_one():
    """malt §10 row 14: O6; the parent's value keeps the draws."""
    same = {"00": "no.", "01": " no.\n"}
    cases = (([1, 1, 0], [0, 0, 0], (2, 6)), ([1, 1, 0], [1, 0, 0], (3, 6)))
    for one, two, pair in cases:
        found, by_id = made([[one, two]], texts=same)
        (verified,) = (g for g in found if g.role == "verifier")
        (member,) = verified.members
        assert (member.pair, member.good, member.copies) == (pair, False, 2)
        assert by_id["0"].value == F(sum(one + two), 6) and pair_rows([verified], Rules()) == []
    found, _ = made([[[1, 1, 0], [1, 0, 0]]], texts={"00": "no.", "01": "no."})
    (refined,) = (g for g in found if g.role == "refiner")  # children of equal parents are siblings
    assert len(refined.members) == 6
    kept, _ = made([[cases[0][0], cases[0][1]]], Rules(duplicates="none"), texts=same)
    assert counts(kept)[0] == [0, 1, 2]  # the literal paper sets: a copy is preferred to itself
    dropped, _ = made([[*cases[0][:2], [1, 1, 1]]], Rules(duplicates="drop_contradictory"), texts=same)
    assert [m.turn.id for g in dropped if g.role == "verifier" for m in g.members] == ["02"]


def test_a_copy_that_ended_speaks_for_one_that_was_cut_off():
    found, _ = made([[[1, 1, 0], [1, 1, 1]]], texts={"00": "no.", "01": "no."}, stops={"00": "length"})
    (row,) = sft_rows([g for g in found if g.role == "verifier"], Rules())
    assert row.sides[0].turn == "01" and row.sides[0].value == (5, 6)


def test_the_hinge():
    """malt §10 rows 10 and 35: O7; node values are returns, the siblings' mean is the baseline, sums are 0."""
    one = tree(FIGURE_1)
    rewards = tuple(Score(t, "answer.base", float(g.verdict == "right"), "team") for t, g in one.grades.items())
    rows = scored([replace(one.episode, rewards=rewards)])
    found = dict(zip((r.turn for r in rows), dr_grpo(rows, scope="prefix"), strict=True))
    assert [found[k] for k in "012"] == pytest.approx([1 / 9, -2 / 9, 1 / 9])
    for parents in ("0", "1", "2", "00", "12"):
        assert sum(found[f"{parents}{k}"] for k in range(3)) == pytest.approx(0)


def test_own_answers_in_place_of_subtrees():
    """The ablation that the paper lacks: a wrong answer that the refiners mend is good by its subtree only."""
    one = tree([[[1, 1], [1, 1]], [[0, 0], [0, 1]]])
    grades = {**one.grades, "0": Grade("wrong"), "1": Grade("right"), "00": Grade("unparsable"), "10": Grade("right")}
    one = replace(one, grades=grades)
    own = {m.turn.id: m for g in groups([one], Rules(value="own")) for m in g.members}
    assert [own[k].good for k in ("0", "1", "00", "10", "01", "000")] == [False, True, False, True, None, True]
    assert own["1"].pair == (1, 1)
    assert {m.turn.id: m.good for g in groups([one], Rules()) for m in g.members if g.depth == 0} == {
        "0": True, "1": False,
    }  # fmt: skip
    facts = card([one], Rules())["roles"]["generator"]
    assert (facts["right_but_bad"], facts["wrong_but_good"]) == (1, 1)


def test_custom_scores_stay_floats():
    one = tree([[[1, 0]], [[0, 0]]])
    scores = (Score("000", "style", 0.25), Score("000", "style", 0.5), Score("001", "style", 0.5))
    one = replace(one, episode=replace(one.episode, rewards=scores))
    by_id = {m.turn.id: m for g in groups([one], Rules()) for m in g.members}
    assert by_id["0"].pair == (0.625, 1) and by_id["0"].good is True


def test_four_ways_to_pair():
    """malt §10 row 17."""
    found, _ = made(FIGURE_1)
    verified = [g for g in found if g.role == "verifier"]
    assert len(pair_rows(verified, Rules())) == 4
    one = pair_rows(verified, Rules(), "one_random", seed=3)
    assert len(one) == 2 and one == pair_rows(verified, Rules(), "one_random", seed=3)
    widest = pair_rows(verified, Rules(), "max_margin")
    assert [[s.turn for s in row.sides] for row in widest] == [["00", "01"], ["22", "21"]]
    assert len(pair_rows(verified, Rules(), "min_gap", min_gap="2/3")) == 2
    assert len(pair_rows(verified, Rules(), "min_gap", min_gap="1/3")) == 4


FIELDS = """row_id kind task_id dataset split role policy round episode_id parent_turn_ids turn_ids prompt_template_hash
prompt_ids completion_ids loss_mask texts labels values scored_leaves copies_merged theta pooling duplicates sft_source
pair_policy parsed_answers stop_reasons base_model weights_version sampling config_hash"""


def test_a_row_says_where_it_came_from():
    """malt §10 row 18: all fields, and the way from the question to the row in words."""
    origin = {"verifier": {"prompt_template_hash": "h", "base_model": "b", "sampling": {"seed": 1}, "config_hash": "c"}}
    found = groups([tree(FIGURE_1, origin=origin, round=1)], Rules())
    row, *_ = pair_rows([g for g in found if g.role == "verifier"], Rules())
    plain = json.loads(json.dumps(row.json()))
    assert plain.keys() >= set(FIELDS.split()) and plain["dataset"] == "gsm8k" and plain["round"] == 1
    assert (
        plain["turn_ids"] == ["00", "01"] and plain["parent_turn_ids"] == ["0"] and plain["values"] == [[2, 3], [1, 3]]
    )
    assert plain["loss_mask"][0] == [0] * len(row.prompt_ids) + [1] * 7
    words = list(told(row))
    assert words[1:] == ["  generator (0): says 0", "  verifier (00), good at 2/3: says 00",
                         "  verifier (01), bad at 1/3: says 01"]  # fmt: skip
    chosen, rejected = row.samples()
    assert chosen.unit == rejected.unit == row.row_id and chosen.trained == 7
    assert chosen.ids[: -chosen.trained] == rejected.ids[: -rejected.trained] == row.prompt_ids
    ids = [r.row_id for r in (*pair_rows(found, Rules()), *sft_rows(found, Rules()))]
    assert len(set(ids)) == len(ids)


def many(count):
    """Tasks with 1 to 12 refiner pairs each."""
    shapes = [FIGURE_1, N2, [[[1, 0]]], [[[1, 1], [0, 1]]]]
    return [tree(shapes[k % 4], f"t/{k}") for k in range(count)]


def test_rows_are_taken_round_robin_and_seed_stable():
    """malt §10 row 17: nobody gives a second row before all gave one; parents rotate; caps hold."""
    found = groups(many(10), Rules())
    rows = pair_rows([g for g in found if g.role == "refiner"], Rules())
    got = choose(rows, most=25, seed=1)
    assert got == choose(list(reversed(rows)), most=25, seed=1) != choose(rows, most=25, seed=2)
    given_ = {t: [r.task_id for r in rows].count(t) for t in {r.task_id for r in rows}}
    taken = {t: [r.task_id for r in got].count(t) for t in given_}
    level = max(taken.values())
    assert len(got) == 25 and all(n >= min(level - 1, given_[t]) for t, n in taken.items())
    first = [r.group for r in got if r.task_id == "t/0"]
    assert len(set(first)) == len(first)  # seven parents of this task have pairs; it gives at most that many
    assert max([r.task_id for r in choose(rows, each=2)].count(t) for t in given_) == 2
    assert len(choose(rows, most=None)) == len(rows) and len(choose(rows, most=7, balance="none")) == 7
    hard = choose(rows, most=None, balance="difficulty", difficulty=difficulties(found))
    order = sorted(given_, key=lambda t: (difficulties(found)[t], t))
    thirds = [order[:3], order[3:7], order[7:]]
    assert len({sum(r.task_id in third for r in hard) for third in thirds}) == 1 and hard
    assert [per_task("default", role) for role in ROLES] == [2, 4, 4]
    assert [per_task({"verifier": 3}, role) for role in ROLES] == [None, 3, None] and per_task(None, "refiner") is None


def test_the_card():
    """malt §10 rows 15, 34: both counts of examples, shares, duplicates, noise; a cold sampler is warned about."""
    trees = [tree(FIGURE_1), tree(N2, "t/1", texts={"00": "x", "01": "x", "10": "x", "11": "x", "0": "y", "1": "y"})]
    facts = card(trees, Rules())
    assert facts["branching"] == [3, 3, 3] and facts["complete_trees"] == 1
    generator, verifier, refiner = (facts["roles"][role] for role in ROLES)
    assert [generator[k] for k in ("turns", "good", "bad", "duplicates", "contradictory_texts")] == [5, 3, 2, 1, 1]
    assert verifier["duplicates"] == 3 - 1 and refiner["label_noise"] is None and 0 < verifier["label_noise"] < 0.5
    assert (generator["examples_all_positive"], generator["examples_chosen_of_pairs"]) == (2, 2)
    page = markdown(facts)
    assert "| good | 3 | 5 | 16 |" in page and "| answers right |" in page
    cold = card([trees[1]], Rules())
    assert any("repeat a sibling" in w for w in cold["warnings"])


def test_the_noise_of_a_label():
    """Spec section 2.7: chance of the label good for a true value p."""
    for leaves, row in ((3, [0.22, 0.35, 0.50, 0.65, 0.78, 0.90]), (9, [0.10, 0.27, 0.50, 0.73, 0.90, 0.98])):
        assert [round(good_chance(p / 10, leaves), 2) for p in range(3, 9)] == row


leaf = st.sampled_from([0, 1, 1, None])
forest = st.lists(
    st.lists(st.lists(st.lists(leaf, min_size=1, max_size=3), min_size=1, max_size=3), min_size=1, max_size=3),
    min_size=1,
    max_size=2,
)
words = st.sampled_from(["a", " a", "b", "b\n", "c"])


@settings(max_examples=60, deadline=None)
@given(forest, st.data(), st.sampled_from(["merge", "drop_contradictory", "none"]))
def test_pairs_are_lawful(shapes, data, duplicates):
    """malt §10 rows 14 and 16: one role and prompt, one parent unless merged, sum h(n - h), no text on both sides."""
    paths = ["".join(p) for size in (1, 2, 3) for p in itertools.product("012", repeat=size)]
    trees = []
    for k, leaves in enumerate(shapes):
        texts = {p: data.draw(words) for p in paths[:12]}
        one = tree(leaves, f"t/{k}", texts=texts)
        # The grade of a refinement is a function of its text.
        fixed = {i: replace(g, verdict="right") if g.verdict == "right" else g for i, g in one.grades.items()}
        by_text = {t.completion.text.strip(): t.id for t in reversed(one.episode.turns) if t.id in fixed}
        grades = {t.id: fixed[by_text[t.completion.text.strip()]] for t in one.episode.turns if t.id in fixed}
        trees.append(replace(one, grades=grades))
    rules = Rules(duplicates=duplicates)
    found = groups(trees, rules)
    rows = pair_rows(found, rules)
    assert len(rows) == sum(
        sum(m.good is True for m in g.members) * sum(m.good is False for m in g.members) for g in found
    )
    turns = {(t.episode.id, turn.id): turn for t in trees for turn in t.episode.turns}
    for row in rows:
        one, two = (turns[row.episode_id, side.turn] for side in row.sides)
        assert one.role == two.role == row.role
        assert one.completion.prompt_ids == two.completion.prompt_ids == row.prompt_ids
        assert duplicates == "merge" or one.parents == two.parents
    if duplicates != "none":
        for group in found:
            labels = {}
            for m in group.members:
                labels.setdefault(m.turn.completion.text.strip(), set()).add(m.good)
            assert all(not {True, False} <= seen for seen in labels.values())
        texts = [(r.group, *(s.text.strip() for s in r.sides)) for r in rows]
        assert not {(g, a, b) for g, a, b in texts} & {(g, b, a) for g, a, b in texts}
    for group in found:
        assert math.prod(shape(trees)) >= 1 and all(m.copies >= 1 for m in group.members)
