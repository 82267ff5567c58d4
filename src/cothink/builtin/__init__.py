"""The built-in tiny model: a small Llama that plays every role of every shipped team on `wordsums`."""

from __future__ import annotations

from pathlib import Path


def path() -> Path:
    """Return the folder of the built-in model and its tokenizer (what `builtin:tiny` means)."""
    return Path(__file__).resolve().parent / "tiny"
