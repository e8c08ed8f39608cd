"""Checkpoint directories: complete or not there, never overwritten."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import math
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from stratagem.checkpoint import durable
from stratagem.checkpoint.draft import remove_unfinished
from stratagem.checkpoint.durable import write_durably
from stratagem.checkpoint.manifest import MANIFEST, Manifest, SavedFile, encode
from stratagem.chief.checkpointing import checkpoints
from stratagem.chief.checkpointing.checkpoints import ServersManifest
from stratagem.chief.checkpointing.saving import untaken
from stratagem.chief.servers.servers import ServerDescription
from stratagem.cluster.units import Plan, Topic, UnitBitmap
from stratagem.errors import CheckpointError, UnreadableError


def manifest_of(step: int, content: bytes = b"weights", epoch: int = 1, automatic: bool = True) -> ServersManifest:
    name = "ps-0.safetensors"
    return ServersManifest(
        step=step,
        chief_epoch=epoch,
        files=(SavedFile(name, len(content), hashlib.sha256(content).hexdigest(), "ps:0"),),
        plans={1: Plan(10, 2, staleness=math.inf), 2: Plan(10, 2, staleness=0, num_slices=2)},
        accepted={(1, 0): UnitBitmap.of([0, 2]), (1, 1): UnitBitmap.of([9])},
        applied={(2, 0): UnitBitmap.of([1])},
        next_step=12,
        automatic=automatic,
        logs={Topic("fit 1", 0): (("loss", 0.5),)},
    )


def commit(directory: Path, manifest: ServersManifest, content: bytes = b"weights") -> Path:
    begun = checkpoints.begin(str(directory))
    assert (begun.path / "nonce").read_text() == begun.nonce
    (begun.path / "ps-0.safetensors").write_bytes(content)
    return checkpoints.commit(begun, manifest)


def saved_by_script(directory: Path, manifest: ServersManifest, step: int) -> Path:
    """Under the number that the script gives it."""
    path = commit(directory, manifest).rename(directory / f"step-{step:08d}")
    (path / "host").mkdir()
    (path / "host" / MANIFEST).write_bytes(encode(Manifest(step=step, files=()).content()))
    return path


def test_a_committed_checkpoint_reads_back(tmp_path: Path) -> None:
    path = commit(tmp_path / "new", manifest_of(100))
    assert path == tmp_path / "new" / "step-00000100"
    assert (tmp_path / "new" / "latest").read_text() == "step-00000100\n"
    assert sorted(each.name for each in path.iterdir()) == ["manifest.json", "ps-0.safetensors"]
    found = ServersManifest.read(path)
    assert found is not None and found.created
    assert dataclasses.replace(found, created="") == manifest_of(100)


def test_readers_take_the_highest_complete_one(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        commit(tmp_path, manifest_of(step))
    (tmp_path / "step-00000300").mkdir()
    (tmp_path / "step-00000300" / "ps-0.safetensors").write_bytes(b"weights")
    (tmp_path / "step-00000400").mkdir()
    (tmp_path / "step-00000400" / "manifest.json").write_text('{"format": 1, "st')
    newest = checkpoints.newest(str(tmp_path))
    assert newest is not None and newest[0].name == "step-00000100"
    assert checkpoints.newest(str(tmp_path / "nothing")) is None


def test_the_same_weights_again_are_the_checkpoint_that_is_there(tmp_path: Path) -> None:
    first = commit(tmp_path, manifest_of(5))
    assert commit(tmp_path, manifest_of(5, epoch=2)) == first
    assert [each.name for each in tmp_path.glob(".draft-*")] == []
    found = ServersManifest.read(first)
    assert found is not None and found.chief_epoch == 1


def test_values_of_zero_are_not_taken_for_none(tmp_path: Path) -> None:
    """A group without values yet was saved with the same bytes: the checkpoint that is kept had none for it."""
    commit(tmp_path, dataclasses.replace(manifest_of(0), num_groups=1))
    path = commit(tmp_path, dataclasses.replace(manifest_of(0), num_groups=2))
    found = ServersManifest.read(path)
    assert found is not None and found.num_groups == 2


@pytest.mark.parametrize("automatic", [True, False])
def test_a_model_that_is_prepared_between_the_question_and_the_writing_is_no_conflict(
    tmp_path: Path, automatic: bool
) -> None:
    """The number of groups was asked for before the ps heard of another model, whose values it wrote as zeros."""
    before = commit(tmp_path, dataclasses.replace(manifest_of(5, automatic=automatic), num_groups=1, num_updates=5))
    now = dataclasses.replace(manifest_of(5, b"weights, zeros", epoch=2), num_groups=1, num_updates=5)
    path = commit(tmp_path, now, b"weights, zeros")
    assert [each for each, _ in checkpoints.scan(str(tmp_path))] == ([path] if automatic else [before, path])
    found = checkpoints.newest(str(tmp_path))
    assert found is not None and (path / "ps-0.safetensors").read_bytes() == b"weights, zeros"
    assert found[0] == path


@pytest.mark.parametrize("is_full", [False, True])
def test_there_is_a_checkpoint_of_the_step_while_one_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """The old one was removed before the new one was there: what died between the two left neither."""
    old, new = (dataclasses.replace(manifest_of(4), num_updates=each) for each in (5, 6))
    commit(tmp_path, manifest_of(3))
    path = commit(tmp_path, old)
    rename = Path.rename
    found = []

    def watched(self: Path, target: Path) -> Path:
        if self.name.startswith(".draft-") and is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        for act in (lambda: None, lambda: rename(self, target)):
            act()
            newest = checkpoints.newest(str(tmp_path))
            assert newest is not None
            found.append(newest[1].num_updates)
        return Path(target)

    monkeypatch.setattr(Path, "rename", watched)
    with pytest.raises(CheckpointError, match="No space left") if is_full else contextlib.nullcontext():
        commit(tmp_path, new)
    assert sorted(found) == found and {*found} == ({5} if is_full else {5, 6})
    assert [each for each, _ in checkpoints.scan(str(tmp_path))] == [tmp_path / "step-00000003", path]


def test_another_number_of_ps_has_trained_what_the_checkpoint_lacks() -> None:
    """Nothing was saved of a model trained after another one, which had more updates, in a job that was resumed with
    another number of ps."""
    manifest = dataclasses.replace(manifest_of(100), num_groups=4, num_updates=150)
    assert manifest.lacks(2, 151, num_ps=3) and not manifest.lacks(6, 150, num_ps=3)
    assert not manifest_of(100).lacks(4, 151, num_ps=3), "it was written before the number was"
    known = dataclasses.replace(manifest, num_distinct=2)
    assert known.lacks(3, 150, num_ps=3, num_distinct=3), "a model was prepared since"
    assert not known.lacks(6, 150, num_ps=3, num_distinct=2)


def test_a_number_that_a_script_has_given_other_weights_is_told_from_it(tmp_path: Path) -> None:
    """A job whose script saved before its first update, and after each, ended with 1: its last checkpoint failed."""
    of_script = saved_by_script(tmp_path, manifest_of(5), 5)
    assert commit(tmp_path, manifest_of(5, epoch=2)) == of_script
    path = commit(tmp_path, manifest_of(5, b"WEIGHTS"), b"WEIGHTS")
    assert path.name == "step-000000000005"
    assert {each for each, _ in checkpoints.scan(str(tmp_path))} == {of_script, path}


def test_what_a_script_saved_last_stays_the_newest(tmp_path: Path) -> None:
    """The chief's last checkpoint, of the same weights and of buffers as they began, hid it from an evaluator."""
    of_script = saved_by_script(tmp_path, manifest_of(48, automatic=False), 6)
    reported = {(1, 0): UnitBitmap.of([0, 2]), (1, 1): UnitBitmap.of([9]), (2, 0): UnitBitmap.of([1])}
    now = dataclasses.replace(manifest_of(48), accepted=reported, applied={})
    assert commit(tmp_path, now) == of_script
    assert not list(tmp_path.glob(".draft-*"))
    assert commit(tmp_path, dataclasses.replace(now, logs={})) == tmp_path / "step-00000048", "an epoch is over since"


def test_what_a_script_saved_last_is_not_enough_below_another_number(tmp_path: Path) -> None:
    """Whoever looks by the script's numbers would see the chief's of the middle of the job."""
    commit(tmp_path, manifest_of(32, b"WEIGHTS"), b"WEIGHTS")
    saved_by_script(tmp_path, manifest_of(48, automatic=False), 6)
    assert commit(tmp_path, manifest_of(48)) == tmp_path / "step-00000048"


def test_other_weights_at_the_same_step_are_refused(tmp_path: Path) -> None:
    path = commit(tmp_path, manifest_of(5))
    with pytest.raises(CheckpointError, match="holds other weights than now"):
        commit(tmp_path, manifest_of(5, b"WEIGHTS"), b"WEIGHTS")
    assert (path / "ps-0.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize("name", [MANIFEST, "ps-0.safetensors"])
def test_one_in_the_way_that_cannot_be_read_now_is_not_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = commit(tmp_path, manifest_of(5))
    real = durable.open_file

    def open_file(file: Path) -> Any:
        if file == path / name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))
        return real(file)

    with monkeypatch.context() as failing:
        failing.setattr(durable, "open_file", open_file)
        with pytest.raises(UnreadableError, match=f"{name} cannot be read.* It may be whole, and stays where it is"):
            commit(tmp_path, manifest_of(5, b"others!"), b"others!")
    assert [each for each, _ in checkpoints.scan(str(tmp_path))] == [path] and not list(tmp_path.glob(".*"))
    assert (path / "ps-0.safetensors").read_bytes() == b"weights"


def test_a_short_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected 7 bytes in"):
        commit(tmp_path, manifest_of(5), b"wei")
    assert checkpoints.scan(str(tmp_path)) == []


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="give a directory that the chief and every ps can write"):
        checkpoints.begin(str(tmp_path / "file" / "below"))


def test_a_draft_that_cannot_be_begun_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")  # as of a write, without the path

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CheckpointError, match=rf"into {tmp_path}: No space left.*; free some space there$"):
        checkpoints.begin(str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("num_free", [0, 1])
def test_a_chief_that_can_open_no_more_files_begins_no_draft_and_is_told_of_its_limit(
    tmp_path: Path, num_free: int
) -> None:
    """It was told to give another directory, and an empty draft stayed."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(num_free):
            os.close(taken.pop())
        with pytest.raises(CheckpointError, match=r"Too many open files.*; raise `ulimit -n`"):
            checkpoints.begin(str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for each in taken:
            os.close(each)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_at_the_last_file_leaves_no_checkpoint_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there, and counted as failed: a job whose last one it was ended with exit code 1."""

    def full(path: Path, data: bytes) -> tuple[int, str]:
        if path.suffix == ".latest":
            path.touch()
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_durably(path, data)

    monkeypatch.setattr("stratagem.checkpoint.draft.write_durably", full)
    begun = checkpoints.begin(str(tmp_path))
    (begun.path / "ps-0.safetensors").write_bytes(b"weights")
    with begun, pytest.raises(CheckpointError, match="No space left"):
        checkpoints.commit(begun, manifest_of(5))
    assert not list(tmp_path.iterdir())


def test_only_automatic_ones_are_pruned_and_never_the_newest(tmp_path: Path) -> None:
    for step in range(6):
        commit(tmp_path, manifest_of(step, automatic=step != 1))
    removed = checkpoints.prune(str(tmp_path), keep=2)
    assert [path.name for path in removed] == ["step-00000000", "step-00000002", "step-00000003"]
    left = [manifest.step for _, manifest in checkpoints.scan(str(tmp_path))]
    assert left == [1, 4, 5]


def test_drafts_of_an_earlier_life_are_swept(tmp_path: Path) -> None:
    os.close(checkpoints.begin(str(tmp_path))._lock)  # its process died
    under_way = checkpoints.begin(str(tmp_path))
    commit(tmp_path, manifest_of(5))
    assert len(remove_unfinished(tmp_path)) == 1 and under_way.path.is_dir()
    under_way.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["latest", "step-00000005"]


def test_a_checkpoint_waits_until_all_of_the_last_one_is_on_some_ps() -> None:
    half = ServerDescription(origin_elements=10, taken_elements=5)
    assert untaken([half, ServerDescription(origin_elements=10)]) == 5
    assert untaken([half, half]) == 0
    assert untaken([half, ServerDescription()]) == 0, "it has gone back to a later one, which had all"
    assert untaken([]) == 0


def test_a_draft_that_a_ps_wrote_into_while_it_was_removed_is_swept_too(tmp_path: Path) -> None:
    """One ps had died, and the chief gave the checkpoint up; the other's file stayed, for good."""
    given_up = checkpoints.begin(str(tmp_path))
    given_up.close()
    given_up.path.mkdir()
    (given_up.path / "ps-1.json").touch()
    with checkpoints.begin(str(tmp_path)) as draft:
        remove_unfinished(tmp_path)
        assert [path for path in tmp_path.glob(".draft-*") if path.is_dir()] == [draft.path]
