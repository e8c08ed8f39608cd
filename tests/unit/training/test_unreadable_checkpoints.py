"""Checkpoints of scripts on a disk that does not answer for a while, when they may be whole, or that refuses to."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stratagem.checkpoint import durable
from stratagem.checkpoint.reading import latest_checkpoint, load_checkpoint
from stratagem.checkpoint.server_state import SavedRows
from stratagem.errors import UnreadableError
from stratagem.strategy.ps.servers import Servers
from stratagem.training.saving.checkpoint import Checkpoint
from stratagem.training.saving.manager import CheckpointManager
from tests.unit.training.checkpoint_objects import Script
from tests.unit.training.test_checkpoint_servers import written_by_servers

NEWEST = "step-00000002"
READERS: dict[str, Callable[[Path], Any]] = {
    "latest_checkpoint": lambda folder: Path(latest_checkpoint(folder) or "").name,
    "manager.latest_checkpoint": lambda folder: Path(_manager(folder).latest_checkpoint or "").name,
    "restore_or_initialize": lambda folder: Path(_manager(folder).restore_or_initialize() or "").name,
    "restore": lambda folder: Path(Checkpoint(number=0).restore(folder).path).name,
    "restore of a path": lambda folder: Path(Checkpoint(number=0).restore(folder / NEWEST).path).name,
    "load_checkpoint": lambda folder: f"step-{int(load_checkpoint(folder)['bias']):08d}",
}


def _manager(folder: Path) -> CheckpointManager:
    return CheckpointManager(Checkpoint(number=0), folder, max_to_keep=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints."""
    for number in (1, 2):
        model = nn.Linear(1, 1)
        nn.init.constant_(model.bias, number)
        Checkpoint(model=model, number=number).save(tmp_path / "step", step=number)
    return tmp_path


def break_disk(monkeypatch: pytest.MonkeyPatch, victim: Path, number: int, times: int = 1 << 30) -> None:
    """The victim, a file or folder, cannot be opened, listed or looked at the next ``times``."""
    opened, listed, looked, left = os.open, Path.iterdir, Path.stat, [times]

    def check(path: Any) -> None:
        if isinstance(path, Path) and path == victim and left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number), str(path))

    def open_it(path: Any, *arguments: Any, **options: Any) -> int:
        check(path)
        return opened(path, *arguments, **options)

    def list_it(path: Path) -> Any:
        check(path)
        return listed(path)

    def look_at(path: Path, **options: Any) -> os.stat_result:
        check(path)
        return looked(path, **options)

    monkeypatch.setattr(os, "open", open_it)
    monkeypatch.setattr(Path, "iterdir", list_it)
    monkeypatch.setattr(Path, "stat", look_at)


def _reads(reader: str, victim: str) -> bool:
    """Whether it looks there at all."""
    looks = "latest" in reader
    return not (looks and victim.endswith("host.json")) and not (reader == "restore of a path" and victim == ".")


CASES = [
    (reader, victim)
    for reader in READERS
    for victim in (f"{NEWEST}/manifest.json", f"{NEWEST}/host.json", ".")
    if _reads(reader, victim)
]


@pytest.mark.parametrize(("reader", "victim"), CASES)
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE, errno.ETIMEDOUT])
def test_one_read_error_hides_no_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, reader: str, victim: str, number: int
) -> None:
    monkeypatch.setattr(durable, "_PAUSE_S", 0.0)
    break_disk(monkeypatch, folder / victim, number, times=2)
    assert READERS[reader](folder) == NEWEST


@pytest.mark.parametrize(("reader", "victim"), CASES)
def test_what_stays_unreadable_is_named_and_no_older_one_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch, reader: str, victim: str
) -> None:
    monkeypatch.setattr(durable, "READ_AGAIN_S", 0.0)
    before = sorted(folder.rglob("*"))
    with monkeypatch.context() as patch:
        break_disk(patch, folder / victim, errno.EACCES)
        why = r"cannot be read: .*Permission denied.* It may be whole, and stays where it is: make it readable"
        with pytest.raises(UnreadableError, match=why) as caught:
            READERS[reader](folder)
    assert str(folder / victim) in str(caught.value)
    assert sorted(folder.rglob("*")) == before


def test_an_older_checkpoint_that_cannot_be_read_is_in_nobodys_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "READ_AGAIN_S", 0.0)
    break_disk(monkeypatch, folder / "step-00000001" / "manifest.json", errno.EACCES)
    assert {name: read(folder) for name, read in READERS.items()} == dict.fromkeys(READERS, NEWEST)


def test_a_save_goes_on_and_counts_on_where_one_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    manager = CheckpointManager(script.checkpoint, folder, max_to_keep=1)
    break_disk(monkeypatch, folder / NEWEST / "manifest.json", errno.EIO)
    assert Path(manager.save()).name == "step-00000003"
    assert sorted(path.name for path in folder.glob("step-*")) == [NEWEST, "step-00000003"], "what is unreadable stays"


@pytest.mark.parametrize("refused", ["rename", "unlink"])
def test_an_old_checkpoint_that_cannot_be_removed_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: str
) -> None:
    """In a folder with the sticky bit, or one whose files are another user's."""
    manager = CheckpointManager(Checkpoint(number=1), tmp_path, max_to_keep=1)
    first = Path(manager.save())
    act = getattr(os, refused)

    def refuse(path: Any, *arguments: Any, **options: Any) -> None:
        if path == first or path == "host.json":
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        act(path, *arguments, **options)

    monkeypatch.setattr(os, refused, refuse)
    saved = [Path(manager.save()).name for _ in range(3)]
    assert saved == [f"step-{number:08d}" for number in (2, 3, 4)]
    said = [text for text in caplog.messages if f"cannot remove the old checkpoint {first}: " in text]
    assert len(said) == 1 and "Operation not permitted" in said[0] and "let this user delete there" in said[0]


def test_a_checkpoint_is_saved_where_the_file_latest_is_another_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(Checkpoint(number=1), tmp_path, max_to_keep=1)
    replace = os.replace

    def refuse(path: Any, target: Any, **options: Any) -> None:
        if Path(target).name == "latest":
            raise PermissionError(errno.EPERM, "Operation not permitted", str(target))
        replace(path, target, **options)

    monkeypatch.setattr(os, "replace", refuse)
    saved = [manager.save() for _ in range(2)]
    assert manager.checkpoints == saved[1:] and sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002"]
    said = f"{tmp_path}/latest names an older checkpoint than there is: Operation not permitted"
    assert caplog.messages.count(said) == 1


SAVES: dict[str, Callable[[Path], str]] = {
    "save": lambda folder: Checkpoint(number=1).save(folder),
    "manager": lambda folder: _manager(folder).save(),
    "write": lambda folder: Checkpoint(number=1).write(folder),
}


@pytest.mark.parametrize("how", SAVES)
def test_a_save_looks_again_into_a_folder_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(durable, "READ_AGAIN_S", 0.0)
    with monkeypatch.context() as patch:
        break_disk(patch, tmp_path, errno.EACCES)
        with pytest.raises(UnreadableError, match=f"^{tmp_path} cannot be read: .*Permission denied"):
            SAVES[how](tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(durable, "_PAUSE_S", 0.0)
    break_disk(monkeypatch, tmp_path, errno.ESTALE, times=3)
    assert Path(SAVES[how](tmp_path)).name == "step-00000001"


@pytest.mark.parametrize("victim", [".", "ps-0.json", "ps-0.safetensors"])
def test_one_read_error_hides_nothing_that_parameter_servers_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    monkeypatch.setattr(durable, "_PAUSE_S", 0.0)
    path = written_by_servers(tmp_path)
    expected = load_checkpoint(path)["weight"]
    break_disk(monkeypatch, path / victim, errno.EIO, times=2)
    assert torch.equal(SavedRows(path, "weight")[0 : len(expected)], expected)
    break_disk(monkeypatch, path / victim, errno.EIO, times=2)
    assert torch.equal(load_checkpoint(path)["weight"], expected)


def test_one_read_error_gives_no_worker_the_checkpoint_of_an_earlier_job(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "_PAUSE_S", 0.0)
    servers = Servers.__new__(Servers)
    servers.chief = SimpleNamespace(logs=lambda topic, incarnation: None)  # type: ignore[assignment]
    break_disk(monkeypatch, folder / NEWEST / "manifest.json", errno.EIO, times=2)
    assert not servers.claim(folder / NEWEST)
