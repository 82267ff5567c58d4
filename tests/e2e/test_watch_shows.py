"""Every signal of the watch, by a run that is made to show it, next to a healthy twin that differs in nothing else.

The runs go through the real rl stage with a run folder and a watch that acts: teams of softmax tables, and a small
random model where the signal needs tokens, gradients or a second opinion on log-probs. They break at step 13, or were
never right. Two signals lead only where another one is silenced: a team that needs two rounds and takes one has
finished early, so `early_finish` speaks before `one_round`; an effective sample size below a half means log-probs that
differ by nats, so `mismatch` speaks with `ess`. `mask_full`, `reference_kl` and `clipped` are only said.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from watch_sickness import BREAKS, WATCH, Trouble, boxed, dice, model, right, tables

from cothink.policy import TrainingError
from cothink.signals import NAMES

TINY: dict[str, Path] = {}


@pytest.fixture(autouse=True)
def tiny(tiny_folder):
    TINY["folder"] = tiny_folder


def number(messages):
    """Which row is played: questions are q0, q1, ..."""
    return int(messages[1].content.removeprefix("Question:\n").split("\n")[0][1:])


def answers(messages, share):
    """One right answer and three wrong ones."""
    wrong = {boxed(100 + k): (1 - share) / 3 for k in range(3)}
    return {boxed(number(messages)): share, **wrong} if share else wrong


def solo(folder, trouble, share=0.6, **stage):
    return tables(folder, trouble, "solo", {"solver": lambda m: answers(m, share)}, rate=1.0, **stage)


def sure(folder, trouble):
    return solo(folder, trouble, share=0.9)


def evaluated(folder, trouble, **more):
    return solo(folder, trouble, evaluate={"every": 2}, **more)


def filtered(folder, trouble, **more):
    return solo(folder, trouble, filter="accuracy", **more)


def pair(folder, trouble, deaf=False, **stage):
    """A plan that helps, and its execution; `deaf` is a reasoner that answers without it."""

    def meta(m):
        return {f"plan {number(m)}": 0.6, "plan 100": 0.19, "plan 101": 0.19, "  ": 0.02}

    def reasoning(m):
        return answers(m, 0.5 if deaf else 0.8 if m[-1].content.endswith(f"plan {number(m)}") else 0.2)

    workflow = {"name": "rema", "max_turns": 1}
    return tables(folder, trouble, workflow, {"meta": meta, "reasoning": reasoning}, **stage)


def guided(folder, trouble, **more):
    return pair(folder, trouble, credit={"name": "ccpo_solo", "guide": "meta"}, frozen=("reasoning",), **more)


def rounds(folder, trouble, **stage):
    """Two rounds; the second answer is the better one."""

    def meta(m):
        stop = 0.05 if len(m) == 2 else 0.7
        goes_on = {"go on": (1 - stop) / 2, "check": (1 - stop) / 2}
        return goes_on | {"done [FINISH]": stop / 2, "stop [FINISH]": stop / 2}

    def reasoning(m):
        return answers(m, 0.3 if len(m) == 2 else 0.7)

    workflow = {"name": "rema", "max_turns": 2}
    return tables(folder, trouble, workflow, {"meta": meta, "reasoning": reasoning}, **stage)


def synthetic(folder, trouble, **more):
    return rounds(folder, trouble, needs={"rounds": 2}, **more)


def masking(folder, trouble, cap=0.9):
    return rounds(folder, trouble, unfinished="mask", mask_cap=cap)


def plain(folder, trouble, loss=None, **more):
    loss = {"clip": "none", "offpolicy": "tis_token"} if loss is None else loss
    more = {"kl_stop": None, **more} if more.setdefault("updates_per_step", 2) > 1 else more
    return model(folder, trouble, TINY["folder"], {"solver": {}}, loss=loss, **more)


def clipping(folder, trouble):
    return plain(folder, trouble, {"low": 0.03, "high": 0.03})


def referring(folder, trouble, **more):
    return plain(folder, trouble, {"kl": "k3", "kl_beta": 1e-6}, updates_per_step=1, **more)


def lengths(folder, trouble, **more):
    """Answers end at the first vowel, so that there are long and short ones."""
    return model(folder, trouble, TINY["folder"], {"solver": {"stop": list("aeiou")}}, **more)


def handing(folder, trouble):
    roles, influence = {"meta": {}, "reasoning": {}}, {"every": 1, "episodes": 3}
    return model(folder, trouble, TINY["folder"], roles, "watch_sickness:handing", influence=influence, steps=18)


def size(task, turn, broken):
    return len(turn.completion.output_ids) / 12


def paying(text, much):
    """A hidden return of the meta-thinker for saying something."""
    return lambda t, said: much * (text in said) if t.role == "meta" else t.value


def first_row(task, turn, broken=False):
    """A reward for one wrong answer: whoever is paid for it has no need of a right one."""
    return float(turn.text == boxed(100))


def silencing(name):
    return {"watch": {**WATCH, "limits": {name: None}}}


def faster(times):
    """The learning rate is multiplied by accident."""
    done = []

    def change(policies, said):
        if not done:
            policies["p"].scale_rate(times)
            done.append(times)
        return said

    return change


def shifted(policies, said):
    return [replace(c, logprobs=tuple(v - 0.2 for v in c.logprobs)) for c in said]


def one_off(policies, said):
    """One token in twelve was sampled from quite another distribution."""
    return [replace(c, logprobs=tuple(v - 5 * (j == 3) for j, v in enumerate(c.logprobs))) for c in said]


SICK = {
    "reward_drop": (solo, Trouble(returns=lambda t, said: -10 * t.value)),
    "test_drop": (evaluated, Trouble(pays=lambda a, t, broken: right(a, t) + 9.0 * broken * (t.text == boxed(100)))),
    "flat_groups": (solo, Trouble(pays=lambda a, t, broken: 0.0 if broken else right(a, t))),
    "no_success": (evaluated, Trouble(pays=first_row), {"share": 0}),
    "few_groups": (filtered, Trouble(pays=first_row), {"share": 0}),
    "gradient": (plain, Trouble(pays=lambda a, t, broken: dice(a, t) * (100 if broken else 1))),
    "fewer_rounds": (rounds, Trouble(returns=paying("FINISH", 100))),
    "one_round": (synthetic, Trouble(returns=paying("FINISH", 100)), silencing("early_finish")),
    "unfinished": (rounds, Trouble(returns=paying("FINISH", -40))),
    "mask_full": (masking, Trouble(), {"cap": 0.1}),
    "early_finish": (synthetic, Trouble(returns=paying("FINISH", 10))),
    "lazy": (guided, Trouble(), {"deaf": True}),
    "unheard": (handing, Trouble(pays=dice, lost=True)),
    "void": (pair, Trouble(returns=paying("  ", 40))),
    "shorter": (lengths, Trouble(pays=size, returns=lambda t, said: -t.value, engine=faster(400)), {"steps": 30}),
    "entropy_low": (pair, Trouble(returns=paying("plan 100", 40))),
    "entropy_high": (sure, Trouble(returns=lambda t, said: -20.0 * (said == boxed(int(t.task[1:]))))),
    "update_kl": (plain, Trouble(pays=dice, engine=faster(400))),
    "reference_kl": (referring, Trouble(pays=dice), {"rate": 5e-3}),
    "mismatch": (plain, Trouble(pays=dice, engine=shifted)),
    "ess": (plain, Trouble(pays=dice, engine=one_off), silencing("mismatch")),
    "clipped": (clipping, Trouble(pays=dice, engine=faster(100))),
    "repeated": (
        plain,
        Trouble(pays=dice, returns=lambda t, said: said.count("e") / 12, engine=faster(60)),
        {"steps": 36},
    ),
    "net_push": (solo, Trouble(base=lambda scored: [t.value for t in scored])),
}
"""Signal -> the run that shows it, what is wrong with it, and options it differs in."""
TWINS = list(dict.fromkeys(run for run, *_ in SICK.values()))
SAID = {"mask_full", "reference_kl", "clipped"}
"""Signals that no stop follows in these runs: nothing asks for one, or the reward holds."""


def test_every_signal_has_a_run():
    assert set(SICK) == set(NAMES)


@pytest.mark.parametrize("name", SICK)
def test_a_run_shows_its_signal_first(name, tmp_path):
    """credit §7: the first thing said is the signal, and a run that is stopped for it names it in its diagnosis."""
    run, trouble, *more = SICK[name]
    heard = run(tmp_path / "run", trouble, **(more[0] if more else {}))
    assert heard.first == [name]
    assert heard.words[0][0] >= (BREAKS if trouble.returns or trouble.engine or trouble.lost else 12)
    if name in SAID:
        assert heard.mark is None and heard.rows[-1]["step"] == len(heard.rows) and not heard.end
        return
    assert heard.end.startswith(f"the watch stopped the run at step {heard.rows[-1]['step']}: ")
    assert heard.mark["first"]["signal"].split("/")[0] == name and heard.mark["first"]["step"] == heard.words[0][0]
    assert heard.mark["signal"] in heard.end and name in heard.end


@pytest.mark.parametrize("run", TWINS, ids=lambda run: run.__name__)
def test_the_healthy_twin_is_quiet(run, tmp_path):
    pays = size if run is lengths else dice if run in (plain, clipping, referring, handing) else right
    heard = run(tmp_path / "run", Trouble(pays=pays))
    assert heard.words == [] and heard.end == "" and heard.mark is None and len(heard.rows) >= 18


def test_one_code_path_is_no_case_for_the_watch(tmp_path):
    """credit §7: a mismatch where engine and trainer are one code path is a bug, and an error."""
    with pytest.raises(TrainingError, match=r"policy p: engine and trainer differ by 0\.2 in a log-prob"):
        plain(tmp_path / "run", Trouble(pays=dice, engine=shifted), {"kl": "none"})


def test_a_signal_that_comes_back_stops_the_run(tmp_path):
    """credit §7: back to a good state at half the rate; two roll-backs by the same signal are a stop."""
    heard = pair(tmp_path / "run", Trouble(returns=paying("  ", 8)), watch={**WATCH, "rollbacks": 2}, steps=80)
    actions = {row["step"]: row["watch/action"] for row in heard.rows if "watch/action" in row}
    (back, end), said = sorted(actions), [at for at, _ in heard.words]
    assert actions == {back: "back to step 22", end: "stop"} and said[0] == back and said[1] > back + 20
    assert "no way back: it has been acted on before" in heard.end
    assert [(r["signal"], r["step"], r["to"]) for r in heard.mark["rollbacks"]] == [("void", back, 22)]
    assert heard.mark["first"] == {"signal": "void/meta", "step": said[1]} and heard.mark["collapsed"] is False


def test_returns_are_bounded_whatever_the_signals(tmp_path):
    """credit §7: the second illness is another one, but one return is all that is allowed."""
    trouble = Trouble()
    blank = paying("  ", 40)
    trouble.returns = lambda t, said: blank(t, said) if trouble.step < 26 else -10 * t.value
    heard = pair(tmp_path / "run", trouble, watch={**WATCH, "rollbacks": 1}, steps=80)
    assert [r["signal"] for r in heard.mark["rollbacks"]] == ["void"]
    assert heard.mark["signal"] == "reward_drop" and heard.mark["first"]["signal"] == "reward_drop"
    assert heard.end.split("no way back: ")[1].startswith(
        "all roll-backs allowed (1) are used up; the newest good state"
    )
