"""A trained team as a folder for others: weights that transformers and peft load, cards, prompts, recipe, rows."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cothink import models, source
from cothink.export import cards, rows
from cothink.parts import Evaluate
from cothink.recipe import Recipe
from cothink.record import RunError, last_checkpoint, versions

TEAM = "team.json"
"""Marks the folder of an exported team and says what is in it."""
BESIDE = {".json", ".jinja", ".safetensors", ".bin", ".txt", ".model", ".tiktoken", ".py"}
"""Endings of the files that make up a model's folder."""


@dataclass(frozen=True, slots=True)
class Made:
    """An exported folder, and what was written there, a line each."""

    folder: Path
    lines: list[str]


def export(
    run: str | Path, to: str | Path, *, merge: bool = False, rows: bool = False, checkpoint: str | None = None
) -> Made:
    """Writes the team of a run folder into a new or empty folder; nothing is there before everything is.

    Full weights stay full weights and adapters stay adapters, unless `merge` makes full weights of them. `rows` adds
    the training rows of the run's episodes. `checkpoint` names one of the run's checkpoints (default: the newest).
    """
    run, to = Path(run), Path(to)
    recipe, place = _sources(run, checkpoint)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise RunError(f"export: {to} is there already; name a new or an empty folder with --to")
    part = to.resolve().with_name(to.resolve().name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        lines = _write(run, recipe, place, part, merge, rows)
        to.mkdir(exist_ok=True)
        for item in part.iterdir():
            os.replace(item, to / item.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Made(to, [*lines, f"{to}: {place.name} of {run}; cothink serve {to} serves it, README.md says the rest"])


def _sources(run: Path, checkpoint: str | None) -> tuple[Recipe, Path]:
    """The recipe of a run and the checkpoint to export."""
    if not (run / "recipe.yaml").exists() or (run / TEAM).exists():
        raise RunError(f"export: {run} is not a run folder. Name a folder that `cothink run` wrote")
    place = last_checkpoint(run) if checkpoint is None else run / "checkpoints" / checkpoint
    if place is None:
        raise RunError(f"export: {run} has no checkpoint yet: nothing in it was trained")
    if not place.is_dir() or place.parent != run / "checkpoints":
        known = ", ".join(sorted(p.name for p in (run / "checkpoints").iterdir() if p.is_dir()))
        raise RunError(f"export: {run} has no checkpoint {checkpoint!r}; it has {known or 'none'}")
    return Recipe.load(run / "recipe.yaml"), place


def _write(run: Path, recipe: Recipe, place: Path, to: Path, merge: bool, with_rows: bool) -> list[str]:
    lines, told = [], {}
    for name, part in recipe.policies.items():
        if models.is_outside(part.model):
            told[name] = {"kind": "outside", "model": part.model}
            continue
        if not (place / name).is_dir():
            raise RunError(f"export: {place} has no weights of the policy {name!r}: the engine of this run has none")
        told[name] = _policy(name, part, place / name, to, merge)
        lines.append(f"policies/{name}: {cards.KINDS[told[name]['kind']]}")
    team = _team(recipe, told, place)
    _dump(to / TEAM, team)
    (to / "recipe.yaml").write_text(source.dump(_playable(recipe, told)), encoding="utf-8")
    training = to / "training"
    training.mkdir()
    shutil.copy(run / "recipe.yaml", training / "recipe.yaml")
    results = json.loads((run / "results.json").read_text()) if (run / "results.json").exists() else {}
    results = {label: {k: v for k, v in found.items() if k != "per_task"} for label, found in results.items()}
    _dump(training / "results.json", results)
    for name in told:
        if told[name]["kind"] != "outside":
            (to / "policies" / name / "README.md").write_text(cards.policy(name, team), encoding="utf-8")
    (to / "README.md").write_text(cards.team(team, results), encoding="utf-8")
    return [*lines, *(rows.write(run, recipe, to / "rows") if with_rows else [])]


def _policy(name: str, part: Any, saved: Path, to: Path, merge: bool) -> dict[str, Any]:
    """Puts one policy's weights into `to/policies/NAME`, and the base of an adapter beside it where it is local."""
    place = to / "policies" / name
    base = models.where(part.model)
    local = Path(base).is_dir()
    # A folder's place on this machine means nothing elsewhere.
    told = {"model": Path(base).name if base == part.model and local else part.model, "base": None if local else base}
    if not (saved / "adapter_config.json").exists():
        _copy(saved, place)
        return {"kind": "full", **told}
    if merge:
        _merge(base, saved, place, part.dtype)
        return {"kind": "merged", **told}
    _copy(saved, place)
    if told["base"] is None:
        told["base"] = f"bases/{re.sub(r'[^A-Za-z0-9_.-]+', '-', told['model'])}"
        if not (to / told["base"]).exists():
            _copy(Path(base), to / told["base"])
    config = json.loads((place / "adapter_config.json").read_text()) | {"base_model_name_or_path": told["base"]}
    _dump(place / "adapter_config.json", config)
    return {"kind": "adapter", **told}


def _copy(folder: Path, to: Path) -> None:
    """The files of a model, and not what else lies in its folder."""
    to.mkdir(parents=True)
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.suffix in BESIDE:
            shutil.copyfile(file, to / file.name)


def _merge(base: str, saved: Path, to: Path, dtype: str) -> None:
    """Full weights of an adapter over its base."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged: Any = PeftModel.from_pretrained(model, str(saved)).merge_and_unload()
    if dtype == "bfloat16":  # merged in full precision, kept as it was trained
        merged = merged.to(torch.bfloat16)
    merged.save_pretrained(to)
    AutoTokenizer.from_pretrained(saved).save_pretrained(to)
    for file in to.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors writes 0600, which locks out whoever serves the model


def _team(recipe: Recipe, told: dict[str, Any], place: Path) -> dict[str, Any]:
    """What `team.json` says: who is in the team, with which prompt and weights."""
    seats = recipe.team.roles
    roles = {
        name: {
            "policy": role.policy,
            "folder": None if told[role.policy]["kind"] == "outside" else f"policies/{role.policy}",
            "system": role.system,
            **{k: getattr(seats[name], k) for k in ("temperature", "top_p", "top_k", "max_tokens", "stop")},
        }
        for name, role in recipe.roles().items()
    }
    workflow = recipe.team.workflow.model_dump()
    made = {"checkpoint": place.name, "versions": versions()}
    return {"name": recipe.name, "workflow": workflow, "roles": roles, "policies": told, **made}


def _playable(recipe: Recipe, told: dict[str, Any]) -> dict[str, Any]:
    """The recipe that plays the exported team: its models are those beside it, and nothing is trained."""
    tree = source.parse(recipe.to_yaml(), "recipe")
    for name, part in told.items():
        keep = ("dtype", *(("lora_r", "lora_alpha", "target_modules") if part["kind"] == "adapter" else ()))
        known = {k: v for k, v in tree["policies"][name].items() if k in keep and v is not None}
        model = {"outside": part["model"], "adapter": part["base"]}.get(part["kind"], f"policies/{name}")
        if model.startswith(("policies/", "bases/")):
            model = f"./{model}"
        tree["policies"][name] = {"model": model, **known}
    sets = [stage.on for stage in recipe.stages if isinstance(stage, Evaluate) and stage.on in tree["tasks"]]
    on = next(iter([*sets, *tree["tasks"]]))
    tree["tasks"] = {on: tree["tasks"][on]}
    tree["stages"] = [{"kind": "evaluate", "on": on}]
    tree.pop("trackers", None)
    Recipe.load(tree)  # it says here, and not at the first use, if this cannot be played
    return tree


def placed(folder: Path, overrides: list[str]) -> tuple[Recipe, Path | None]:
    """The recipe of an exported team with the models at their places, and the weights to load over them."""
    told = json.loads((folder / TEAM).read_text(encoding="utf-8"))["policies"]
    tree = source.read(folder / "recipe.yaml", overrides)
    for name, part in told.items():
        model = tree["policies"][name]["model"]
        if part["kind"] != "outside" and (folder / model).is_dir():
            tree["policies"][name]["model"] = str((folder / model).resolve())
    adapters = any(part["kind"] == "adapter" for part in told.values())
    return Recipe.load(tree), folder / "policies" if adapters else None


def push(folder: str | Path, name: str) -> str:
    """Uploads an exported folder as a private repository of the Hugging Face hub; returns its address."""
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(name, private=True, exist_ok=True)
    return str(api.upload_folder(repo_id=name, folder_path=str(folder), commit_message="Export of a cothink team"))


def _dump(path: Path, tree: Any) -> None:
    path.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
