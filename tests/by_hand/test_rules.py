from __future__ import annotations

import pytest

from cothink import rules, source
from cothink.recipe import Recipe
from cothink.resolve import RecipeError
from cothink.types import Task

BASE = """
name: small
team:
  workflow: {name: rema, max_turns: 3}
  roles: {meta: {policy: main, system: "Guide."}, reasoning: {policy: main, system: "Follow."}}
policies: {main: {model: builtin:tiny, learning_rate: 3e-4}}
tasks: {train: wordsums, test: {name: wordsums, split: test}}
stages:
  - {kind: evaluate, on: test}
  - {kind: rl, steps: 4, tasks_per_step: 2, episodes_per_task: 8}
"""
TWO = "team.roles.reasoning.policy=second"
SECOND = "policies.second={model: builtin:tiny}"
PHASES, RATES = "stages.1.schedule=phases", "stages.1.filter={name: success, low: 0.2, high: 0.8}"
ONE_ROUND = "team.workflow.max_turns=1"
COARSE = "engine={name: local, dtype: bfloat16}"
SIBLINGS = "team.workflow.n_solutions=4"
ONE_PLAY = "stages.1.episodes_per_task=1"


def codes(*overrides: str) -> set[str]:
    return set(rules.check(Recipe.load(source.parse(BASE, "base"), overrides)).codes)


def refused(*overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        codes(*overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("code", "overrides"),
    [
        ("E01", ["stages.1.estimator=reinforce"]),
        ("E01", ["stages.1.loss.ratio=sequence"]),
        ("E01", ["stages.1.estimator.baseline=ema"]),  # E02: an alias takes no baseline of its own
        ("E01", ["stages.1.estimator=rae", "stages.1.estimator.std=unbiased"]),  # E04
        ("E03", [ONE_PLAY, "stages.1.filter=none"]),
        ("E05", ["stages.1.estimator.scope=prefix"]),
        ("E05", ["stages.1.credit=c3_suffix"]),
        ("E01", ["stages.1.credit=causal_influence"]),  # E16: influence is a metric here
        ("E01", ["stages.1.share_data=[meta, reasoning]"]),  # E18: roles share no data of other policies
        ("E05", ["stages.1.credit=vine"]),
        ("E15", ["stages.1.credit=ccpo_solo"]),
        ("E01", ["stages.1.credit={name: ccpo_solo, guide: critic}"]),
        ("E15", ["stages.1.credit={name: ccpo_solo, guide: reasoning}"]),  # speaks last
        ("E15", ["stages.1.credit={name: ccpo_solo, guide: meta}", "team.roles.meta.trainable=false"]),
        ("E15", ["stages.1.credit={name: ccpo_solo, guide: meta}", ONE_ROUND, "team.workflow.n_solutions=2"]),
        (
            "E15",
            [
                "stages.1.credit={name: ccpo_solo, guide: solver}",
                "team.workflow=solo",
                "team.roles={solver: {policy: main, system: Solve.}}",
            ],
        ),
        ("E01", ["stages.1.credit={name: ccpo_solo, guide: meta, strength: 0}"]),
        ("E15", ["stages.1.gate.guide=reasoning"]),
        ("E01", ["stages.1.gate.guide=critic"]),
        ("E11", ["stages.1.gate.accuracy=[0.8, 0.2]"]),
        ("E01", ["stages.1.gate={accuracy: 0.5}"]),
        (
            "idle",
            [
                "stages.1.influence={every: 5}",
                "team.workflow=solo",
                "team.roles={solver: {policy: main, system: Solve.}}",
            ],
        ),
        ("idle", ["stages.1.credit={name: broadcast, guide: meta}"]),
        ("idle", ["stages.1.credit={name: ccpo_solo, guide: meta, gamma: 0.9}"]),
        ("idle", [SIBLINGS, ONE_ROUND, "stages.1.credit=c3_suffix", "stages.1.estimator=rloo"]),
        ("idle", [SIBLINGS, ONE_ROUND, "stages.1.credit={name: c3_local, gamma: 0.9}"]),
        ("E06", ["stages.1.estimator.scope=anchor"]),
        ("E07", ["stages.1.loss={ratio: turn_geo, aggregate: token_mean}"]),
        ("E07", ["stages.1.loss={ratio: turn_arith, aggregate: const_token}"]),
        ("E07", ["stages.1.loss={ratio: turn_geo, aggregate: episode_token_mean}"]),
        ("E01", ["stages.1.loss={turns_ref: 0}"]),  # E08
        ("E09", ["stages.1.loss.low=-0.1"]),
        ("E09", ["stages.1.loss={low: 1.0}"]),
        ("E09", ["stages.1.loss={high: 0.5, dual_clip: 1.5}"]),
        ("idle", ["stages.1.loss={clip: cispo, dual_clip: 3}"]),  # E09
        ("E09", [COARSE, "stages.1.loss={offpolicy: mis_token, rho_min: 1.2}"]),
        ("E09", [COARSE, "stages.1.loss={offpolicy: tis_token, rho_max: 0.5}"]),
        ("E01", [COARSE, "stages.1.loss.offpolicy=tis"]),
        ("idle", ["stages.1.loss.offpolicy=tis_token"]),  # I03: one code path
        ("idle", ["stages.1.loss.offpolicy=opsm_turn"]),  # I05: one update as well
        ("idle", [COARSE, "stages.1.loss={offpolicy: tis_token, rho_min: 0.1}"]),
        ("idle", [COARSE, "stages.1.loss={offpolicy: decoupled, rho_max: 3}"]),
        ("idle", ["stages.1.loss.drift_max=0.1"]),
        ("E10", ["stages.1.loss.clip=gspo"]),
        ("E10", ["stages.1.loss={low: 3e-4, high: 4e-4}"]),
        ("E11", [ONE_PLAY, "stages.1.estimator=rfpp"]),
        ("E11", ["stages.1.filter={name: success, low: 0.8, high: 0.2}"]),
        ("E12", [ONE_PLAY, "stages.1.estimator=rfpp", "stages.1.filter=none", "stages.1.unfinished=bootstrap"]),
        ("E01", ["stages.1.mask_cap=1.0"]),  # E12
        ("E01", ["stages.1.loss.kl=k1"]),  # E13
        ("E13", ["stages.1.loss={kl: k3, kl_beta: -1}"]),
        ("E17", ["stages.1.schedule={name: alternate, every: 10}"]),
        ("E17", ["stages.1.schedule=alternate", TWO, SECOND]),
        ("E17", [PHASES, RATES, ONE_ROUND]),  # shared weights
        (
            "E17",
            [
                PHASES,
                RATES,
                ONE_ROUND,
                "team.workflow.order=[meta, helper, reasoning]",
                "team.roles.helper={policy: second}",
                SECOND,
            ],
        ),
        ("E23", [PHASES, RATES, TWO, SECOND]),  # three rounds
        ("E23", [PHASES, ONE_ROUND, TWO, SECOND]),  # filter: accuracy
        ("E11", [PHASES, ONE_ROUND, TWO, SECOND, "stages.1.filter=success"]),  # no bounds
        ("E11", ["stages.1.filter={name: success, low: 0, high: 1}"]),
        ("E23", [PHASES, RATES, ONE_ROUND, TWO, SECOND, "stages.1.curriculum={key: level}"]),
        ("E23", ["stages.1.schedule={name: alternate, every: 1, by: epochs}", TWO, SECOND, "stages.1.curriculum={}"]),
        ("idle", ["stages.1.schedule={name: phases, every: 10}", RATES, ONE_ROUND, TWO, SECOND]),
        ("idle", [PHASES, RATES, ONE_ROUND, TWO, SECOND, "stages.1.oversample_max=2"]),
        ("idle", ["stages.1.schedule={name: alternate, every: 10, epochs: 2}", TWO, SECOND]),
        ("idle", ["stages.1.schedule={name: joint, by: epochs}"]),
        ("idle", ["stages.1.watch={mode: off, warmup: 5}"]),
        ("idle", ["stages.1.watch={mode: observe, rollbacks: 1}"]),
        ("E01", ["stages.1.watch.limits={voids: null}"]),
        ("E01", ["stages.1.watch.limits={void/critic: null}"]),
        ("E01", ["stages.1.watch.limits={void: 0.3}"]),
        ("E01", ["stages.1.watch.limits={void: [0.1, true]}"]),
        ("E01", ["stages.1.watch=on"]),
        ("E01", ["stages.1.curriculum={share: 0}"]),
        ("E19", ["stages.1.updates_per_step=33"]),
        ("E20", ["stages.1.estimator={name: gdpo, weights: {other: 1}}"]),
        (
            "E20",
            [
                "stages.1.credit={name: ccpo_solo, guide: meta}",
                "stages.1.estimator={name: gdpo, weights: {answer.correct: 1}}",
            ],
        ),
        ("E22", ["team.roles.meta.top_p=0.9"]),
        ("E22", ["policies.main={model: builtin:tiny, lora_r: 4, lora_dropout: 0.1}"]),
        ("E22", ["team.roles.meta.temperature=0"]),
        ("E01", ["team.roles.meta.trainable=false", "team.roles.reasoning.trainable=false"]),
        ("E01", ["policies.main={model: 'openai:m@http://localhost'}"]),
    ],
)
def test_what_cannot_work_is_refused(code, overrides):
    """rema §7 row 32."""
    assert f"[{code}]" in refused(*overrides)


@pytest.mark.parametrize(
    ("code", "overrides"),
    [
        ("W01", ["stages.1.estimator=grpo", "stages.1.episodes_per_task=3"]),
        ("W02", ["stages.1.estimator={name: rfpp, whiten_scope: batch}"]),
        ("W03", ["stages.1.estimator.scope=role_turn"]),
        ("W04", ["stages.1.estimator.weighting=episode"]),
        ("W04", ["stages.1.loss.aggregate=episode_turn_mean"]),
        ("W05", ["stages.1.loss.clip=none", "stages.1.updates_per_step=3"]),
        ("W06", [COARSE, "stages.1.loss={offpolicy: mis_turn}"]),
        ("W06", [COARSE, "stages.1.loss={offpolicy: mis_token, rho_min: 0.999, rho_max: 1.001}"]),
        ("W07", ["stages.1.estimator=grpo", "stages.1.filter=none"]),
        ("W08", ["stages.1.unfinished=zero"]),
        ("W09", ["stages.1.loss.aggregate=episode_turn_mean"]),
        ("W10", ["team.workflow.order=[meta, helper, reasoning]", "team.roles.helper={policy: second}", SECOND,
                 "stages.1.schedule={name: alternate, every: 2}"]),
        ("W11", [TWO, SECOND]),
        ("W19", [PHASES, RATES, ONE_ROUND, TWO, "policies.second={model: builtin:tiny, scheduler: linear}"]),
        ("W18", ["~team.roles.meta.system"]),
        ("W12", ["team.roles.meta.top_k=5", "policies.main.dtype=bfloat16"]),
        ("W13", ["policies.main.model=some/model", "policies.main.learning_rate=5e-5"]),
        ("W14", ["stages.1.rewards=[{name: answer.correct}, {name: format.boxed, weight: 0.5}]"]),
        ("W15", ["stages.1.estimator={name: rae, initial: 0}"]),
        ("W17", ["~stages.0"]),
        ("I01", []),
        ("I02", ["stages.1.estimator.weighting=episode"]),
        ("I04", ["stages.1.credit=turn_return"]),
        ("I05", []),
        ("I05", ["stages.1.updates_per_step=2", "stages.1.loss.kl=k3"]),
        ("I06", [TWO, SECOND, "stages.1.role_balance=equal"]),
        ("I06", ["stages.1.estimator={name: gdpo, weights: {answer.correct: 1}}"]),
    ],
)  # fmt: skip
def test_what_is_doubtful_is_said(code, overrides):
    """rema §7 rows 31 and 32."""
    assert code in codes(*overrides)


def test_a_quiet_recipe_is_quiet():
    assert codes() == {"I01", "I05"}
    assert codes("stages.1.updates_per_step=2") == set()
    assert codes("stages.1.updates_per_step=2", "stages.1.kl_stop=null", "stages.1.filter=none") == set()


def test_the_presets_say_what_the_specification_says():
    """rema §7 row 32."""
    assert codes("stages.1.preset=stable_v0") == {"I01", "I05"}
    assert codes("stages.1.preset=stable_v0", "stages.1.updates_per_step=2") == set()
    single = [ONE_ROUND, TWO, SECOND, "stages.1.preset=rema_single"]
    assert codes(*single) == {"I01"}
    assert codes("~stages.0", "stages.0.preset=rema_paper") == {"W07", "W08", "W09", "W17", "I02"}


def test_presets_and_short_forms_of_the_watch():
    """rema §7 row 40, credit 5: the recommended preset acts, the paper's only observe, and all can be switched off."""

    def mode(*overrides):
        return Recipe.load(source.parse(BASE, "base"), overrides).stages[1].watch.mode

    assert [mode(f"stages.1.preset={p}") for p in ("stable_v0", "rema_paper")] == ["act", "observe"]
    assert mode() == "observe" and mode("stages.1.watch=off", "stages.1.preset=stable_v0") == "off"
    tree = source.parse(BASE, "base")
    tree["stages"][1] |= {"watch": False, "preset": "stable_v0"}  # what YAML 1.1 makes of `off`
    assert Recipe.load(tree).stages[1].watch.mode == "off"
    kept = Recipe.load(
        source.parse(BASE, "base"), ["stages.1.preset=stable_v0", "stages.1.watch.limits={void: [0.1, null]}"]
    )
    assert kept.stages[1].watch.mode == "act" and kept.stages[1].watch.limits == {"void": (0.1, None)}
    assert Recipe.load(source.parse(kept.to_yaml(), "again")) == kept


def test_where_off_policy_correction_means_something():
    """credit §3.8, §4 I03 and I05."""
    assert codes(COARSE, "stages.1.loss={offpolicy: tis_token}") == {"I01", "I05"}
    assert codes("policies.main.dtype=bfloat16", "stages.1.loss={offpolicy: tis_token}") == {"I01", "I05"}
    assert codes("stages.1.updates_per_step=2", "stages.1.loss={offpolicy: opsm_turn, drift_max: 0.1}") == set()


def test_counterfactual_credits_where_they_fit():
    """credit §3.1, §4 E05 and E15."""
    assert codes("stages.1.credit={name: ccpo_solo, guide: meta}") == {"I01", "I05"}
    tree = [SIBLINGS, ONE_ROUND, ONE_PLAY, "stages.1.filter=none"]  # one tree a row holds what is compared
    for credit in ("c3_suffix", "c3_local", "{name: vine, gamma: 0.9}"):
        assert codes(*tree, f"stages.1.credit={credit}") == {"I01", "I05"}


def test_a_curriculum_stands_in_for_a_measured_cold_start():
    assert "W17" in codes("~stages.0") and "W17" not in codes("~stages.0", "stages.0.curriculum={}")
    assert "W17" not in codes("~stages.0", "stages.0.gate={}")


def test_one_round_has_no_length_bias():
    assert "W09" not in codes("stages.1.loss.aggregate=episode_turn_mean", "team.workflow.max_turns=1")


def test_hot_learning_rates_are_fine_for_adapters_and_for_the_built_in_model():
    assert "W13" not in codes("policies.main.model=some/model", "policies.main.lora_r=8")
    assert "W13" not in codes("policies.main.learning_rate=1e-3")


def test_findings_keep_errors_apart_from_warnings():
    recipe = Recipe.load(source.parse(BASE, "base"))
    broken = recipe.model_copy(update={"stages": (recipe.stages[1].model_copy(update={"episodes_per_task": 1}),)})
    found = rules.findings(broken)
    assert [p.code for p in found.errors] == ["E03", "E11"]
    assert {p.code for p in found.warnings} == {"W17"} and {p.code for p in found.inert} == {"I01", "I05"}
    assert all(p.write for p in (*found.errors, *found.warnings))


def test_two_evaluations_need_two_labels():
    tree = source.parse(BASE, "base")
    tree["stages"] = [*tree["stages"], {"kind": "evaluate", "on": "test", "label": "evaluate-0"}]
    with pytest.raises(RecipeError, match=r"stages\.2\.label: stage 0 has the label 'evaluate-0' too"):
        Recipe.load(tree)


def test_a_decaying_rate_counts_the_steps_a_policy_gets():
    from cothink.session import _schedule_lengths

    alternate = "stages.1.schedule={name: alternate, every: 3}"
    recipe = Recipe.load(source.parse(BASE, "base"), [TWO, SECOND, alternate, "stages.1.steps=10"])
    assert _schedule_lengths(recipe, {}) == {"main": 6, "second": 4}
    epochs = "stages.1.schedule={name: alternate, every: 2, by: epochs, first: second}"
    recipe = Recipe.load(source.parse(BASE, "base"), [TWO, SECOND, epochs, "stages.1.steps=10"])
    rows = [Task(str(k), "", "") for k in range(4)]  # two steps an epoch, four a block
    assert _schedule_lengths(recipe, {"train": rows}) == {"main": 4, "second": 6}
