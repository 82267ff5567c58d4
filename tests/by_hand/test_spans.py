"""Worked solutions cut into dialogues: every check of the splitter, and what a kill may cost."""

from __future__ import annotations

import asyncio
import json

import pytest

from cothink import splitter
from cothink.conversations import dialogues
from cothink.conversations.spans import cut, dialogue, parse, prompt
from cothink.engines.scripted import engine as scripted
from cothink.tasks import DataError
from cothink.types import Completion, PlayError, Role
from cothink.workflows.rema import MULTI

SOURCE = "Let me pair  the terms.\n\n1+4=5 and 2+3=5,\nso 10. That looks right.\nThe answer is \\boxed{10}."
TAGGED = (
    "Sure:\n<meta>Let me pair the terms.</meta> <reasoning>1+4=5 and 2+3=5, </reasoning><reasoning>so 10.</reasoning>"
    "<meta>That looks right. [FINISH]</meta>\n<reasoning>The answer is \\boxed{10}.</reasoning>"
)


def test_spans_are_parsed_merged_and_cut_from_the_source_itself():
    """rema §6.3: neighbours of one role merge; the slices have the source's own words and white space."""
    spans = parse(TAGGED)
    assert [voice for voice, _ in spans] == ["meta", "reasoning", "reasoning", "meta", "reasoning"]
    assert cut(SOURCE, spans) == [
        ("meta", "Let me pair  the terms."),
        ("reasoning", "1+4=5 and 2+3=5,\nso 10."),
        ("meta", "That looks right."),
        ("reasoning", "The answer is \\boxed{10}."),
    ]
    found = dialogue("k", "sum?", SOURCE, TAGGED)
    assert isinstance(found, dialogues.Dialogue) and found.rounds[-1] == (
        "That looks right. [FINISH]",
        "The answer is \\boxed{10}.",
    )


@pytest.mark.parametrize(
    ("tagged", "why"),
    [
        (TAGGED.replace("so 10.", "so ten."), "changed"),
        (TAGGED.replace("<reasoning>so 10.</reasoning>", ""), "changed"),
        (TAGGED.replace("so 10.</reasoning>", "so 10."), "changed"),
        (SOURCE, "no_spans"),
        ("<reasoning>" + SOURCE + "</reasoning>", "starts_with_reasoning"),
        ("<meta>" + SOURCE + "</meta>", "ends_with_meta"),
        (TAGGED.replace("</meta>\n<reasoning>The answer is \\boxed", " The answer is \\boxed"), "changed"),
        (
            "<meta>Let me pair the terms. 1+4=5 and 2+3=5, so 10. That looks right. The answer is \\boxed{10}</meta>"
            "<reasoning>.</reasoning>",
            "leak",
        ),
    ],
)
def test_a_copy_that_breaks_a_rule_makes_no_dialogue(tagged, why):
    assert dialogue("k", "q", SOURCE, tagged) == why


def test_a_cut_copy_and_an_answer_without_a_box_make_none():
    assert dialogue("k", "q", SOURCE, TAGGED, complete=False) == "cut"
    plain = TAGGED.replace("\\boxed{10}", "10")
    assert dialogue("k", "q", SOURCE.replace("\\boxed{10}", "10"), plain) == "unboxed"


def teacher(call):
    """Tags every solution as told by its number: 0 well, 1 with another word, 2 cut, 3 without a box."""
    text = call.messages[1].content
    number = int(text.partition("number ")[2][0])
    tagged = f"<meta>Work on number {number}.</meta><reasoning>It is \\boxed{{{number}}}.</reasoning>"
    if number == 3:
        tagged = tagged.replace(f"\\boxed{{{number}}}", "three")
    if number == 2:
        return Completion(tagged, finish_reason="length")
    return tagged.replace("Work", "Think") if number == 1 else tagged


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "solutions.jsonl"
    texts = [f"Work on number {k}. It is " + ("three." if k == 3 else f"\\boxed{{{k}}}.") for k in range(6)]
    rows = [{"problem": f"number {k}?", "solution": text} for k, text in enumerate([*texts, texts[0]])]
    rows[-1]["problem"] = "number 0?"  # said twice: asked once
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(source, out, engine, **options):
    work = splitter.items(source, None, None, None)
    return asyncio.run(splitter.split(work, out, engine, teacher="t", **options))


def test_a_split_writes_files_that_the_dialogues_source_reads(source, tmp_path):
    """rema §7 row 35: splitter output parsed and checked, tag on the last meta turn, both views with RL prompts."""
    engine, out = scripted(teacher), tmp_path / "out"
    report = run(source, out, engine)
    assert report == {"solutions": 6, "dialogues": 3, "rounds": 3, "dropped": {"cut": 1, "changed": 1, "unboxed": 1}}
    assert json.loads((out / "report.json").read_text()) == report
    assert engine.calls[0].messages == tuple(prompt("number 0?", "Work on number 0. It is \\boxed{0}."))
    assert engine.calls[0].sampling.temperature == 0
    team = {name: Role(name, "main", MULTI[name]) for name in ("meta", "reasoning")}
    found = dialogues.load(team, path=str(out))
    assert len(found) == 6 and all(found.counts[fact] == 0 for fact in dialogues.FACTS)
    assert [m.content for m in found[0].messages[1:]] == ["number 0?", "Work on number 0. [FINISH]"]
    assert found[1].messages[-1].content == "It is \\boxed{0}."
    assert next(splitter.sentences(report)) == "3 dialogues from 6 solutions, 1.0 rounds each"


def test_no_call_is_repeated_after_a_kill_and_the_result_is_the_same(source, tmp_path):
    whole = tmp_path / "whole"
    run(source, whole, scripted(teacher))
    out, calls = tmp_path / "out", []

    def dies(call):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(call)
        return teacher(call)

    with pytest.raises(KeyboardInterrupt):
        run(source, out, scripted(dies), concurrency=1)
    with (out / "answers.jsonl").open("a") as store:
        store.write('{"key": "half a li')  # what a kill in the middle of a write leaves
    rest = scripted(teacher)
    run(source, out, rest, concurrency=2)
    asked = [call.messages for call in calls] + [call.messages for call in rest.calls]
    assert len(calls) == len(rest.calls) == 3 and len(set(asked)) == 6
    for name in ("meta_thinking.jsonl", "reasoning.jsonl", "report.json"):
        assert (out / name).read_text() == (whole / name).read_text()


def test_a_server_that_fails_ends_the_split_and_keeps_what_came(source, tmp_path):
    class Refusal(Exception):
        status_code = 400

    def script(call):
        number = int(call.messages[1].content.partition("number ")[2][0])
        if number == 4:
            raise PlayError("too long") from Refusal()
        if number == 5 and not mended:
            raise PlayError("connection lost")
        return teacher(call)

    mended: list = []
    with pytest.raises(splitter.SplitError, match=r"connection lost\. 5 of 6 answers are kept: the same command"):
        run(source, tmp_path / "out", scripted(script), concurrency=1)
    mended.append(True)
    engine = scripted(script)
    report = run(source, tmp_path / "out", engine)
    assert len(engine.calls) == 1 and report["dropped"]["refused"] == 1  # a hopeless request is not sent again
    with pytest.raises(splitter.SplitError, match=r"another split \(max_tokens differ"):
        run(source, tmp_path / "out", engine, max_tokens=5)


def test_a_source_without_solutions_is_named(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_text('{"question": "q", "steps": "s"}\n')
    with pytest.raises(DataError, match="no text for the solution in a row with the columns question, steps; write"):
        splitter.items(path, None, None, None)
    assert splitter.items(path, None, "steps", None)[0].solution == "s"
    path.write_text("\n")
    with pytest.raises(DataError, match="has no rows"):
        splitter.items(path, None, None, None)
