"""The static report: what a page may contain, curves and tables by hand, and reading run folders as they grow."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from cothink import api, cli, plots
from cothink.record import RunError
from cothink.report import curves, episodes, folders, markup, pairs, sections
from cothink.report.conversation import episode
from cothink.stages import tree_rows
from cothink.stages.comparing import evaluated
from cothink.trees import Grade, Tree
from cothink.types import Completion, Episode, Finish, Task, Turn

HOSTILE = (
    '</title></pre><script>alert(1)</script><img src="https://evil.example/x" onerror=alert(2)>'
    "<a href='javascript:alert(3)'>x</a>\x1b[31mred\x1b[0m\x07 \u202eback\u202c \ud800 \x00 &lt; \"quoted\""
)


class Reader(HTMLParser):
    """Collects every element with its attributes."""

    def __init__(self, page: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def box(answer: int) -> str:
    return rf"\boxed{{{answer}}}"


def step(k: int, **values) -> dict:
    return {"stage": 1, "step": k, "time": 1000.0 + k, "reward": k / 10, "accuracy": k / 10, "tokens_total": 100 * k,
            "seconds_collect": 1.0, "seconds_learn": 2.0, **values}  # fmt: skip


def harmless(page: str) -> None:
    """A page that runs, loads and hides nothing."""
    seen = Reader(page).found
    assert len(seen) > 20
    assert not {"script", "iframe", "img", "link", "object", "embed", "form", "base"} & {tag for tag, _ in seen}
    for tag, attributes in seen:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "srcset", "style")], tag
        assert (attributes.get("href") or "#").startswith("#")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", page)
    page.encode("utf-8")


def test_hostile_text_is_shown_and_does_nothing(tmp_path, made_run, made_episode):
    """Every text of a run (question, gold, turns, names, reasons, warnings, labels) is escaped."""
    row = made_episode(HOSTILE, ("meta", HOSTILE), (HOSTILE, HOSTILE), gold=HOSTILE, verdict=HOSTILE, finish=HOSTILE)
    row["turns"][1] |= {"pieces": [HOSTILE, "x"], "logprobs": [-0.1, -3.0], "shown": "other", "id": HOSTILE}
    row["rewards"][0]["name"] = HOSTILE
    metrics = [step(1, **{f"{HOSTILE}/reward": 1.0, "watch": [f"warn {HOSTILE}"]}), step(2)]
    results = {HOSTILE: {"accuracy": 0.5, "n": 2, "tokens": 7}}
    run = made_run(
        tmp_path / "run", metrics=metrics, episodes={"01-rl/000002": [row]}, results=results,
        stopped={"step": 2, "what": HOSTILE},
    )  # fmt: skip
    (run / "recipe.yaml").write_text((run / "recipe.yaml").read_text().replace("Plan.", "'<script>alert(9)</script>'"))
    page = api.report([run], out=tmp_path / "r.html")[0].read_text(encoding="utf-8")
    harmless(page)
    assert page.count("&lt;script&gt;alert(1)") >= 8 and "&lt;script&gt;alert(9)" in page
    assert "\u241b[31mred" in page and "\u27e8U+202E\u27e9back" in page and "\u27e8U+D800\u27e9" in page


def test_megabytes_of_text_are_cut_in_the_middle(made_episode):
    said = "a" * 3_000_000 + "THE END"
    html = episode(made_episode("t", ("meta", said)))
    huge = made_episode("t" * 3_000_000, ("r" * 3_000_000, "x"), gold="g" * 3_000_000)
    assert len(episode({**huge, "question": "q" * 3_000_000})) < 15_000
    assert len(html) < 10_000 and "2,994,007 characters left out" in html and "THE END" in html
    assert len(episode(made_episode("t", ("meta", said)), limit=4_000_000)) > 3_000_000


def test_a_page_of_many_long_runs_stays_small_and_names_no_address(tmp_path, made_run):
    """Issue: under 2 MB without episodes, no network."""
    names = ("reward", "accuracy", "rounds", "turns", "reward_std", "unfinished", "share_kept")
    role = ("reward", "tokens_per_turn", "sampled_entropy", "entropy", "kl_update", "engine_gap", "void", "cut", "loss")
    rows = [
        {"stage": 1, "step": k, "time": k, **dict.fromkeys(names, k * 7919 % 1013 / 1013),
         **{f"{r}/{n}": (k * 6101 % 997) / 997 for r in ("meta", "reasoning", "refiner") for n in role}}
        for k in range(1, 1001)
    ]  # fmt: skip
    runs = [made_run(tmp_path / f"run{k}", metrics=rows, rate=k) for k in range(6)]
    page = api.report(runs, out=tmp_path / "r.html", svg=tmp_path / "svg", episodes=0)[0].read_text()
    assert 200_000 < len(page) < 2_000_000
    assert "http:" not in page and "https:" not in page and "url(" not in page
    harmless(page)
    for path in (tmp_path / "svg").glob("*.svg"):
        assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert {"reward.svg", "tokens-per-turn.svg"} <= {p.name for p in (tmp_path / "svg").iterdir()}


def test_a_curve_and_its_interval_are_drawn_where_the_numbers_are():
    """380 x 230: the plot spans x 48..364 and y 194 (lowest) .. 36 (highest)."""
    rows = [
        step(1, accuracy=0.0, **{"test/accuracy": 0.5, "test/low": 0.25, "test/high": 0.75}),
        step(2),
        step(3, accuracy=1.0, **{"test/accuracy": 0.75, "test/low": 0.5, "test/high": 1.0}),
    ]
    (one,) = (d for d in curves.drawings({"r": rows}) if d.panel.title.startswith("accuracy"))
    svg = one.svg()
    assert 'd="M48.0,194.0 L206.0,162.4 L364.0,36.0"' in svg  # accuracy 0, 0.2, 1 at steps 1, 2, 3
    assert 'd="M48.0,115.0 L364.0,75.5"' in svg  # tests of 0.5 and 0.75
    assert 'd="M48.0,75.5 L364.0,36.0 L364.0,115.0 L48.0,154.5 Z"' in svg  # there along 0.75, 1, back along 0.5, 0.25
    assert 'data-frame="1 3 0 1 48 364 36 194 0"' in svg


def test_several_runs_share_a_drawing_and_metrics_of_zero_take_no_room():
    rows = [step(k, void=0.0, **{"meta/void": 0.0, "meta/engine_gap": 10.0**-k}) for k in (1, 2, 3)]
    drawn = {d.panel.title: d for d in curves.drawings({"one": rows, "two": rows[:2]})}
    assert [(c.name, c.colour, c.dash) for c in drawn["reward"].curves] == [("one", 0, 0), ("two", 1, 0)]
    assert "unfinished, cut and void" not in drawn
    mismatch = drawn["mismatch of engine and trainer"]
    assert mismatch.panel.log and 'd="M48.0,36.0 L206.0,115.0 L364.0,194.0"' in mismatch.svg()  # a line on a log scale


def test_constant_metrics_and_small_numbers_have_scales_that_can_be_read():
    flat = [step(k, **{"meta/learning_rate": 2e-4}) for k in (1, 2)]
    (one,) = (d for d in curves.drawings({"r": flat}) if d.panel.title == "learning rate")
    assert 'data-frame="1 2 0.0001 0.0003 ' in one.svg()  # not -0.5 .. 0.5, in which every rate looks like 0
    assert [plots._short(v) for v in (3.16e-6, 1e-6, 0.0002, 1234567.0, 0.25)] == [
        "3.2e-6", "1e-6", "0.0002", "1.2e6", "0.25"]  # fmt: skip


def test_thinning_keeps_a_spike_and_the_plot_command_keeps_every_point():
    points = [(float(x), 1.0) for x in range(1000)]
    points[437] = (437.0, 50.0)
    thin = plots.decimate(points, 40, curves._ends)
    assert (437.0, 50.0) in thin and len(thin) <= 41
    assert plots.draw([plots.Curve("m", points)], "t").count(" L") == 999


def test_intervals_of_steps_stand_behind_their_curve():
    rows = [step(k, reward_low=k - 2.0, reward_high=k + 4.0) for k in range(1, 5)] + [step(5, reward_low=1.0)]
    (one,) = next(d for d in curves.drawings({"r": rows}) if d.panel.title == "reward").curves
    assert one.band == [(float(k), k - 2.0, k + 4.0) for k in range(1, 5)]  # a step without an interval has none
    assert curves._band(rows[:4], [1, 2, 3, 4], "reward", 4) == [(1.5, -0.5, 5.5), (3.5, 1.5, 7.5)]


def test_bold_lines_are_the_moving_average():
    rows = [step(k, reward=float(k == 1)) for k in range(1, 41)]
    (faint, bold) = next(d for d in curves.drawings({"r": rows}) if d.panel.title == "reward").curves
    assert faint.faint and not bold.faint and not bold.band and [y for _, y in faint.points][:3] == [1.0, 0.0, 0.0]
    assert [y for _, y in bold.points][:3] == pytest.approx([1.0, 0.9, 0.81])
    both = next(d for d in curves.drawings({"r": rows, "short": rows[:8]}) if d.panel.title == "reward").curves
    assert [(c.name, c.faint) for c in both] == [("r", True), ("r", False), ("short", True), ("short", False)]


@pytest.mark.parametrize(
    ("said", "accuracy", "flip"),
    [
        ((r"\boxed{5}", r"\boxed{4}"), 1.0, "fixed"),
        ((r"\boxed{4}", r"\boxed{5}"), 0.0, "spoilt"),
        ((r"\boxed{7}", r"\boxed{5}"), 0.0, "changed"),
        ((r"\boxed{4.0}", r"\boxed{4}"), 1.0, ""),
        (("Final Answer: 5", r"so \boxed{ 4 }"), 1.0, "fixed"),
        (("no answer", "4"), 1.0, ""),
    ],
)
def test_flips_are_answers_that_changed_on_the_way(made_episode, said, accuracy, flip):
    row = made_episode("t", *zip(("meta", "reasoning"), said), accuracy=accuracy)
    assert episodes.facts(row).flip == flip


def test_other_branches_of_a_tree_flip_nothing(made_episode):
    row = made_episode("t", ("g", box(4)), ("g", box(5)), ("v", "fine"), ("v", "fine"), graded="2")
    for turn, parents in zip(row["turns"], ([], [], ["0"], ["1"])):
        turn["parents"] = parents
    assert episodes.facts(row).flip == ""
    row["turns"][2]["parents"] = ["0", "1"]  # it read both
    assert episodes.facts(row).flip == "fixed"


def test_filters(made_episode):
    cut = made_episode("a", ("meta", "x"), ("reasoning", r"\boxed{5}"), accuracy=0.0)
    cut["turns"][0]["finish_reason"] = "length"
    wanted = episodes.Filter
    for filters, kept in (
        (wanted(), True), (wanted(verdict="wrong"), True), (wanted(verdict="right"), False),
        (wanted(truncated=True), True), (wanted(truncated=True, role="meta"), True),
        (wanted(truncated=True, role="reasoning"), False), (wanted(role="refiner"), False),
        (wanted(flip="any"), False), (wanted(low=0.1), False), (wanted(high=0.1), True), (wanted(low=0.0), True),
        (wanted(words="BOXED{5}"), True), (wanted(words="refine"), False),
    ):  # fmt: skip
        assert filters(cut) is kept, filters


def test_a_list_goes_on_where_it_stopped_and_reads_no_more_than_it_may(tmp_path, made_episode):
    files = [tmp_path / "1.jsonl", tmp_path / "2.jsonl"]
    lines = [json.dumps(made_episode(f"t{k}", ("meta", "x" * 100))) + "\n" for k in range(10)]
    files[0].write_text("".join(lines[:6]) + '{"half": ')
    files[1].write_text("not json\n" + "".join(lines[6:]))
    first = episodes.scan(files, lambda row: True, most=4)
    rest = episodes.scan(files, lambda row: True, most=40, start=first.then)
    assert [f.row["task"] for f in [*first.found, *rest.found]] == [f"t{k}" for k in range(10)] and rest.then is None
    assert first.then == (0, sum(map(len, lines[:4])))
    assert episodes.at(files[rest.found[2].file], rest.found[2].offset)["task"] == "t6"
    poor = episodes.scan(files, lambda row: row["task"] == "t9", budget=len(lines[0]) * 2)
    assert (poor.found, poor.read, poor.then) == ([], 2, (0, 2 * len(lines[0])))
    with pytest.raises(RunError, match="not the beginning of an episode"):
        episodes.at(files[0], 5)
    with pytest.raises(RunError, match="no place 7:0"):
        episodes.scan(files, lambda row: True, start=(7, 0))


def test_trees_nest_where_turns_branch_and_chains_stay_flat(made_episode):
    row = made_episode("t", *((role, f"said{k}") for k, role in enumerate("gvvrr")))
    for turn, parents in zip(row["turns"], ([], ["0"], ["0"], ["1"], ["2"])):
        turn["parents"] = parents
    html = episode(row)
    assert 'class="episode tree"' in html and html.count('<ul class="branches">') == 2
    inner = html.split('<ul class="branches">')[2]
    order = [inner.index(f"said{k}") for k in (1, 3, 2, 4)]
    assert order == sorted(order)  # each refinement under its own verification
    chain = made_episode("t", *(("meta", "x") for _ in range(3000)))
    assert episode(chain, "tree").count('<ul class="branches">') == 1
    deep = made_episode("t", *(("m", "x") for _ in range(1200)))
    for k, turn in enumerate(deep["turns"]):
        turn["parents"] = [str(max(0, k - 1 - k % 2))] if k else []
    assert episode(deep, "tree").count("<section") == 1200


def test_collected_trees_are_read_with_the_value_of_every_turn(tmp_path, made_run):
    """Leaves right, wrong | right: the verifications are worth 1/2 and 1, the answer they check 3/4."""
    said = [
        ((), "g", "a"),
        (("0",), "v", "b"),
        (("0",), "v", "c"),
        (("1",), "r", "x"),
        (("1",), "r", "y"),
        (("2",), "r", "z"),
    ]
    turns = tuple(
        Turn(str(k), parents, role, "p", Completion(text, output_ids=(1, 2)), text)
        for k, (parents, role, text) in enumerate(said)
    )
    grades = {"0": Grade("wrong", "7"), "3": Grade("right", "4"), "4": Grade("wrong", "5"), "5": Grade("right", "4")}
    tree = Tree(Episode("t#0", Task("t", "q", "4"), turns, Finish("finished", "x", "3")), grades)
    (row,) = tree_rows.rows([tree], "train")
    assert [t.get("value") for t in row["turns"]] == [0.75, 0.5, 1.0, 1.0, 0.0, 1.0]
    assert (row["verdict"], row["accuracy"], row["turns"][0]["verdict"]) == ("right", 1.0, "wrong")
    run = made_run(tmp_path / "run", episodes={"00-collect/000000": [row]})
    page = api.report([run], out=tmp_path / "r.html")[0].read_text()
    assert 'class="episode tree"' in page and "value <b>0.75</b>" in page and page.count('<ul class="branches">') == 3


def test_tokens_show_how_likely_each_was(made_episode):
    row = made_episode("t", ("meta", "a b"))
    row["turns"][0] |= {"pieces": ["a", " b", "\n"], "logprobs": [-0.01, -1.0, -5.0], "advantage": [0.5, 0.5, -1.0]}
    html = episode(row)
    assert 'class="p0" title="log-prob -0.010, p 0.990, advantage +0.5">a<' in html
    assert 'class="p2" title="log-prob -1.000, p 0.368, advantage +0.5"> b<' in html
    assert 'class="p4"' in html and "advantage <b>-1 to +0.5</b>" in html and "mean log-prob <b>-2</b>" in html


def summary(right: dict[str, float], **more) -> dict:
    from cothink.stages.summary import summarise

    rows = [{"set": "test", "task": t, "play": 0, "accuracy": a, "vote": 0, "level": None, "finish": "finished",
             "verdict": "right" if a else "wrong", "turns": []} for t, a in right.items()]  # fmt: skip
    return {**summarise(rows), **more}


def test_evaluations_on_the_same_questions_are_compared(tmp_path, made_run):
    """5 questions only the second answers, 1 only the first: exact McNemar p = 2 (1 + 6) / 2^6 = 0.219."""
    before = summary({f"t{k}": float(k < 3) for k in range(10)})
    after = summary({f"t{k}": float(k > 0 and k < 8) for k in range(10)})
    other = summary({"u": 1.0})
    run = made_run(tmp_path / "run", results={"before": before, "after": after, "other": other})
    found = evaluated({"run": (run, folders.Folder(run).results)})
    titles = [title for title, *_ in found]
    assert titles == ["Evaluation: test", "Cost", "Compared", "Evaluation: test", "Cost"]
    ((_, _, (row,), _),) = [t for t in found if t[0] == "Compared"]
    assert row[1:2] + row[3:6] == ["before - after", "1", "5", "0.219"] and row[2].startswith("-40.0 [")
    assert found[0][2][0][:2] == ["before", "30.0 [10.8, 60.3]"]  # Wilson of 3 in 10
    page = api.report([run], out=tmp_path / "r.html")[0].read_text()
    assert "30.0 [10.8, 60.3]" in page and "0.219" in page


def test_an_evaluation_folder_is_reported_too(tmp_path):
    results = {"sets": {"test": 3}, "systems": {"team": summary({"a": 1.0, "b": 0.0, "c": 1.0})}}
    (tmp_path / "ev").mkdir()
    (tmp_path / "ev" / "results.json").write_text(json.dumps(results))
    page = api.report([tmp_path / "ev"], out=tmp_path / "r.html")[0].read_text()
    (tmp_path / "b" / "ev").mkdir(parents=True)
    (tmp_path / "b" / "ev" / "results.json").write_text(json.dumps(results))
    both = api.report([tmp_path / "ev", tmp_path / "b" / "ev"], out=tmp_path / "r2.html")[0].read_text()
    assert both.count("<h3>Evaluation: test") == 2  # folders of one name are two
    assert "Evaluation ev" in page and "66.7 [20.8, 93.9]" in page  # Wilson of 2 in 3


def test_several_runs_say_where_their_recipes_differ(tmp_path, made_run):
    runs = folders.named([made_run(tmp_path / "a" / "x", rate=0.1), made_run(tmp_path / "b" / "x", rate=0.2)])
    assert [run.name for run in runs] == ["a/x", "b/x"]
    html = sections.differences(runs)
    assert re.findall(r"<td[^>]*>([^<]*)</td>", html) == ["policies.p.learning_rate", "0.1", "0.2"]
    old = folders.Folder(made_run(tmp_path / "c" / "x", rate=0.1))
    (old.path / "recipe.yaml").write_text(
        old.recipe_text.replace("steps: 4", "steps: 4, later: null, added: [], on_top: false")
    )
    assert "All recipes are the same" in sections.differences([runs[0], old])  # a later version's settings at rest
    assert sections.differences([runs[0], runs[0]]) == '<p class="note">All recipes are the same.</p>'
    (tmp_path / "b" / "x" / "recipe.yaml").write_text("name: x\nstages: [{kind: sft}]\nteam: {roles: {solver: 1}}\n")
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", sections.differences(runs))
    assert {"team.workflow", "policies", "stages.0", "stages.1"} <= set(cells[0::3])  # no line for each setting inside


def test_the_watch_is_told_a_line_for_each_signal(tmp_path, made_run):
    said = "meta/void is 0.3 (limit 0.05)"
    rows = [step(1), *(step(k, watch=[f"warn void/meta: {said}"]) for k in (2, 3))]
    rows[2]["watch/action"] = "stop"
    run = made_run(tmp_path / "run", metrics=rows, stopped={"step": 3, "what": "void/meta is too high"})
    html = sections.watched(folders.Folder(run))
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", html)
    assert cells[:6] == ["warn", "void/meta", "2", "3", "2", said] and cells[6:8] == ["action", "stop"]
    assert "Stopped at step 3: void/meta is too high" in html


def test_metrics_are_read_as_they_grow_and_anew_after_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = folders.Tail(path)
    assert tail.read() == []
    path.write_text(json.dumps(step(1)) + "\n" + json.dumps(step(2))[:20])
    assert [row["step"] for row in tail.read()] == [1]
    with path.open("a") as file:
        file.write(json.dumps(step(2))[20:] + "\n[1, 2]\n")
    assert [row["step"] for row in tail.read()] == [1, 2] and tail.unreadable == 1
    fresh = tmp_path / "new"
    fresh.write_text(json.dumps(step(1, reward=9.0)) + "\n")
    fresh.replace(path)
    assert [(row["step"], row["reward"]) for row in tail.read()] == [(1, 9.0)]


def test_status_and_progress(tmp_path, made_run):
    run = folders.Folder(made_run(tmp_path / "run", metrics=[step(3)]))
    assert (run.status, run.progress) == ("running", "step 3 of 4")
    for path in run.path.iterdir():
        os.utime(path, (1.0, 1.0))
    assert run.status == "unfinished"
    (run.path / "state.json").write_text('{"stage": 2}')
    assert run.status == "finished"
    (run.path / "stopped.json").write_text('{"step": 3, "what": "x"}')
    assert run.status == "stopped"


def test_pairs_are_found_in_step(tmp_path, made_episode):
    one = [made_episode(f"t{k}", ("m", "x"), accuracy=float(k % 2)) for k in range(6)]
    two = [made_episode(f"t{k}", ("m", "x"), accuracy=1.0) for k in range(6) if k != 2]
    files = [tmp_path / "1", tmp_path / "2"]
    for path, rows in zip(files, (one, two)):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, then = pairs.page(*files, differ=True)
    assert [(p.question, p.verdicts) for p in found] == [(f"question t{k}", ("wrong", "right")) for k in (0, 4)]
    assert then is None and episodes.at(files[1], found[1].second)["task"] == "t4"
    first, then = pairs.page(*files, differ=False, most=3)
    rest, end = pairs.page(*files, differ=False, start=then)
    assert [p.question[-2:] for p in [*first, *rest]] == ["t0", "t1", "t3", "t4", "t5"] and end is None


def test_hostile_names_in_a_drawing_stay_text(tmp_path, made_run):
    name = HOSTILE.replace("/", "|")
    run = made_run(tmp_path / "run", metrics=[step(k, **{f"{name}/reward": float(k)}) for k in (1, 2)])
    page, files = api.report([run], out=tmp_path / "r.html", svg=tmp_path / "svg")
    harmless(page.read_text())
    (file,) = (f for f in files if f.name == "reward-by-role.svg")
    said = {e.text for e in ElementTree.parse(file).iter() if e.text}  # whole XML
    assert any("<script>alert(1)" in words and "\u241b" in words and "\u27e8U+D800\u27e9" in words for words in said)
    assert "\x1b" not in plots.of_run(run, ["*"])


def test_a_value_that_is_no_number_is_a_gap_and_spoils_no_average():
    rows = [step(k, reward=1.0 if k != 5 else float("nan"), loss=float("inf")) for k in range(1, 41)]
    drawn = {d.panel.title: d for d in curves.drawings({"r": rows})}
    assert drawn["reward"].svg().count('data-name="reward"') == 2  # the two stretches beside the gap
    assert "nan" not in drawn["reward"].svg() and "inf" not in drawn["reward"].svg()


def test_wrong_folders_say_what_to_name(tmp_path, made_run, capsys):
    made_run(tmp_path / "runs" / "a")
    with pytest.raises(RunError, match=r"no folder .*nowhere"):
        api.report([tmp_path / "nowhere"], out=tmp_path / "r.html")
    with pytest.raises(RunError, match=r"not a run folder.*runs are in .*runs/a"):
        api.report([tmp_path / "runs"], out=tmp_path / "r.html")
    with pytest.raises(RunError, match="named twice"):
        api.report([tmp_path / "runs/a"] * 2, out=tmp_path / "r.html")
    with pytest.raises(RunError, match=r"--out .* is a folder"):
        api.report([tmp_path / "runs/a"], out=tmp_path)
    with pytest.raises(SystemExit) as left:
        cli.main(["report", str(tmp_path / "runs/a"), "--out", str(tmp_path / "new" / "r.html")])
    assert left.value.code in (0, None) and "wrote" in capsys.readouterr().out


def test_numbers_and_text():
    assert markup.visible("a\tb\nc\r\x1b\x7f\x9b") == "a\tb\nc\u240d\u241b\u2421\u27e8U+009B\u27e9"
    assert [markup.number(x) for x in (3.0, 0.123456, 12345.0)] == ["3", "0.1235", "12,345"]
    assert markup.shortened("x" * 10, 10) == ("x" * 10, 0) and markup.shortened("x" * 11, 8)[1] == 3
