"""The loaders: counts, golds and repairs of the real files, and the shapes of your own rows."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cothink.tasks import DataError, csqa, data_root, files, gsm8k, gym, math, overlap, report
from cothink.types import Task
from cothink.verify import check_golds, verify, verify_task

real = pytest.mark.skipif(not data_root().is_dir(), reason="no data folder: set COTHINK_DATA")


@real
def test_gsm8k():
    """malt §10 row 1: O15."""
    train, test = gsm8k.load(), gsm8k.load("test")
    assert (len(train), len(test), report(train)) == (7473, 1319, "")
    assert (train[0].id, train[0].answer, test[0].answer) == ("gsm8k/train/0", "72", "18")
    assert sum("," in task.answer for task in train) == 79 and sum("-" in task.answer for task in train) == 3
    assert not any("<<" in task.question + task.meta["solution"] for task in train)
    assert check_golds(train) == check_golds(test) == [] and overlap(train, test) == []


@real
def test_csqa():
    """malt §10 rows 1 and 9: O15, O16."""
    train, test = csqa.load(), csqa.load("test")
    assert (len(train), len(test)) == (9741, 1221)
    assert test[0].id == "csqa/test/0" and test[0].answer == "A"
    assert test[0].question.endswith("at a what?\nA: bank\nB: library\nC: department store\nD: mall\nE: new york")
    assert sum(len(set(task.meta["choices"].values())) < 5 for task in train) == 122
    assert "revolving door" not in test[0].question.splitlines()[1:]
    assert check_golds(train) == check_golds(test) == []
    assert verify_task(test[0], "Final Answer: (d) mall").verdict == "wrong"


@real
def test_math_train_skips_and_says_so():
    """rema §7 row 36, malt §10 row 1."""
    train = math.load()
    assert len(train) == 8517
    assert report(train) == (
        "skipped 6 of 8,523 rows: repeated question (rows 4007, 4465, 4749, 7583); empty gold (rows 5054, 5158)"
    )
    levels = [task.meta["level"] for task in train]
    assert sorted(set(levels)) == [3, 4, 5] and train[0].answer == "118"
    minimal = math.load("minimal")
    assert len(minimal) == 133 and len(overlap(train, minimal)) == 133
    assert {task.meta["level"] for task in minimal} == {3, 4, 5} and len({t.meta["subject"] for t in minimal}) == 7


@real
def test_math500_golds_verify_against_themselves():
    """malt §10 row 1: O15."""
    test = math.load("test")
    assert [sum(task.meta["level"] == level for task in test) for level in range(1, 6)] == [43, 90, 105, 128, 134]
    assert test[0].id == "math/test/0" and test[0].meta["source_id"] == "test/precalculus/807.json"
    assert check_golds(test) == []
    assert all(verify("auto", task.answer, f"So \\boxed{{{task.answer}}}.").right for task in test)
    first = test[0].answer
    assert verify("math", first, r"\boxed{(3,\frac{\pi}{2})}").right
    assert verify("math", first, r"\boxed{\left(3, \pi/2\right)}").right
    assert not verify("math", first, r"\boxed{(\frac{\pi}{2},3)}").right


@pytest.mark.slow
@real
@pytest.mark.parametrize("split", ["train", "minimal", "overall"])
def test_every_gold_of_the_mathematics_files_is_right_against_itself(split):
    """rema §6.4 and §7 row 36: no exception among the 11,901 of the three files."""
    assert check_golds(math.load(split)) == []


@real
def test_the_overall_file_is_repaired_and_says_so():
    """rema §7 row 36."""
    tasks = {int(task.id.split("/")[-1]): task for task in math.load("overall")}
    assert len(tasks) == 3251
    assert [tasks[row].answer for row in (97, 1972, 2056, 2081)] == [r"\text{east}", "b>a>c", r"\frac{3}{10}", "A"]
    assert tasks[2056].question.endswith("at least one saddle point.") and tasks[2081].question.endswith(
        "(D) $435(100b)$"
    )
    assert [tasks[row].answer for row in (102, 257, 2238)] == ["(a+5)(b+2)", "864", "901"]
    assert tasks[2238].meta["published_gold"] == "902"
    assert "repaired 4 empty golds (rows 97, 1972, 2056, 2081)" in report(math.load("overall"))
    assert report(math.load("overall", subset="aime24")) == ""
    sizes = [len(math.load("overall", subset=name)) for name in math.SUBSETS]
    assert sizes == [1319, 675, 500, 385, 272, 40, 30, 30]
    shared = overlap(math.load("overall", subset="amc23"), math.load("overall", subset="gaokao2023en"))
    assert len(shared) == 8


@real
def test_the_three_test_questions_in_the_train_file_are_found_and_no_other():
    """rema §7 row 37."""
    train = math.load()
    assert sorted(overlap(train, math.load("overall"))) == [
        ("math/train/1473", "math/overall/3005"),
        ("math/train/2847", "math/overall/2941"),
        ("math/train/5922", "math/overall/3063"),
    ]
    assert overlap(train, math.load("test")) == []


@real
def test_limit_and_seed():
    assert [task.id for task in gsm8k.load("test", limit=2)] == ["gsm8k/test/0", "gsm8k/test/1"]
    mixed = gsm8k.load("test", limit=5, seed=1)
    assert mixed == gsm8k.load("test", limit=5, seed=1) != gsm8k.load("test", limit=5, seed=2)
    assert mixed[0] in gsm8k.load("test")


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_bad_rows_are_skipped_with_their_reason(tmp_path):
    good = {"question": "1+1?", "answer": "so\n#### 2"}
    rows = [
        good,
        {**good, "question": "1 + 1?"},
        {"question": "2?", "answer": "2"},
        {"question": "3?", "answer": "#### "},
    ]
    rows += [
        {"question": "4?", "answer": None},
        {"question": 5, "answer": "#### 5"},
        {"question": "6?", "answer": "#### six"},
    ]
    tasks = gsm8k.load(path=write(tmp_path / "train.jsonl", *rows))
    assert [(task.id, task.answer) for task in tasks] == [("gsm8k/train/0", "2")]
    assert [skip.reason for skip in tasks.skipped] == [
        "repeated question",
        "no #### before the answer",
        "empty gold",
        "gold is a NoneType, not text",
        "question is a int, not text",
        "gold is not a number",
    ]
    assert report(tasks).startswith("skipped 6 of 7 rows: repeated question (row 1); no ####")
    assert gsm8k.load(path=str(tmp_path)) == tasks  # a folder with {split}.jsonl
    with pytest.raises(DataError, match="no usable row among 1: empty gold"):
        gsm8k.load(path=write(tmp_path / "none.jsonl", rows[3]))
    assert report([Task("a", "q", "1")]) == ""


@pytest.mark.parametrize(
    ("row", "question", "answer"),
    [
        ({"question": "q", "answer": 4, "level": 2}, "q", "4"),
        ({"question": "q", "answer": "so #### 1,000"}, "q", "1,000"),
        ({"problem": "q", "solution": r"so \boxed{1} or \boxed{\frac{1}{2}}."}, "q", r"\frac{1}{2}"),
        ({"problem": "q", "solution": r"so \boxed{1}.", "answer": "2"}, "q", "2"),
        ({"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], "answer": "4"}, "q", "4"),
        ({"prompt": '[{"role": "user", "content": "q"}]', "answer": "4"}, "q", "4"),
        (
            {
                "prompt": [{"role": "user", "content": "q"}],
                "reward_model": {"ground_truth": "4", "style": "rule"},
                "extra_info": {"index": 7},
            },
            "q",
            "4",
        ),
    ],
)
def test_common_row_shapes(tmp_path, row, question, answer):
    (task,) = files.load(path=write(tmp_path / "mine.jsonl", row))
    assert (task.id, task.question, task.answer) == ("mine/train/0", question, answer)
    assert task.meta["kind"] == "auto"
    assert "level" not in row or task.meta["level"] == 2
    assert "extra_info" not in row or task.meta["index"] == 7
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "test.parquet")
    (again,) = files.load("test", path=str(tmp_path))
    assert (again.question, again.answer) == (question, answer)


def test_named_columns_csv_and_unknown_shapes(tmp_path):
    (tmp_path / "mine.csv").write_text("frage,antwort,note\n1+1?,2,easy\n2+2?,4,\n")
    tasks = files.load(path=str(tmp_path / "mine.csv"), question="frage", answer="antwort", kind="number")
    assert [(task.question, task.answer) for task in tasks] == [("1+1?", "2"), ("2+2?", "4")]
    assert tasks[0].meta == {"kind": "number", "note": "easy"}
    with pytest.raises(DataError, match=r"frage, antwort, note. Write question: NAME"):
        files.load(path=str(tmp_path / "mine.csv"))
    with pytest.raises(DataError, match=r"no column 'a.b' for answer:; the row has frage"):
        files.load(path=str(tmp_path / "mine.csv"), question="frage", answer="a.b")
    with pytest.raises(DataError, match="line 1: not JSON"):
        (tmp_path / "bad.jsonl").write_text("{\n")
        files.load(path=str(tmp_path / "bad.jsonl"))
    with pytest.raises(DataError, match=r"write a \.jsonl"):
        (tmp_path / "bad.txt").write_text("x")
        files.load(path=str(tmp_path / "bad.txt"))
    with pytest.raises(DataError, match="needs either path"):
        files.load()


@real
def test_verl_parquet_loads_as_it_is():
    tasks = files.load(path=str(data_root() / "math" / "train_minimal_all_types.parquet"))
    assert len(tasks) == 133 and [task.answer for task in tasks] == [task.answer for task in math.load("minimal")]


def test_hub_rows(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    flat = {
        "id": "x",
        "question": "where?",
        "choices": {"label": ["A", "B"], "text": ["here", "there"]},
        "answerKey": "B",
    }
    asked = []

    def fake(hub, config, split):
        asked.append((hub, config, split))
        return [{"question": "q", "answer": "#### 1"}] if "gsm8k" in hub else [flat]

    monkeypatch.setattr(datasets, "load_dataset", fake)
    assert gsm8k.load("test", hub="openai/gsm8k")[0].answer == "1"
    (task,) = csqa.load("test", hub="tau/commonsense_qa")
    assert task.question == "where?\nA: here\nB: there" and task.answer == "B"
    assert asked == [("openai/gsm8k", "main", "test"), ("tau/commonsense_qa", None, "validation")]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'cothink\[hub\]'"):
        gsm8k.load(hub="openai/gsm8k")


def test_gym_tasks_are_disjoint_reproducible_and_get_no_partial_credit(monkeypatch):
    pytest.importorskip("reasoning_gym")
    train, test = gym.load(generator="chain_sum", size=40), gym.load("test", generator="chain_sum", size=40)
    assert len(train) == len(test) == 40 and overlap(train, test) == []
    assert train == gym.load(generator="chain_sum", size=40) != gym.load(generator="chain_sum", size=40, seed=1)
    json.dumps([dict(task.meta) for task in train])
    task = train[0]
    assert verify_task(task, f"\\boxed{{{task.answer}}}").right
    near = verify_task(task, f"\\boxed{{{task.answer} or so}}")
    assert near.verdict == "wrong" and near.detail != "score 1"
    assert verify_task(task, "no box").verdict == "unparsable"
    few = gym.load(generator="leg_counting", size=50, options={"min_animals": 1, "max_animals": 1, "max_instances": 1})
    assert 0 < len(few) < 50 and "distinct questions for train, 50 were asked" in report(few)
    with pytest.raises(DataError, match="nearest: chain_sum"):
        gym.load(generator="chain_sums")
    with pytest.raises(DataError, match="refuses these options"):
        gym.load(generator="chain_sum", options={"nonsense": 1})
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"pip install 'cothink\[gym\]'"):
        gym.load(generator="chain_sum")


def test_importing_the_loaders_loads_nothing_heavy():
    code = "import sys\nfrom cothink.tasks import gsm8k, math, csqa, files, gym\n"
    code += "print([m for m in ('torch', 'sympy', 'pandas', 'pyarrow', 'datasets', 'numpy') if m in sys.modules])"
    env = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert out.stdout.strip() == "[]"
