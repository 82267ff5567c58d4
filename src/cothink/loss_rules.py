"""What the loss of an rl stage may not say, should not say, and says in vain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from cothink.losses import RANGES
from cothink.resolve import Problem

TURN_RATIOS = ("turn_geo", "turn_arith")
NARROW = 5e-3  # clip widths below this are made for turn-level ratios (GSPO: 3e-4)
LONG = 20  # tokens; a product of more ratios explodes or vanishes (spec/credit.md W06)
BAND = 0.01  # a narrower band of rho drops nearly everything

Unused = list[tuple[bool, str, Iterable[str]]]


def findings(s: Any) -> Iterator[Problem]:
    """Everything there is to say about one stage; `s` is the stage as the rules see it."""
    yield from _aggregation(s)
    if s.known_loss:
        for rule in (_ratio_and_clip, _kl, _off_policy):
            yield from rule(s)


def _ratio_and_clip(s: Any) -> Iterator[Problem]:
    ratio, clip, dual = s.option("ratio"), s.option("clip"), s.option("dual_clip")
    usual = RANGES.get(str(clip), (None, None))
    low, high = (usual[k] if s.option(n) is None else s.option(n) for k, n in enumerate(("low", "high")))
    if clip in ("ppo", "clip_higher", "gspo", "cispo"):
        for name, value in (("low", low), ("high", high)):
            if value is not None and value < 0:
                yield s.error("E09", f"loss.{name}", f"{value} is negative", "the width of the clip, such as 0.2")
        if low is not None and low >= 1 and clip != "cispo":
            yield s.error("E09", "loss.low", f"1 - {low} is no ratio", "a number below 1, such as 0.2")
    if clip in ("ppo", "clip_higher") and dual is not None and high is not None and dual <= 1 + high:
        what = f"dual_clip {dual} cuts below the ordinary clip at {1 + high:g}"
        yield s.error("E09", "loss.dual_clip", what, "3.0, or null to turn it off")
    narrow = clip in ("ppo", "clip_higher") and any(w is not None and 0 <= w < NARROW for w in (low, high))
    if ratio == "token" and (clip == "gspo" or narrow):
        widths = f"widths {low}/{high}" if narrow else "gspo's widths"
        yield s.error("E10", "loss.clip", f"{widths} clip nearly every token ratio", "ratio: turn_geo, or low: 0.2")
    if clip in ("cispo", "none") and s.stage.updates_per_step > 2:
        what = f"clip {clip} sets no trust region over {s.stage.updates_per_step} updates"
        yield s.warn("W05", "loss.clip", what, "clip: clip_higher, or updates_per_step: 2 or less")


def _aggregation(s: Any) -> Iterator[Problem]:
    aggregate, loss = s.stage.loss.aggregate, s.stage.loss
    if s.known_loss and s.option("ratio") in TURN_RATIOS and "token" in aggregate:
        what = f"ratio {s.option('ratio')} makes one term per turn; {aggregate} weighs tokens"
        yield s.error("E07", "loss.aggregate", what, "aggregate: const_turn, turn_mean or episode_turn_mean")
    if aggregate.startswith("const_") and loss.turns_ref is None:
        yield s.error("E08", "loss.turns_ref", f"{aggregate} divides by it", "the expected turns of an episode")
    if aggregate == "const_token" and loss.length_ref is None:
        yield s.error("E08", "loss.length_ref", "const_token divides by it", "the token limit of one turn")
    if aggregate == "episode_turn_mean" and s.turns > 1:
        what = "dividing by an episode's own number of turns (1/T) moves the optimum"
        yield s.warn("W09", "loss.aggregate", what, "aggregate: const_turn")


def _kl(s: Any) -> Iterator[Problem]:
    kl, beta = s.option("kl"), s.option("kl_beta") or 0.0
    if beta < 0:
        yield s.error("E13", "loss.kl_beta", f"{beta} would reward leaving the reference", "0 or more, such as 1e-3")
    if kl != "none" and beta == 0:
        yield s.error("I05", "loss.kl", f"kl {kl} at kl_beta 0", "")


def _off_policy(s: Any) -> Iterator[Problem]:
    kind, low, high = s.option("offpolicy"), s.option("rho_min"), s.option("rho_max")
    if kind.startswith("mis") and not 0 <= low < 1 <= high:
        yield s.error("E09", "loss.rho_min", f"[{low:g}, {high:g}] does not hold 1", "rho_min: 0.5, rho_max: 2")
    if kind.startswith("tis") and high < 1:
        yield s.error("E09", "loss.rho_max", f"{high:g} cuts tokens on which both sides agree", "1 or more, such as 2")
    if kind.startswith("mis") and high - low < 2 * BAND:
        what = f"a band of [{low:g}, {high:g}] drops nearly everything"
        yield s.warn("W06", "loss.rho_min", what, "rho_min: 0.5, rho_max: 2")
    longest = max((role.max_tokens for role in s.roles.values()), default=0)
    if kind in ("tis_turn", "mis_turn") and longest > LONG:
        what = f"{kind} multiplies rho over up to {longest} tokens of a turn: it explodes, or drops nearly everything"
        yield s.warn("W06", "loss.offpolicy", what, f"offpolicy: {kind.replace('turn', 'token')}")


def idle(recipe: Any, stage: Any) -> Unused:
    """Settings of the loss that do nothing beside the others: (applies, reason, keys)."""
    aggregate = stage.loss.aggregate
    unused: Unused = [
        (not aggregate.startswith("const_"), f"{aggregate} divides by what is there", ["loss.turns_ref"]),
        (aggregate != "const_token", "only const_token divides by it", ["loss.length_ref"]),
    ]
    if stage.loss.name != "policy":
        return unused
    options = stage.loss.options
    clip, kl = options.get("clip", "clip_higher"), options.get("kl", "none")
    return [
        *unused,
        (clip in ("sapo", "none"), f"clip {clip} has no widths", ["loss.low", "loss.high"]),
        (clip not in ("ppo", "clip_higher"), f"clip {clip} has no dual clip", ["loss.dual_clip"]),
        (kl == "none", "kl is none", ["loss.kl_beta"]),
        *_idle_off_policy(recipe, stage, str(options.get("offpolicy", "none"))),
    ]


def _idle_off_policy(recipe: Any, stage: Any, kind: str) -> Unused:
    same = "the engine samples with the trainer's own code in float32, so that rho is 1"
    masks, alone = kind == "opsm_turn", stage.updates_per_step == 1
    return [
        (not kind.startswith("mis"), f"offpolicy {kind} has no lower bound", ["loss.rho_min"]),
        (kind[:3] not in ("tis", "mis"), f"offpolicy {kind} has no upper bound", ["loss.rho_max"]),
        (not masks, f"offpolicy {kind} measures no drift", ["loss.drift_max"]),
        (kind not in ("none", "opsm_turn") and _one_path(recipe), same, ["loss.offpolicy"]),
        (masks and alone and _one_path(recipe), f"one update a step, and {same}", ["loss.offpolicy"]),
    ]


def _one_path(recipe: Any) -> bool:
    """Whether what is sampled and what is trained are the same numbers, up to the last digits."""
    trained = {role.policy for role in recipe.team.roles.values() if role.trainable}
    exact = all(p in recipe.policies and recipe.policies[p].dtype == "float32" for p in trained)
    return recipe.engine.name == "local" and exact and recipe.engine.options.get("dtype", "own") in ("own", "float32")
