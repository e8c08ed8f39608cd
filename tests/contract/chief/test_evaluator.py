"""``sg.new_checkpoints`` beside a chief: what is removed or damaged while it is read does not end the evaluator."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from stratagem.checkpoint import durable
from stratagem.checkpoint.catalog import remove
from stratagem.checkpoint.reading import load_checkpoint
from stratagem.training.saving import new_checkpoints as module
from stratagem.training.saving.checkpoint import Checkpoint
from tests.cluster.test_checkpoint_faults import flip
from tests.contract.chief.fakes import chief, run


def test_a_checkpoint_removed_or_damaged_while_it_is_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = Checkpoint(model=nn.Linear(2, 2))
    given: list[int] = []
    late: list[str] = []

    def save(step: int) -> Path:
        return Path(checkpoint.save(tmp_path / "step", step=step))

    def load_late(path: str) -> dict[str, Any]:
        """The trainer is ahead of the evaluator: it comes to read when things have happened."""
        if Path(path).name == "step-00000002":
            save(3)
            remove(Path(path))
        elif Path(path).name == "step-00000003":
            flip(Path(path) / "model.safetensors")
        late.append(Path(path).name)
        return load_checkpoint(path)

    def follow() -> None:
        for new in module.new_checkpoints():
            given.append(new.step)
            save(2 if new.step == 1 else 5)
            if new.step == 5:
                break

    async def scenario() -> None:
        async with chief(num_workers=1, num_ps=0) as running:
            monkeypatch.setenv("STRATAGEM_CHIEF", running.address)
            monkeypatch.setenv("STRATAGEM_CHECKPOINT_DIR", str(tmp_path))
            following = asyncio.create_task(asyncio.to_thread(follow))
            while "step-00000003" not in late and not following.done():
                await asyncio.sleep(0.02)
            save(4)
            running.job.stop(0, "all done")
            await following

    save(1)
    monkeypatch.setattr(module, "load_checkpoint", load_late)
    monkeypatch.setattr(module, "POLL_S", 0.05)
    monkeypatch.setattr(module, "configure_logging", lambda *_: None)  # the log of this process stays as it is
    run(scenario)
    assert given == [1, 4, 5] and late.count("step-00000003") == 1
    said = [text for text in caplog.messages if "Skipped a checkpoint" in text]
    assert len(said) == 1 and "step-00000003 is damaged" in said[0], said


def test_a_disk_that_does_not_answer_hides_no_checkpoint_from_the_evaluator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither as it looks for one nor as it reads the only one."""
    path = Path(Checkpoint(model=nn.Linear(2, 2)).save(tmp_path / "step", step=7))
    opened, errors = os.open, {path / "manifest.json": 2, path / "model.safetensors": 2}

    def open_it(what: Any, *arguments: Any, **options: Any) -> int:
        if errors.get(what):
            errors[what] -= 1
            raise OSError(errno.EIO, "Input/output error", str(what))
        return opened(what, *arguments, **options)

    def first() -> int:
        return next(module.new_checkpoints()).step

    async def scenario() -> None:
        async with chief(num_workers=1, num_ps=0) as running:
            monkeypatch.setenv("STRATAGEM_CHIEF", running.address)
            monkeypatch.setenv("STRATAGEM_CHECKPOINT_DIR", str(tmp_path))
            monkeypatch.setattr(os, "open", open_it)
            assert await asyncio.wait_for(asyncio.to_thread(first), 60) == 7

    monkeypatch.setattr(durable, "READ_AGAIN_S", 0.0)
    monkeypatch.setattr(module, "POLL_S", 0.05)
    monkeypatch.setattr(module, "configure_logging", lambda *_: None)  # the log of this process stays as it is
    run(scenario)
    assert not any(errors.values()) and "Skipped a checkpoint" not in caplog.text


def test_a_job_that_saved_elsewhere_is_told_where_its_evaluator_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with chief(num_workers=1, num_ps=0) as running:
            monkeypatch.setenv("STRATAGEM_CHIEF", running.address)
            monkeypatch.setenv("STRATAGEM_CHECKPOINT_DIR", str(tmp_path))
            running.job.stop(0, "all done")
            assert await asyncio.to_thread(lambda: list(module.new_checkpoints())) == []

    monkeypatch.setattr(module, "configure_logging", lambda *_: None)  # the log of this process stays as it is
    run(scenario)
    assert any(f"no checkpoint was in {tmp_path}" in text for text in caplog.messages), caplog.messages
    assert "STRATAGEM_CHECKPOINT_DIR" in caplog.text


def test_an_evaluator_that_fails_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        with module.JobWatch(str(tmp_path)):
            raise ValueError("no such column")

    async def scenario() -> None:
        async with chief(num_workers=1, num_ps=0) as running:
            monkeypatch.setenv("STRATAGEM_CHIEF", running.address)
            with pytest.raises(ValueError, match="no such column"):
                await asyncio.to_thread(fail)
            assert running.job.get_status().tasks[-1].state == "lost"
            assert running.job.sessions.first_failure == "evaluator:0: ValueError: no such column"

    monkeypatch.setattr(module, "configure_logging", lambda *_: None)  # the log of this process stays as it is
    run(scenario)
