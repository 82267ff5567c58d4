"""Whether a recipe fits: the memory of one process, stage by stage, and which setting to change where it does not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cothink import footprint as fp
from cothink import models, workload
from cothink.footprint import Build, Load
from cothink.parts import DPO, RL, SFT, Evaluate, PolicyPart
from cothink.recipe import Recipe
from cothink.resolve import Problem, effective, resolve
from cothink.sft_rules import taught
from cothink.shapes import shape
from cothink.workload import Work

GIB = 1 << 30
UNITS = {"MB": 1e6, "GB": 1e9, "MiB": 1 << 20, "GiB": GIB}
LIBRARIES = 1e9
"""What CUDA, its kernels and NCCL take of a GPU before any tensor: an assumption, not measured here."""
CACHE_GIB = 4.0
"""The local engine's cache, for all models together, unless a recipe says more (`engines.local.CACHE_GIB`)."""
VLLM_SHARE = 0.92
"""The share of a GPU that vLLM takes by default (its `gpu_memory_utilization`)."""
LEAST_TOKENS = 1024
"""A smaller microbatch is not proposed."""


@dataclass(frozen=True, slots=True)
class Device:
    """What one process has: `memory` in bytes, if that is known, on a GPU or a CPU; one of `processes`.

    `shards` divides weights, gradients and optimiser among processes that hold a part each.
    """

    memory: float | None = None
    gpu: bool = True
    processes: int = 1
    shards: int = 1


@dataclass(frozen=True)
class Moment:
    """A moment of a stage at which memory may be fullest, and what fills it, in bytes."""

    stage: int
    what: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """All parts together."""
        return sum(self.parts.values())


def size(text: str) -> float:
    """Bytes of `80GB`; raises ValueError with what to write."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text)
    if found is None or found[2] not in UNITS or not float(found[1]):
        number = found[1] if found and float(found[1]) else "80"
        raise ValueError(f"{text!r} is no size of memory; write a number and a unit, such as {number}GB or {number}GiB")
    return float(found[1]) * UNITS[found[2]]


def build(part: PolicyPart, gpu: bool) -> Build:
    """How a policy of a recipe computes; raises ShapeError for a model that is not known here."""
    narrow = part.dtype == "bfloat16" or (part.dtype == "auto" and gpu)
    dropout = bool(part.lora_dropout) and part.lora_r is not None
    made = shape(part.model)
    return Build(made, part.lora_r, narrow, part.gradient_checkpointing, dropout, part.target_modules)


def moments(recipe: Recipe, work: Work, device: Device) -> list[Moment]:
    """Every moment of a run that may be its fullest; raises ShapeError for a model that is not known here."""
    return list(_Run(recipe, work, device).moments())


class _Run:
    """The policies of a recipe and what they hold, as its stages go by."""

    def __init__(self, recipe: Recipe, work: Work, device: Device):
        self.recipe, self.work, self.device = recipe, work, device
        inside = {n: p for n, p in recipe.policies.items() if not models.is_outside(p.model)}
        self.built = {name: build(part, device.gpu) for name, part in inside.items()}
        self.parts = inside
        seats = recipe.team.roles.values()
        self.learning = [n for n in inside if any(s.trainable and s.policy == n for s in seats)]
        self.bases: dict[Any, str] = {}  # adapters over one model in one precision share it
        for name, how in self.built.items():
            self.bases.setdefault(name if how.rank is None else (inside[name].model, how.narrow), name)
        self.optimisers: set[str] = set()
        self.references: set[str] = set()

    def moments(self) -> Iterator[Moment]:
        for k, stage in enumerate(self.recipe.stages):
            if isinstance(stage, RL):
                if stage.loss.options.get("kl", "none") != "none":
                    self.references |= {n for n in self.learning if self.built[n].rank is None}
                self.optimisers |= set(self.learning)
                yield self._sampling(k, stage)
                yield from self._learning(k, stage)
            elif isinstance(stage, SFT | DPO):
                yield from self._taught(k, stage)
            else:
                yield self._sampling(k, stage)

    def _held(self) -> dict[str, float]:
        """What is there all the time."""
        shards, gpu = self.device.shards, self.device.gpu
        adapters = [h for h in self.built.values() if h.rank is not None]
        held = {
            "weights": sum(self.built[n].weights for n in self.bases.values()) / shards,
            "adapters": sum(h.learned for h in adapters) * fp.WIDE / shards,
            "optimiser": sum(self.built[n].learned for n in self.optimisers) * fp.MOMENTS * fp.WIDE / shards,
            "reference": sum(self.built[n].weights for n in self.references) / shards,
            "libraries": LIBRARIES if gpu else 0.0,
        }
        return held | self._engine(held["weights"])

    def _engine(self, weights: float) -> dict[str, float]:
        """The engine's own copy of weights and its cache of keys and values; other machines' engines take nothing."""
        seen = effective(resolve("engine", self.recipe.engine.name), self.recipe.engine.options)
        name, memory = self.recipe.engine.name, self.device.memory
        if not self.built or name not in ("local", "vllm") or seen.get("server"):
            return {}
        kinds = {n: self._width(self.built[n], seen["dtype"]) for n in self.bases.values()}
        copies = {n: self.built[n].shape.parameters * w for n, w in kinds.items()}
        asked = seen["cache_gib"]
        if name == "vllm":
            if asked is None and memory is not None and self.device.gpu:
                return {"vLLM": (seen["gpu_memory_utilization"] or VLLM_SHARE) * memory}
            copy = sum(copies.values()) / seen["tensor_parallel_size"]
            return {"engine's copy": copy, "cache": (CACHE_GIB if asked is None else asked) * GIB}
        ours = {n: fp.WIDE if self.built[n].rank is None else self.built[n].stream for n in kinds}
        free = CACHE_GIB if memory is None else min(CACHE_GIB, max(0.0, memory - weights) / 4 / GIB)
        cache = 0.0
        for n, width in kinds.items():
            each = fp.keys(self.built[n].shape, width if self.device.gpu else fp.WIDE)
            limit = asked if asked is not None else min(free, CACHE_GIB / len(kinds))
            cache += min(limit * GIB, each * self._cached(n))
        return {"engine's copy": float(sum(c for n, c in copies.items() if kinds[n] != ours[n])), "cache": cache}

    def _width(self, how: Build, dtype: str) -> int:
        if dtype in ("own", "auto"):
            return how.computing
        return fp.NARROW if dtype == "bfloat16" else fp.WIDE

    def _cached(self, base: str) -> float:
        """The most tokens that plays of any stage leave in the cache of a model."""
        own = self.built[base].rank is None
        users = [n for n in self.built if n == base or (not own and self._shares(n, base))]
        return max(self.work.cached(stage, users, self.device.processes) for stage in self.recipe.stages)

    def _shares(self, name: str, base: str) -> bool:
        how = self.built[name]
        same = (self.parts[name].model, how.narrow) == (self.parts[base].model, self.built[base].narrow)
        return how.rank is not None and same

    def _sampling(self, k: int, stage: Any) -> Moment:
        """The engine's fullest pass, while nothing learns; roles that speak untrained need two more sets of weights."""
        if self.recipe.engine.name != "local" or not self.built:
            return Moment(k, "sampling", self._held())
        seen = effective(resolve("engine", "local"), self.recipe.engine.options)
        plays = self.recipe.team.concurrency
        if isinstance(stage, RL):
            plays = min(plays, stage.tasks_per_step * stage.episodes_per_task)
        prompts = sum(c.length for c in self.work.chats) * plays
        widest = max(fp.speaking(h, min(seen["max_rows"], plays), prompts) for h in self.built.values())
        again = stage.untrained if isinstance(stage, Evaluate) else ()
        kept = sum(2 * fp.WIDE * self.built[n].learned for n in again if n in self.built)
        return Moment(k, "sampling", self._held() | {"one pass": widest + kept})

    def _learning(self, k: int, stage: RL) -> Iterator[Moment]:
        for name in self.learning:
            mine = [c for c in self.work.chats if c.policy == name]
            if mine:
                load, several = workload.step(mine, stage, self.device.processes)
                yield from self._step(k, name, self.built[name], load, several)

    def _taught(self, k: int, stage: SFT | DPO) -> Iterator[Moment]:
        """TRL's trainers: rows as long as they may be, an optimiser of their own that ends with them."""
        roles = self.recipe.roles()
        for name in dict.fromkeys(roles[r].policy for r in taught(self.recipe, stage)):
            how = self.built[name]
            step = stage.rows_per_step if isinstance(stage, SFT) else stage.pairs_per_step
            small = stage.microbatch_rows if isinstance(stage, SFT) else stage.microbatch_pairs
            tokens = (small or step) * stage.max_length * (1 if isinstance(stage, SFT) else 2)
            second = how.learned * fp.WIDE if isinstance(stage, DPO) and how.rank is not None else 0
            load = Load(tokens, tokens, stage.max_length, tokens, flat=False)
            several = (small or step) < step
            for moment in self._step(k, name, how, load, several):
                own = how.learned * fp.MOMENTS * fp.WIDE / self.device.shards
                more = {"optimiser": moment.parts["optimiser"] + own, "adapters": moment.parts["adapters"] + second}
                yield replace(moment, parts={**moment.parts, **more})

    def _step(self, k: int, name: str, how: Build, load: Load, several: bool) -> Iterator[Moment]:
        """The backward pass of the last of several microbatches, and the optimiser's step."""
        held = self._held()
        gradients = how.learned * fp.WIDE / self.device.shards
        passing = {"activations": fp.activations(how, load), "output layer": fp.output(how, load)}
        yield Moment(k, f"learning {name}", held | {"gradients": gradients if several else 0.0} | passing)
        step = fp.stepping(how, self.device.gpu) / self.device.shards
        if self.device.processes > 1:
            step = max(step, 2 * min(fp.BUCKET, how.learned) * fp.WIDE)
        yield Moment(k, f"stepping {name}", held | {"gradients": gradients, "one step": step})


# in words


def table(recipe: Recipe, found: Sequence[Moment], device: Device) -> Iterator[str]:
    """The parts of the fullest moment, the fullest moment of every stage, and whether that fits."""
    peak = max(found, key=lambda m: m.total)
    several = f" each of {device.processes} processes" if device.processes > 1 else ""
    yield f"memory{' of' + several if several else ''}, predicted, at its fullest ({_where(recipe, peak)}):"
    for name, count in sorted(peak.parts.items(), key=lambda part: -part[1]):
        if count >= 0.5e6:
            yield f"  {name:<14}{_gb(count):>10}"
    yield f"  {'together':<14}{_gb(peak.total):>10}" + (f" of {_gb(device.memory)}" if device.memory else "")
    alike: dict[tuple[str, str], list[str]] = {}
    for k, moment in _by_stage(found).items():
        alike.setdefault((recipe.stages[k].kind, _gb(moment.total)), []).append(str(k))
    yield "  by stage: " + "; ".join(f"{kind} ({', '.join(ks)}) {most}" for (kind, most), ks in alike.items())
    if device.memory is not None and peak.total <= device.memory:
        spare = device.memory - peak.total
        tight = "; predictions are within 20%, so try one step first" if spare < 0.2 * peak.total else ""
        yield f"  it fits: {_gb(spare)} to spare ({100 * spare / device.memory:.0f}%){tight}"


def line(recipe: Recipe, found: Sequence[Moment]) -> str:
    """The fullest moment in one line."""
    peak = max(found, key=lambda m: m.total)
    parts = ", ".join(
        f"{name} {_gb(count)}" for name, count in sorted(peak.parts.items(), key=lambda p: -p[1]) if count >= 0.5e6
    )
    return f"memory: about {_gb(peak.total)} of one GPU, at its fullest ({_where(recipe, peak)}): {parts}"


def problems(recipe: Recipe, work: Work, device: Device) -> list[Problem]:
    """Nothing where a recipe fits; else the settings that make it fit, one alone where one is enough."""
    assert device.memory is not None
    peak = max(moments(recipe, work, device), key=lambda m: m.total)
    if peak.total <= device.memory:
        return []
    what = f"{_where(recipe, peak)}: {_gb(peak.total)} do not fit in {_gb(device.memory)}"
    alone = {}
    for name, changed in changes(recipe):
        total = max(m.total for m in moments(changed, work, device))
        if total <= device.memory:
            alone.setdefault(name.rpartition("=")[0], f"{name} ({_gb(total)})")
    return [Problem("memory", what, "  or  ".join(alone.values()) or _together(recipe, work, device, peak.total))]


def _together(recipe: Recipe, work: Work, device: Device, total: float) -> str:
    """The settings that make a recipe fit where none alone does, or how far they lead."""
    done: dict[str, str] = {}
    for name in [name for name, _ in changes(recipe)]:
        tried = dict(changes(recipe)).get(name)
        less = total if tried is None else max(m.total for m in moments(tried, work, device))
        if tried is not None and less < 0.999 * total:
            done[name.rpartition("=")[0]], recipe, total = name, tried, less
            if device.memory is not None and total <= device.memory:
                return f"{' '.join(done.values())} ({_gb(total)})"
    still = f": {' '.join(done.values())} still takes {_gb(total)}" if done else ""
    return f"a smaller model or a larger device{still}"


def changes(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Overrides that take memory away, gentle ones first, and the recipe that each makes."""
    for k, stage in enumerate(recipe.stages):
        yield from ((n, _with_stage(recipe, k, s)) for n, s in _smaller(f"stages.{k}", stage))
    policies = {n: p for n, p in recipe.policies.items() if not models.is_outside(p.model)}
    for words, update, meant in (
        ("gradient_checkpointing=true", {"gradient_checkpointing": True}, lambda p: not p.gradient_checkpointing),
        ("dtype=bfloat16", {"dtype": "bfloat16"}, lambda p: p.dtype == "float32"),
        (
            "lora_r=16",
            {"lora_r": 16, "lora_alpha": 32.0},
            lambda p: p.lora_r is None or p.lora_r > 16,
        ),
    ):
        mine = [n for n, p in policies.items() if meant(p)]
        if mine:
            updated = {**recipe.policies, **{n: policies[n].model_copy(update=update) for n in mine}}
            name = " ".join(f"policies.{n}.{words}" for n in mine)
            yield name, recipe.model_copy(update={"policies": updated})
    asked = recipe.engine.options.get("cache_gib", CACHE_GIB)
    if recipe.engine.name in ("local", "vllm") and "server" not in recipe.engine.options:
        for less in (x for x in (8, 4, 2, 1) if x < asked):
            options = {**recipe.engine.options, "cache_gib": less}
            yield (
                f"engine.cache_gib={less}",
                recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"options": options})}),
            )


def _smaller(where: str, stage: Any) -> Iterator[tuple[str, Any]]:
    """Smaller microbatches of a stage, by halves."""
    if isinstance(stage, RL):
        tokens = stage.microbatch_tokens // 2
        while tokens >= LEAST_TOKENS:
            yield f"{where}.microbatch_tokens={tokens}", stage.model_copy(update={"microbatch_tokens": tokens})
            tokens //= 2
    elif isinstance(stage, SFT | DPO):
        key = "microbatch_rows" if isinstance(stage, SFT) else "microbatch_pairs"
        step = stage.rows_per_step if isinstance(stage, SFT) else stage.pairs_per_step
        rows = (getattr(stage, key) or step) // 2
        while rows >= 1:
            if step % rows == 0:
                yield f"{where}.{key}={rows}", stage.model_copy(update={key: rows})
            rows //= 2


def _with_stage(recipe: Recipe, k: int, stage: Any) -> Recipe:
    stages = tuple(stage if i == k else s for i, s in enumerate(recipe.stages))
    return recipe.model_copy(update={"stages": stages})


def _by_stage(found: Sequence[Moment]) -> dict[int, Moment]:
    most: dict[int, Moment] = {}
    for moment in found:
        if moment.stage not in most or moment.total > most[moment.stage].total:
            most[moment.stage] = moment
    return most


def _where(recipe: Recipe, moment: Moment) -> str:
    return f"stage {moment.stage}, {recipe.stages[moment.stage].kind}, {moment.what}"


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
