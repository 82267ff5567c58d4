"""Sources of examples: the public dialogues with every known defect, your own files, generated chats."""

from __future__ import annotations

import json

import pytest

from cothink.conversations import NotHere, dialogues, files, overlap, wordsums
from cothink.conversations.dialogues import META, REASONING, Dialogue, repaired, stored, views
from cothink.tasks import DataError, math
from cothink.types import Role
from cothink.workflows.rema import MULTI

TEAM = {name: Role(name, "main", MULTI[name]) for name in ("meta", "reasoning")}


@pytest.fixture(scope="module")
def public(data_root):
    return dialogues.load(TEAM, path=str(data_root / "cold_start"))


def test_the_public_dialogues_have_exactly_the_known_defects(public, data_root):
    """rema §6.3, §7 row 35."""
    counts = public.counts
    assert len(public) == 2 * 804 and counts["dialogues"] == 804
    assert counts["rounds"] / 804 == pytest.approx(8.24, abs=0.005)
    rounds = [sum(m.role == "assistant" for m in c.messages) for c in public]
    assert (min(rounds), max(rounds), max(set(rounds), key=rounds.count)) == (2, 30, 7)
    assert counts["tag_missing"] == 207  # so 597 hold it
    assert counts["tag_misplaced"] == 4  # 2 at the start, 2 inside a bracket; 593 at the end
    assert counts["tag_by_reasoning"] == counts["other_prompt"] == 804
    assert counts["leak"] == 47 and counts["unboxed"] == 5 and counts["tag_early"] == 0
    # Seven dialogues speak of a box before their end; one of them only in words.
    assert counts["early_box"] + counts["early_box_named"] == 7 and counts["early_box"] == 6
    read = [d for d, _ in dialogues.read(data_root / "cold_start")]
    assert [k for k, d in enumerate(read) if "unboxed" in repaired(d)[1]] == [33, 71, 257, 594, 694]


def test_every_repaired_dialogue_ends_with_metas_tag_and_has_the_teams_prompts(public):
    """rema §7 row 35: the tag ends up on the last meta turn, both views carry the RL prompts."""
    for view in public:
        system, *rest = view.messages
        assert system.content == MULTI[view.role]
        own = [m.content for m in rest if m.role == "assistant"]
        heard = [m.content for m in rest if m.role == "user"]
        if view.role == "meta":
            assert own[-1].endswith("[FINISH]") and not any("[FINISH]" in text for text in (*own[:-1], *heard))
        else:
            assert heard[-1].endswith("[FINISH]") and not any("[FINISH]" in text for text in (*own, *heard[:-1]))
            assert heard[0].startswith(f"Question:\n{view.question}\n\nInstruction:\n")
    by_id = {(view.id, view.role): view for view in public}
    assert len(by_id) == len(public)
    texts = {k: by_id[f"dialogues/{k}", "meta"].messages[-1].content[-40:] for k in (3, 551, 395)}
    assert texts[3].endswith("Therefore, the final answer is. [FINISH]")  # was \([FINISH]\).
    assert texts[551].endswith("ordered pairs is 231. [FINISH]")  # the tag stood first
    assert texts[395] == "[FINISH]"


def test_overlap_of_the_public_dialogues_with_the_mathematics_sets(public):
    """rema §6.3, §7 row 37: 274 with the 8k training set, 5 with the 133, none with the tests."""
    found = {split: len(overlap(public, math.load(split))) for split in ("train", "minimal", "test", "overall")}
    assert found == {"train": 274, "minimal": 5, "test": 0, "overall": 0}


def test_dialogues_that_leak_or_lack_a_box_can_be_left_out(data_root):
    found = dialogues.load(TEAM, path=str(data_root / "cold_start"), drop=["leak", "unboxed"])
    assert found.counts["dropped"] == 804 - len(found) // 2 == 52
    assert any("left out" in note for note in found.notes)


@pytest.mark.parametrize(
    ("last", "kept", "fact"),
    [
        ("Done. [FINISH]", "Done. [FINISH]", None),
        ("Done.\n[FINISH]", "Done.\n[FINISH]", None),
        ("Done.", "Done. [FINISH]", "tag_missing"),
        ("[FINISH] Done.", "Done. [FINISH]", "tag_misplaced"),
        ("It is \\([FINISH]\\).", "It is. [FINISH]", "tag_misplaced"),
        ("[FINISH]", "[FINISH]", None),
        ("[FINISH] so [FINISH]", "so [FINISH]", None),
    ],
)
def test_the_tag_is_put_at_the_end_of_the_last_meta_turn(last, kept, fact):
    raw = Dialogue("d", "q", (("go [FINISH]", "x"), (last, "\\boxed{1} [FINISH]")))
    found, facts = repaired(raw)
    assert found.rounds == (("go", "x"), (kept, "\\boxed{1}"))
    assert facts - {"tag_early", "tag_by_reasoning"} == ({fact} if fact else set())


def write(folder, made):
    for name, role in ((META, 0), (REASONING, 1)):
        rows = [json.dumps(stored(views(d, *TEAM.values())[role])) for d in made]
        (folder / name).write_text("".join(row + "\n" for row in rows))


def test_what_is_stored_is_read_back_and_pairs_are_checked(tmp_path):
    made = [Dialogue(f"dialogues/{k}", f"q{k}", (("a", "b"), ("c [FINISH]", "\\boxed{1}"))) for k in range(3)]
    write(tmp_path, made)
    assert [d for d, _ in dialogues.read(tmp_path)] == made
    assert [c.role for c in dialogues.load({"meta": TEAM["meta"]}, path=str(tmp_path))] == ["meta"] * 3
    right = (tmp_path / REASONING).read_text().splitlines()
    (tmp_path / REASONING).write_text("\n".join([right[1], right[0], right[2]]))
    with pytest.raises(DataError, match="row 0: the two files do not tell the same dialogue"):
        dialogues.load(TEAM, path=str(tmp_path))
    (tmp_path / REASONING).write_text(right[0])
    with pytest.raises(DataError, match=r"3 rows and reasoning\.jsonl 1"):
        dialogues.load(TEAM, path=str(tmp_path))
    (tmp_path / REASONING).write_text('{"text": 1}\n' * 3)
    with pytest.raises(DataError, match=r"reasoning.jsonl, row 0: not a dialogue; write history"):
        dialogues.load(TEAM, path=str(tmp_path))
    (tmp_path / REASONING).unlink()
    with pytest.raises(NotHere, match=r"no reasoning.jsonl in .*; write path:"):
        dialogues.load(TEAM, path=str(tmp_path))
    with pytest.raises(DataError, match="no role 'meta' or 'reasoning' to teach, only solver"):
        dialogues.load({"solver": Role("solver", "main")}, path=str(tmp_path))


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_files_in_trls_shapes_and_rows_that_are_left_out(tmp_path):
    chat = [
        {"role": "system", "content": "old"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    path = lines(
        tmp_path / "rows.jsonl",
        {"role": "meta", "messages": chat, "question": "q?", "id": "7"},
        {"role": "meta", "prompt": chat[:2], "completion": chat[2:]},
        {"role": "reasoning", "prompt": "q", "completion": "a"},
        {"role": "judge", "prompt": "q", "completion": "a"},
        {"role": "meta", "prompt": "q"},
        {"role": "meta", "prompt": "q", "completion": " "},
        {"prompt": "q", "completion": "a"},
    )
    found = files.load(TEAM, path=path)
    assert [(c.role, c.id, c.first) for c in found] == [
        ("meta", "7", 0),
        ("meta", "rows/1", 2),
        ("reasoning", "rows/2", 2),
    ]
    assert {c.messages[0].content for c in found} == set(MULTI.values()) and found[0].question == "q?"
    assert found.counts == {"rows": 3, "refused": 4} and len(found.notes) == 4
    kept = files.load(TEAM, path=path, system="file")
    assert [c.messages[0].content for c in kept] == ["old", "old", "q"] and [c.first for c in kept] == [0, 2, 1]
    bare = {name: Role(name, "main") for name in TEAM}
    assert [c.first for c in files.load(bare, path=path)] == [0, 1, 1]
    apart = files.load(TEAM, path={"reasoning": lines(tmp_path / "b.jsonl", {"prompt": "q", "completion": "a"})})
    assert [c.role for c in apart] == ["reasoning"]
    with pytest.raises(DataError, match=r"no usable row in .*; 1 rows left out: role 'judge' is not in the team"):
        files.load(TEAM, path=lines(tmp_path / "c.jsonl", {"role": "judge", "messages": chat}))
    with pytest.raises(NotHere, match=r"no file nowhere\.jsonl"):
        files.load(TEAM, path="nowhere.jsonl")
    with pytest.raises(DataError, match="path names the role 'mety'; the team has meta, reasoning"):
        files.load(TEAM, path={"mety": path})


def test_generated_chats_tell_both_sides_of_one_dialogue():
    team = {"meta": Role("meta", "p", "Guide."), "reasoning": Role("reasoning", "p", "Follow.")}
    found = wordsums.load(team, count=20, levels=3)
    meta, reasoning = ([c for c in found if c.role == role] for role in team)
    for mine, theirs in zip(meta, reasoning, strict=True):
        assert mine.question == theirs.question and mine.messages[0].content == "Guide."
        assert [m.content for m in mine.messages[2::2]][1:] == [m.content for m in theirs.messages[1::2]][1:]
        assert mine.messages[-1].content.endswith("[FINISH]") and "\\boxed" in theirs.messages[-1].content
    one = wordsums.load({"planner": Role("planner", "p", "")}, count=2, seats={"planner": "meta"})
    assert [m.role for m in one[0].messages] == ["user", "assistant"]
    with pytest.raises(DataError, match="what does the role 'x' do"):
        wordsums.load({"x": Role("x", "p", "Say.")}, count=2)
