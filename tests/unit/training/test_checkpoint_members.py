"""Several workers save and restore one checkpoint together; rank 0 alone touches the files."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stratagem.checkpoint.reading import load_checkpoint
from stratagem.errors import CheckpointError, ConfigurationError
from stratagem.strategy.default import DefaultStrategy
from stratagem.strategy.metric_states import States, states_of_all
from stratagem.training.saving import members
from stratagem.training.saving.checkpoint import Checkpoint
from stratagem.training.saving.manager import CheckpointManager
from stratagem.training.saving.members import CheckpointMembers
from stratagem.worker.reduction.batch_norm import average_by_examples
from stratagem.worker.ring.communicator import Communicator
from tests.unit.ring.healing_ranks import Fate, run_mortal
from tests.unit.ring.thread_group import run_ranks, run_ranks_with_errors


class InStep(DefaultStrategy):
    """A synchronous strategy of workers that are threads."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    @property
    def num_replicas_in_sync(self) -> int:
        assert self.communicator is not None
        return self.communicator.size

    @contextlib.contextmanager
    def averaged_buffers(self, *models: nn.Module) -> Iterator[None]:
        assert self.communicator is not None
        buffers = [buffer for model in models for buffer in model.buffers()]
        kept = [buffer.clone() for buffer in buffers]
        average_by_examples(models, [1] * len(models), self.communicator)
        yield
        for buffer, old in zip(buffers, kept, strict=True):
            buffer.copy_(old)


def model_of(rank: int) -> nn.BatchNorm1d:
    model = nn.BatchNorm1d(2)
    nn.init.constant_(model.running_mean, float(rank))  # type: ignore[arg-type]
    return model


def test_one_checkpoint_with_averaged_buffers_whoever_calls(tmp_path: Path) -> None:
    def save(communicator: Communicator) -> tuple[str, float]:
        # Only rank 0's folder exists: the others must not need it.
        folder = tmp_path if communicator.rank == 0 else tmp_path / "not here"
        model = model_of(communicator.rank)
        checkpoint = Checkpoint(strategy=InStep(communicator), model=model, rank=communicator.rank)
        path = checkpoint.save(folder / "step")
        other = model_of(9)
        again = Checkpoint(strategy=InStep(communicator), model=other, rank=9)
        assert again.restore(path if communicator.rank == 0 else "elsewhere").path == path
        assert again.rank == 0
        assert float(other.running_mean[0]) == 1.0  # type: ignore[index]
        return path, float(model.running_mean[0])  # type: ignore[index]

    found = run_ranks(3, save)
    assert [mean for _, mean in found] == [0.0, 1.0, 2.0], "training goes on with its own buffers"
    assert {path for path, _ in found} == {str(tmp_path / "step-00000001")}
    assert load_checkpoint(tmp_path)["running_mean"].tolist() == [1.0, 1.0]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step-00000001"]


def test_a_state_that_cannot_be_written_is_refused_on_every_worker(tmp_path: Path) -> None:
    """It was refused on the first alone: the others waited for that one, who was out of step with them from then on."""

    class Odd(nn.BatchNorm1d):
        def get_extra_state(self) -> Any:
            return torch.eye(2).to_sparse()

    def save(communicator: Communicator) -> float:
        strategy = InStep(communicator)
        checkpoint = Checkpoint(strategy=strategy, odd=Odd(2), model=model_of(communicator.rank))
        with pytest.raises((ConfigurationError, CheckpointError), match="odd holds a tensor at _extra_state that"):
            checkpoint.save(tmp_path / "step")
        return float(communicator.all_reduce(torch.ones(1)))

    assert run_ranks(2, save) == [2.0, 2.0]


def test_a_worker_with_a_directory_of_its_own_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the lead died, another worker would save where the next job does not look."""
    caplog.set_level(logging.WARNING)

    def save(communicator: Communicator, name: str) -> None:
        checkpoint = Checkpoint(strategy=InStep(communicator), number=1)
        manager = CheckpointManager(checkpoint, tmp_path / name.format(communicator.rank))
        for step in (1, 2):
            assert Path(manager.save(step)).parent == tmp_path / name.format(0)

    run_ranks(2, lambda communicator: save(communicator, "same"))
    assert not caplog.messages
    run_ranks(2, lambda communicator: save(communicator, "{}"))
    [said] = caplog.messages
    assert str(tmp_path / "0" / "step-00000001") in said and f"nothing in {tmp_path / '1'}. Name the same" in said


def test_every_worker_has_its_own_random_numbers(tmp_path: Path) -> None:
    def gather(communicator: Communicator) -> list[float]:
        mine: States = {"torch": torch.full((2,), float(communicator.rank)), "only": torch.ones(communicator.rank)}
        found: list[Any] = states_of_all(InStep(communicator), [mine])
        return [float(states["torch"][0]) + states["only"].numel() for states in found]

    assert run_ranks(3, gather) == [[0.0, 2.0, 4.0]] * 3


def test_what_the_first_cannot_write_is_raised_by_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def save(communicator: Communicator) -> None:
        Checkpoint(strategy=InStep(communicator), number=1).save(tmp_path / "file" / "x" / "step")

    _, errors = run_ranks_with_errors(2, save)
    for error in errors:
        assert isinstance(error, CheckpointError) and "cannot write" in str(error)


def test_a_long_write_keeps_the_others_informed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "BEAT_S", 0.01)
    heard = threading.Event()

    class Counting(CheckpointMembers):
        def _tell(self, ring: Communicator, first: str, news: dict[str, Any] | None) -> dict[str, Any]:
            found = super()._tell(ring, first, news)
            if "busy" in found and ring.rank == 1:
                heard.set()
            return found

    def work(communicator: Communicator) -> Any:
        return Counting(communicator).from_first(lambda: heard.wait(60))

    assert run_ranks(2, work) == [True, True]


def test_all_go_on_from_the_same_good_one(tmp_path: Path) -> None:
    keeper = CheckpointManager(Checkpoint(model=model_of(5)), tmp_path)
    good, bad = keeper.save(), keeper.save()
    with (Path(bad) / "model.safetensors").open("ab") as file:
        file.write(b"x")
    # The size tells; the checksum must as well.
    bad = keeper.save()
    data = bytearray((Path(bad) / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (Path(bad) / "model.safetensors").write_bytes(data)

    def restore(communicator: Communicator) -> tuple[str | None, float]:
        model = model_of(communicator.rank)
        found = CheckpointManager(Checkpoint(strategy=InStep(communicator), model=model), tmp_path)
        return found.restore_or_initialize(), float(model.running_mean[0])  # type: ignore[index]

    assert run_ranks(2, restore) == [(good, 5.0)] * 2


def test_an_asynchronous_save_of_all(tmp_path: Path) -> None:
    def save(communicator: Communicator) -> str:
        checkpoint = Checkpoint(strategy=InStep(communicator), asynchronous=True, number=1)
        paths = [checkpoint.save(tmp_path / "step"), checkpoint.save(tmp_path / "step")]
        checkpoint.wait()
        assert checkpoint.restore(paths[1]).step == 2
        return paths[1]

    assert run_ranks(2, save) == [str(tmp_path / "step-00000002")] * 2


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dies_at", range(1, 9))
@pytest.mark.parametrize("size", [2, 3])
def test_a_ring_that_loses_who_writes_saves_all_the_same(tmp_path: Path, size: int, dies_at: int, late: bool) -> None:
    """It ended; or, where rank 0 was lost before it began to write, it told of a checkpoint that was none."""

    def save(communicator: Communicator) -> str:
        model = nn.Linear(2, 1)
        nn.init.constant_(model.weight, 7.0)
        path = Checkpoint(strategy=InStep(communicator), model=model).write(tmp_path, step=1)
        communicator.barrier()
        return path

    results = run_mortal(size, save, rank0=Fate(dies_at=dies_at, late=late))
    assert results == [str(tmp_path / "step-00000001")] * (size - 1)
    assert load_checkpoint(tmp_path, "model")["weight"].tolist() == [[7.0, 7.0]]
    assert not list(tmp_path.glob(".draft-*"))
