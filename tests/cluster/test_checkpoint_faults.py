"""What a checkpoint directory survives: kill -9 in a save, a full disk, altered files. The last good one is used."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from stratagem.checkpoint.catalog import find_damage
from stratagem.checkpoint.reading import latest_checkpoint, load_checkpoint
from stratagem.errors import CheckpointError
from stratagem.training.saving.checkpoint import Checkpoint
from stratagem.training.saving.manager import CheckpointManager
from tests import forks

SCRIPTS = Path(__file__).parent / "scripts"


def linear(value: float, size: int = 10) -> nn.Linear:
    model = nn.Linear(size, size)
    nn.init.constant_(model.weight, value)
    return model


@pytest.mark.parametrize(("point", "last"), [("tensors", 2), ("manifest", 2), ("latest", 3)])
def test_killed_during_a_save(tmp_path: Path, point: str, last: int) -> None:
    command = [sys.executable, str(SCRIPTS / "save_and_die.py"), str(tmp_path), point]
    done = forks.run(command, timeout=240, env={**os.environ, "PYTHONPATH": str(SCRIPTS.parents[2])})
    assert done.returncode == -signal.SIGKILL
    drafts = list(tmp_path.glob(".draft-*.lock"))
    assert len(drafts) == 1, "the fault was to leave a draft or its lock"
    assert latest_checkpoint(tmp_path) == str(tmp_path / f"step-0000000{last}")
    assert not find_damage(tmp_path / f"step-0000000{last}")

    model = nn.Linear(100, 10)
    keeper = CheckpointManager(Checkpoint(model=model, number=0), tmp_path)
    keeper.restore_or_initialize()
    assert keeper.checkpoint.number == last and bool((model.weight == last).all())
    assert Path(keeper.save()).name == f"step-0000000{last + 1}"
    assert not list(tmp_path.glob(".*")), "what the dead one left is swept away by the next save"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk(small_disk: Path, asynchronous: bool) -> None:
    small = Checkpoint(model=linear(1))
    good = small.save(small_disk / "step")
    large = Checkpoint(model=linear(2, 300), asynchronous=asynchronous)
    with pytest.raises(CheckpointError, match=f"cannot write .*No space left.*The last good checkpoint is {good}"):
        large.save(small_disk / "step")
        large.wait()
    assert latest_checkpoint(small_disk) == good and not find_damage(Path(good))
    assert not list(small_disk.glob(".*")), "a draft that failed frees the disk"
    assert small.save(small_disk / "step") == latest_checkpoint(small_disk)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize("harm", [flip, cut, Path.unlink], ids=["flip", "cut", "missing"])
@pytest.mark.parametrize("name", ["model.safetensors", "host.json", "manifest.json"])
def test_harm_is_named_and_the_last_good_one_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, harm: Callable[[Path], None]
) -> None:
    model = linear(1)
    keeper = CheckpointManager(Checkpoint(model=model), tmp_path)
    good = keeper.save()
    nn.init.constant_(model.weight, 2)
    bad = Path(keeper.save())
    before = (bad / name).read_bytes()
    harm(bad / name)
    assert not (bad / name).exists() or (bad / name).read_bytes() != before
    nn.init.constant_(model.weight, 3)

    read: list[Callable[[], object]] = [lambda: keeper.checkpoint.restore(bad), lambda: load_checkpoint(bad)]
    for attempt in read:
        with pytest.raises(CheckpointError) as refused:
            attempt()
        words = str(refused.value)
        assert str(bad) in words and f"The last good checkpoint is {good}" in words
        assert name in words or (name == "manifest.json" and "is not a complete checkpoint" in words)
    assert bool((model.weight == 3).all()), "a refused checkpoint changes nothing"

    assert latest_checkpoint(tmp_path) == str(bad if harm is flip and name != "manifest.json" else good)
    with caplog.at_level(logging.WARNING):
        assert keeper.restore_or_initialize() == good
    assert bool((model.weight == 1).all())
    if (bad / "manifest.json").exists():
        assert name in caplog.text
    # Training again comes to the same number: the damaged one makes room, and is kept for whoever wants to look.
    assert Path(keeper.checkpoint.save(tmp_path / "step", step=2)) == bad
    assert not find_damage(bad) and len(list(tmp_path.glob(".damaged-step-00000002-*"))) == 1


def test_one_that_was_cut_long_ago_is_not_named_at_each_restore(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = CheckpointManager(Checkpoint(model=linear(1)), tmp_path)
    old, good, new = keeper.save(), keeper.save(), keeper.save()
    for path in (old, new):
        cut(Path(path) / "model.safetensors")
    caplog.clear()  # of what was saved
    with caplog.at_level(logging.WARNING):
        assert keeper.restore_or_initialize() == good
    assert new in caplog.text and old not in caplog.text


@pytest.mark.parametrize("harm", [flip, cut, Path.unlink], ids=["flip", "cut", "missing"])
def test_every_one_damaged(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    keeper = CheckpointManager(Checkpoint(model=linear(1)), tmp_path)
    harm(Path(keeper.save()) / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
        keeper.restore_or_initialize()
    with pytest.raises(CheckpointError, match=r"There is no other checkpoint|and contains none"):
        keeper.checkpoint.restore(tmp_path)


SAVES_LAST = """
import sys, torch, stratagem as sg
strategy = sg.strategy_from_environment()
with strategy.scope():
    checkpoint = sg.Checkpoint(model=torch.nn.Linear(1, 1))
checkpoint.save(sys.argv[1] + "/step", blocking=False)
print("done")
"""


@pytest.mark.thorough
def test_a_save_that_fails_when_the_script_is_over_has_failed_it(tmp_path: Path, cluster: Callable[..., Any]) -> None:
    """Nobody waits for the last one of a script; the job ended with exit code 0."""
    (tmp_path / "file").write_text("")
    (tmp_path / "saves_last.py").write_text(SAVES_LAST)
    done = cluster(1, 0, tmp_path / "saves_last.py", tmp_path / "file").finish()
    assert done.code == 1 and "done" in done.stdout
    assert "worker:0: CheckpointError: cannot write" in done.stderr and done.summary["first_failure"]["code"] == 1
