"""The folder of an export is complete or not there; damage is named."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from stratagem.checkpoint.draft import DRAFT
from stratagem.errors import ExportError
from stratagem.training.export import folder as export_folder
from stratagem.training.export.folder import read, writing


def write(target: Path, text: str) -> None:
    with writing(target) as (draft, description):
        (draft / "weights").write_text(text)
        description["class"] = "Net"


def test_it_is_complete_or_not_there(tmp_path: Path) -> None:
    target = tmp_path / "new" / "out"
    with writing(target) as (draft, _):
        (draft / "weights").write_text("abc")
        assert not target.exists()
    assert sorted(path.name for path in target.iterdir()) == ["metadata.json", "weights"]
    assert read(target)["files"]["weights"]["num_bytes"] == 3
    assert list(target.parent.iterdir()) == [target]


def test_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    (tmp_path / "out" / "more").write_text("of the old one")
    write(tmp_path / "out", "new")
    assert (tmp_path / "out" / "weights").read_text() == "new"
    assert not (tmp_path / "out" / "more").exists()
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_what_is_no_export_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", "into an empty folder")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "metadata.json").write_text('{"format": "a diary"}')
    (tmp_path / "file").write_text("text")
    for name in ("mine", "file"):
        with pytest.raises(ExportError, match=f"a new folder or an earlier export .*{name} is something else"):
            write(tmp_path / name, "new")
    assert (tmp_path / "mine" / "metadata.json").read_text() == '{"format": "a diary"}'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine", "out"]


def test_a_failure_leaves_the_earlier_export(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    with pytest.raises(ZeroDivisionError), writing(tmp_path / "out") as (draft, _):
        (draft / "weights").write_text("half")
        raise ZeroDivisionError
    with (
        pytest.raises(ExportError, match=r"cannot write the export .*No such file"),
        writing(tmp_path / "out") as (draft, _),
    ):
        (draft / "nowhere" / "weights").write_text("half")
    assert (tmp_path / "out" / "weights").read_text() == "old"
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_a_failed_rename_puts_the_earlier_export_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "out", "old")
    rename = Path.rename
    failed: list[Path] = []

    def fail_once(self: Path, target: str | os.PathLike[str]) -> Path:
        if self.name.startswith(DRAFT) and not failed:
            failed.append(self)
            raise OSError("the disk is gone")
        return rename(self, target)

    monkeypatch.setattr(export_folder, "_exchange", lambda draft, target: False)
    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(ExportError, match="the disk is gone"):
        write(tmp_path / "out", "new")
    assert len(failed) == 1
    assert (tmp_path / "out" / "weights").read_text() == "old"
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_there_is_an_export_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who came while it was replaced, or after a crash just then, found none."""
    found: list[str] = []

    def look(*_: Any) -> Any:
        found.append((tmp_path / "out" / "weights").read_text())
        return look

    write(tmp_path / "out", "old")
    commit = export_folder._commit

    def watched(draft: Path, description: dict[str, Any], target: Path) -> None:
        sys.settrace(look)
        try:
            commit(draft, description, target)
        finally:
            sys.settrace(None)

    monkeypatch.setattr(export_folder, "_commit", watched)
    write(tmp_path / "out", "new")
    assert found[0] == "old" and found[-1] == "new"


def test_what_a_crash_left_goes_with_the_next_export(tmp_path: Path) -> None:
    with writing(tmp_path / "one") as (draft, _):
        (tmp_path / f"{DRAFT}1a2b3c4d").mkdir()
        (tmp_path / f"{DRAFT}1a2b3c4d.lock").touch()
        (tmp_path / ".removed-by-me").mkdir()
        write(tmp_path / "other", "")
        kept = {draft.name, f"{draft.name}.lock", ".removed-by-me"}
        assert {each.name for each in tmp_path.iterdir()} == {*kept, "other"}, "one is being written, one is none"


def test_what_an_interrupt_left_goes_with_the_next_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock was held as long as the process lived."""

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", interrupt)
        write(tmp_path / "model", "")
    write(tmp_path / "model", "")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_damage_is_named(tmp_path: Path) -> None:
    write(tmp_path / "out", "abcdef")
    file = tmp_path / "out" / "weights"
    file.write_text("abcdeg")
    with pytest.raises(ExportError, match="weights is damaged: its checksum"):
        read(tmp_path / "out")
    file.write_text("abcde")
    with pytest.raises(ExportError, match="weights is missing or cut short: expected 6 bytes"):
        read(tmp_path / "out")
    file.unlink()
    with pytest.raises(ExportError, match="weights is missing or cut short"):
        read(tmp_path / "out")


def test_other_folders_and_newer_formats_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (None, "{", "[]", json.dumps({"format": "other"})):
        if text is not None:
            (tmp_path / "metadata.json").write_text(text)
        with pytest.raises(ExportError, match="expected a folder that export_model wrote"):
            read(tmp_path)
    with pytest.raises(ExportError, match=r"got .*out, which does not exist: only the lead writes it"):
        read(tmp_path / "out")
    write(tmp_path / "out", "abc")
    monkeypatch.setattr(export_folder, "VERSION", 0)
    with pytest.raises(ExportError, match="format 1; this Stratagem is older and reads up to 0"):
        read(tmp_path / "out")


def test_the_description_cannot_hide_the_files(tmp_path: Path) -> None:
    with writing(tmp_path / "out") as (draft, description):
        description["files"] = {}
        (draft / "weights").write_text("abc")
    assert list(read(tmp_path / "out")["files"]) == ["weights"]
