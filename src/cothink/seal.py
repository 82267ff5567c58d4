"""A folder that can be trusted: all of it on disk, with a list of sizes and hashes; and a lock on a folder."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

SEAL = "seal.json"
LOCK = "lock"


def write_atomic(path: Path, text: str) -> None:
    """Replaces a file in one move, so that a reader, a kill or a power cut never meets half of it."""
    temporary = path.with_name(path.name + ".part")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def seal(folder: Path, facts: Mapping[str, Any]) -> None:
    """Brings every file of a folder to disk, and writes what they hold, with `facts`, into its seal."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            files[str(path.relative_to(folder))] = [
                path.stat().st_size,
                hashlib.file_digest(file, "sha256").hexdigest(),
            ]
    write_atomic(folder / SEAL, json.dumps({"facts": facts, "files": files}, indent=2))
    for place in (folder, *(p for p in folder.rglob("*") if p.is_dir())):
        sync(place)


def sync(folder: Path) -> None:
    """Brings the names in a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def damage(folder: Path) -> str | None:
    """What is wrong with a sealed folder; None where every file is as it was written."""
    if not folder.is_dir():
        return "it is not there"
    try:
        files = json.loads((folder / SEAL).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its {SEAL} cannot be read ({type(error).__name__})"
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                return f"{name} holds something else than what was written"
    return None


def facts(folder: Path) -> dict[str, Any]:
    """What a seal was given beside the files."""
    return json.loads((folder / SEAL).read_text(encoding="utf-8"))["facts"]


def lock(folder: Path) -> TextIO | None:
    """Takes a folder for this process until the file returned is closed; None where another process has it."""
    file = (folder / LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file
