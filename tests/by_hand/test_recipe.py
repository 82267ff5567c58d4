from __future__ import annotations

import textwrap

import pytest

from cothink import source
from cothink.parts import RL
from cothink.recipe import Recipe
from cothink.resolve import RecipeError, bind, names, nearest, resolve

BASE = """
name: small
team:
  workflow: {name: rema, max_turns: 3}
  roles: {meta: {policy: main}, reasoning: {policy: main, max_tokens: 64}}
policies: {main: {model: builtin:tiny, learning_rate: 3e-4}}
tasks: {train: {name: wordsums, levels: [2, 5]}, test: {name: wordsums, split: test}}
stages:
  - {kind: evaluate, on: test}
  - {kind: rl, steps: 4, tasks_per_step: 2, episodes_per_task: 8}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(BASE)
    return path


def load(*overrides: str) -> Recipe:
    return Recipe.load(source.parse(BASE, "base"), overrides)


def rl(recipe: Recipe) -> RL:
    stage = recipe.stages[1]
    assert isinstance(stage, RL)
    return stage


def complaint(*overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(*overrides)
    return str(caught.value)


def test_a_file_loads_with_its_defaults(file):
    recipe = Recipe.load(file)
    assert recipe.policies["main"].learning_rate == 3e-4  # YAML 1.1 would call this a string
    assert recipe.stages[0].on == "test"  # and this key true
    assert recipe.team.roles["reasoning"].max_tokens == 64 and recipe.team.roles["meta"].max_tokens == 256
    assert recipe.team.workflow.options == {"max_turns": 3}
    stage = rl(recipe)
    assert (stage.estimator.name, stage.loss.aggregate, stage.unfinished) == ("rloo", "const_turn", "mask")
    assert stage.loss.turns_ref == 3.0 and stage.loss.length_ref is None
    assert [r.name for r in stage.rewards] == ["answer.correct"]


def test_overrides_reach_numbers_lists_blocks_and_new_keys():
    recipe = load(
        "stages.1.steps=5",
        "policies.main.learning_rate=1e-5",
        "stages.1.estimator=grpo",
        "stages.1.estimator.std=population",
        "stages.1.filter={name: spread, top_p: 0.8}",
        "team.roles.meta.stop=['###']",
        "~tasks.train.levels",
        "seed=7",
    )
    stage = rl(recipe)
    assert (stage.steps, stage.filter.top_p, recipe.seed) == (5, 0.8, 7)
    assert (stage.estimator.name, stage.estimator.options) == ("grpo", {"std": "population"})
    assert recipe.policies["main"].learning_rate == 1e-5
    assert recipe.roles()["meta"].sampling.stop == ("###",)
    assert recipe.tasks["train"].options == {}


def test_an_override_of_one_alias_leaves_the_other_alone(tmp_path):
    path = tmp_path / "r.yaml"
    two = "policies: {main: &p {model: builtin:tiny, learning_rate: 3e-4}, other: *p}"
    text = BASE.replace("reasoning: {policy: main,", "reasoning: {policy: other,")
    path.write_text("\n".join(two if line.startswith("policies") else line for line in text.splitlines()))
    recipe = Recipe.load(path, ["policies.main.learning_rate=1e-4"])
    assert (recipe.policies["main"].learning_rate, recipe.policies["other"].learning_rate) == (1e-4, 3e-4)


@pytest.mark.parametrize(
    ("override", "where", "near"),
    [
        ("stages.1.stepz=5", "stages.1.stepz", "steps"),
        ("team.roles.meta.temprature=1", "team.roles.meta.temprature", "temperature"),
        ("policies.main.lr_rate=1e-5", "policies.main.lr_rate", "learning_rate"),
        ("stages.1.schedule.evry=1", "stages.1.schedule.evry", "every"),
        ("team.workflow.max_turn=2", "team.workflow.max_turn", "max_turns"),
        ("tasks.train.level=2", "tasks.train.level", "levels"),
        ("engine.max_row=2", "engine.max_row", "max_rows"),
        ("stages.1.loss.clp=ppo", "stages.1.loss.clp", "clip"),
        ("stages.1.estimator.scop=role", "stages.1.estimator.scop", "scope"),
        ("team.workflow=remaa", "team.workflow", "rema"),
        ("tasks.train=wordsum", "tasks.train", "wordsums"),
        ("stages.1.estimator=rlo", "stages.1.estimator", "rloo"),
        ("stages.1.rewards=[{name: answer.corect}]", "stages.1.rewards.0", "answer.correct"),
        ("stages.1.loss.clip=clip_highr", "stages.1.loss.clip", "clip_higher"),
        ("stages.1.loss.aggregate=const_turns", "stages.1.loss.aggregate", "const_turn"),
        ("stages.1.unfinished=masc", "stages.1.unfinished", "mask"),
        ("stages.1.preset=stable", "stages.1.preset", "stable_v0"),
        ("stages.1.kind=rll", "stages.1.kind", "rl"),
        ("stages.1.on=trian", "stages.1.on", "train"),
        ("team.roles.meta.policy=mian", "team.roles.meta.policy", "main"),
        ("stages.1.rewards=[{name: answer.correct, role: metta}]", "stages.1.rewards.0.role", "meta"),
        ("stages.1.rewards=[{name: answer.correct, to: tean}]", "stages.1.rewards.0.to", "team"),
    ],
)
def test_a_misspelt_name_is_an_error_with_its_place_and_the_nearest_name(override, where, near):
    text = complaint(override)
    assert f"{where}: " in text and f"did you mean {near!r}?" in text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("team=null", ("team", "a mapping")),
        ("stages=3", ("stages is a list",)),
        ("stages.1.steps=0", ("stages.1.steps", "greater than 0")),
        ("stages.1.steps=many", ("stages.1.steps", "integer")),
        ("team.roles.meta.top_p=1.5", ("team.roles.meta.top_p", "less than or equal to 1")),
        ("~stages.1.steps", ("stages.1.steps", "missing")),
        ("stages.1.kind=dpo", ("stages.1.steps", "unknown key")),
        ("~team.roles.meta", ("team.roles", "needs the role 'meta'")),
        ("team.roles.judge={policy: main}", ("team.roles.judge", "no role 'judge'")),
        ("policies.spare={model: builtin:tiny}", ("policies.spare", "no role uses")),
        ("stages.1.rewards=[]", ("stages.1.rewards", "at least 1")),
        ("stages.9.steps=1", ("stages.9.steps", "from 0 to 1")),
        ("stages.1.steps.x=1", ("stages.1.steps is 4", "nothing inside")),
        ("seed", ("not an override", "path.to.key=value")),
        ("~tasks.nothing", ("no tasks.nothing",)),
        ("tasks.train.levels=[1, 2", ("not valid YAML",)),
        ("team.workflow.max_turns=some", ("team.workflow.max_turns", "integer")),
        ("stages.1.loss.low=true", ("stages.1.loss.low",)),
        ("stages.1.rewards=[{name: length.overlong}]", ("needs the option 'max_length'",)),
        ("team.workflow='nowhere_at_all:run'", ("no module 'nowhere_at_all'", "nowhere_at_all.py")),
        ("team.workflow='cothink.workflows.rema:runs'", ("has no 'runs'", "did you mean 'run'")),
        ("team.workflow='cothink.workflows.rema:SINGLE'", ("is a dict",)),
        ("name=a/b", ("name",)),
    ],
)
def test_a_wrong_value_says_where_and_what(override, words):
    text = complaint(override)
    assert all(word in text for word in words), text


def test_every_mistake_is_listed_at_once():
    text = complaint("stages.1.steps=0", "policies.main.learning_rate=-1", "team.roles.meta.max_tokens=0")
    assert len(text.split("write:")) == 4


@pytest.mark.parametrize(
    "overrides",
    [
        ["stages.1.loss={clip: none, low: 0.2}"],
        ["stages.1.loss={clip: sapo, dual_clip: 3.0}"],
        ["stages.1.loss={kl: none, kl_beta: 0.1}"],
        ["stages.1.loss={aggregate: turn_mean, turns_ref: 3}"],
        ["stages.1.loss={aggregate: const_turn, length_ref: 64}"],
        ["stages.1.unfinished=zero", "stages.1.mask_cap=0.2"],
        ["stages.1.schedule={name: joint, every: 10}"],
        ["stages.1.schedule={every: 10}"],
        ["stages.1.credit={name: broadcast, gamma: 0.9}"],
        ["stages.1.filter={name: none, low: 0.1}"],
        ["stages.1.filter={name: accuracy, top_p: 0.5}"],
        ["stages.1.filter=none", "stages.1.oversample_max=2"],
        ["policies.main.lora_alpha=16"],
        ["policies.main.lora_dropout=0.1"],
        ["team.roles.reasoning={policy: still, trainable: false}",
         "policies.still={model: builtin:tiny, learning_rate: 1e-5}"],
    ],
)  # fmt: skip
def test_a_written_setting_that_does_nothing_is_an_error(overrides):
    assert "does nothing" in complaint(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["stages.1.preset=stable_v0"],
        ["stages.1.preset=stable_v0", "stages.1.updates_per_step=2"],
        ["stages.1.preset=rema_paper"],
        ["stages.1.preset=rema_paper", "stages.1.loss.clip=none"],
        ["stages.1.preset=rema_paper", "stages.1.loss.aggregate=const_turn"],
        ["stages.1.preset=stable_v0", "stages.1.estimator=grpo", "stages.1.filter=none", "stages.1.unfinished=keep"],
        ["stages.1.loss.aggregate=const_token", "policies.main.lora_r=8", "trackers=[tensorboard]"],
        ["stages.1.rewards=[{name: format.no_leak, role: meta, weight: 0.1, to: turn}]", "stages.1.kl_stop=null"],
        ["team.roles.meta.system='Plan: no \"answers\"\n\n# on: 3e-4'", "team.roles.meta.stop=['3e-4', 'on', '1:30']"],
    ],
)
def test_the_resolved_recipe_reloads_equal(overrides):
    recipe = load(*overrides)
    text = recipe.to_yaml()
    again = Recipe.load(source.parse(text, "dump"))
    assert again == recipe and again.to_yaml() == text


def test_a_preset_fills_in_what_the_stage_does_not_write():
    stage = rl(load("stages.1.preset=rema_paper", "stages.1.updates_per_step=2"))
    assert stage.loss.options | {"aggregate": stage.loss.aggregate} == {
        "ratio": "turn_geo", "clip": "ppo", "low": 0.2, "high": 0.2, "dual_clip": 3.0, "log_ratio_max": 3.0,
        "kl": "none", "aggregate": "episode_turn_mean",
    }  # fmt: skip
    assert (stage.estimator.name, stage.estimator.options["std"], stage.filter.name) == ("grpo", "unbiased", "none")
    assert (stage.updates_per_step, stage.unfinished, stage.kl_stop) == (2, "zero", None)
    assert rl(load("stages.1.preset=stable_v0")).loss.options["ratio"] == "token"
    assert rl(load("stages.1.preset=stable_v0", "stages.1.updates_per_step=2")).loss.options["ratio"] == "turn_geo"


def test_another_estimator_does_not_inherit_the_presets_options():
    stage = rl(load("stages.1.preset=rema_paper", "stages.1.estimator=rfpp"))
    assert (stage.estimator.name, stage.estimator.options) == ("rfpp", {})


def test_denominators_follow_the_workflow_unless_written():
    assert rl(load("team.workflow.max_turns=1")).loss.turns_ref == 1.0
    assert rl(load("stages.1.loss={turns_ref: 5}")).loss.turns_ref == 5.0
    loss = rl(load("stages.1.loss=policy", "stages.1.loss.aggregate=const_token")).loss
    assert (loss.turns_ref, loss.length_ref) == (3.0, 256.0)


def test_lora_alpha_defaults_to_twice_the_rank():
    assert load("policies.main.lora_r=8").policies["main"].lora_alpha == 16.0
    assert load("policies.main.lora_r=8", "policies.main.lora_alpha=8").policies["main"].lora_alpha == 8.0


def test_roles_take_the_workflows_prompts_unless_written():
    roles = load("team.roles.meta.system=Plan.", "team.workflow.max_turns=1").roles()
    assert roles["meta"].system == "Plan."
    assert roles["reasoning"].system.startswith("You are given a question and an instruction")
    assert load().roles()["reasoning"].system != roles["reasoning"].system
    assert load("team.roles.meta.system=''").roles()["meta"].system == ""


def test_yaml_reads_as_people_write_it():
    text = "{a: 3e-4, b: 1E5, c: on, d: 010, e: 1:30, f: 2024-01-01, g: .5, h: true, i: null, j: 1_000, k: no, l: -3}"
    assert source.parse(text, "x") == {
        "a": 3e-4, "b": 1e5, "c": "on", "d": 10, "e": "1:30", "f": "2024-01-01", "g": 0.5, "h": True, "i": None,
        "j": 1000, "k": "no", "l": -3,
    }  # fmt: skip
    with pytest.raises(RecipeError, match=r"line 2.*'a' is written twice"):
        source.parse("a: 1\na: 2\n", "x")


def test_a_missing_file_names_its_neighbour(file):
    with pytest.raises(RecipeError, match=r"did you mean 'small\.yaml'"):
        Recipe.load(file.with_name("smal.yaml"))


def test_the_users_own_code_is_a_name_too(tmp_path, monkeypatch):
    """rema §7 row 16."""
    (tmp_path / "my_part.py").write_text(
        textwrap.dedent("""
        from cothink.types import Finish
        ROLES = {"only": "Answer."}
        async def run(task, team, *, times: int = 1):
            turn = await team.chat("only").say(task.question)
            return Finish("finished", turn.text, turn.id)
        def reward(task, turn, episode, bonus=1.0):
            return bonus
    """)
    )
    monkeypatch.chdir(tmp_path)
    mine = ["team.workflow={name: 'my_part:run', times: 2}", "team.roles={only: {policy: main}}"]
    recipe = load(*mine)
    assert recipe.roles()["only"].system == "Answer." and rl(recipe).loss.turns_ref == 1.0
    assert "did you mean 'times'" in complaint("team.workflow={name: 'my_part:run', time: 2}")
    text = complaint(*mine, "stages.1.rewards=[{name: 'my_part:reward', bonus: 2}]")
    assert "positional parameter" in text and "*, bonus" in text


def test_bind_converts_as_annotated_and_keeps_what_it_cannot_check():
    def function(x, *, pair: tuple[int, int] = (1, 2), rate: float = 0.1, unknown: Missing = None):  # noqa: F821
        return pair, rate, unknown

    assert bind(function, {"pair": [3, 4], "rate": 1, "unknown": "kept"}, "here")(0) == ((3, 4), 1.0, "kept")
    with pytest.raises(RecipeError, match=r"here\.pair"):
        bind(function, {"pair": [3]}, "here")


def test_names_are_found_and_resolve():
    for kind, some in (("workflow", "rema"), ("reward", "answer.correct"), ("estimator", "grpo"), ("loss", "policy")):
        assert some in names(kind)
        for name in names(kind):
            assert callable(resolve(kind, name))
    assert nearest("remma", names("workflow")) == "rema" and nearest("zzzz", names("workflow")) is None
