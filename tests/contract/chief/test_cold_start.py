"""A job that starts from its checkpoints, with real stores: all ps go back to one of them, whatever is damaged."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stratagem as sg
from stratagem.checkpoint import durable
from stratagem.chief.servers import servers
from stratagem.cluster.units import Unit
from stratagem.ps.specs import GroupSpec, ShardSpec
from stratagem.ps.store import Store
from tests.cluster.test_checkpoint_faults import cut, flip
from tests.contract.chief.fakes import Chief, Task, chief, indices, run, until
from tests.contract.chief.test_recovery import save
from tests.contract.ps.serving import serving
from tests.unit.ps.driver import DirectWorker

SIZE = 16
SHARDS = [f"ps-{index}.{end}" for index in (0, 1) for end in ("safetensors", "slots.safetensors", "json")]
FILES = [*SHARDS, "manifest.json"]
CASES = [
    *((name, flip) for name in FILES),
    *((SHARDS[3], harm) for harm in (cut, Path.unlink)),
    ("manifest.json", Path.unlink),
    *(
        pytest.param(name, harm, marks=pytest.mark.thorough)
        for name in FILES
        for harm in (cut, Path.unlink)
        if name != SHARDS[3] and (name, harm) != ("manifest.json", Path.unlink)
    ),
]
PLANS = {"sync": {"num_slices": 1, "staleness": 0.0}, "async": {"staleness": float("inf")}}


@contextlib.asynccontextmanager
async def real_ps(chief_address: str, index: int) -> AsyncIterator[Store]:
    """A store that serves and has joined."""
    store = Store(f"ps:{index}", frames_timeout_s=5.0)
    closing = contextlib.ExitStack()
    session = Task(chief_address, store.task, closing.enter_context(serving(store)).address)
    try:
        await session.welcomed()
        yield store
    finally:
        await session.die()
        await asyncio.to_thread(closing.close)


@contextlib.asynccontextmanager
async def job(directory: Path, num_ps: int = 2) -> AsyncIterator[tuple[Chief, Task, list[Store]]]:
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(
            chief(num_workers=1, num_ps=num_ps, checkpoint_dir=str(directory), session_timeout_s=60.0)
        )
        stores = [await stack.enter_async_context(real_ps(running.address, index)) for index in range(num_ps)]
        worker = Task(running.address, "worker:0")
        stack.push_async_callback(worker.die)
        await worker.welcomed()
        await until(lambda: worker.membership.ready or worker.ended("stop"))
        yield running, worker, stores


def attach(worker: Task, stores: list[Store]) -> list[DirectWorker]:
    """Tells each which rows it is to hold, as a worker does before it asks for units."""
    rows = [SIZE * index // len(stores) for index in range(len(stores) + 1)]
    members = []
    for store, start, stop in zip(stores, rows, rows[1:], strict=False):
        spec = GroupSpec(1, "Adam", torch.float32, (ShardSpec("v", (SIZE,), start, stop - start, 0),))
        members.append(DirectWorker(store, "worker:0", spec, worker.incarnation))
        members[-1].create(torch.zeros(stop - start))
    return members


async def train(worker: Task, stores: list[Store], plan: dict[str, Any], directory: Path) -> None:
    """Three units, with a checkpoint after the first and after the third."""
    members = attach(worker, stores)
    await worker.open(**plan)
    for number in range(3):
        [index] = indices(await worker.next())
        for member in members:  # in a thread: while commits are held it waits for the chief, whose loop is this one
            gradient = torch.ones(member.spec.num_elements)
            await asyncio.to_thread(member.commit, gradient, Unit(1, 0, index), num_servers=len(members))
            member.close(Unit(1, 0, index))
        await worker.next([index], want=0)
        if number != 1:
            await save(worker, directory)


@pytest.fixture(scope="module", params=sorted(PLANS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Checkpoints of steps 0, 1 and 3."""
    directory = tmp_path_factory.mktemp("saved")
    plan = PLANS[request.param]

    async def scenario() -> None:
        async with job(directory) as (_, worker, stores):
            await train(worker, stores, plan, directory)

    run(scenario)
    assert [path.name for path in sorted(directory.glob("step-*"))] == [f"step-0000000{step}" for step in (0, 1, 3)]
    return directory, plan


def start(directory: Path, plan: dict[str, Any], num_ps: int = 2) -> tuple[list[int], list[int], int, str]:
    """Steps of the ps, units that are leased, updates undone and the checkpoint, when the job is started again."""
    found: list[Any] = []

    async def scenario() -> None:
        async with job(directory, num_ps) as (running, worker, stores):
            await worker.open(**plan)
            steps = [store.state.step for store in stores]
            attach(worker, stores)
            granted = indices(await worker.next(want=9))
            for store in stores:
                assert store.state.units.describe().closed[1, 0] == running.job.lease_book.epoch(1, 0).accepted
            status = running.job.get_status()
            found.extend((steps, granted, status.updates_undone, Path(status.restored).name))

    run(scenario)
    return found[0], found[1], found[2], found[3]


@pytest.mark.parametrize(("name", "harm"), CASES)
def test_one_step_everywhere_whatever_is_damaged(
    saved: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    name: str,
    harm: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory, plan = tmp_path / "c", saved[1]
    shutil.copytree(saved[0], directory)
    harm(directory / "step-00000003" / name)
    with caplog.at_level(logging.WARNING):
        steps, granted, undone, restored = start(directory, plan)
    assert steps == [1, 1] and restored == "step-00000001"
    assert granted == [1, 2, 3]
    assert undone == 2
    assert "2 updates in newer checkpoints are undone and recomputed" in caplog.text
    assert name in caplog.text
    # The damaged one is out of the way, for this job's own checkpoint of that step and for the next start.
    assert not (directory / "step-00000003").exists() and len(list(directory.glob(".damaged-step-00000003-*"))) == 1
    assert start(directory, plan)[2] == 0


def test_the_newest_is_taken_when_all_is_well(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    shutil.copytree(saved[0], tmp_path / "c")
    assert start(tmp_path / "c", saved[1])[::2] == ([3, 3], 0)


def refused(directory: Path, num_ps: int = 2) -> tuple[int, str]:
    found: list[Any] = []

    async def scenario() -> None:
        async with job(directory, num_ps) as (_, worker, _):
            stop = await until(lambda: worker.ended("stop"))
            found.extend((stop.exit_code, stop.reason))

    run(scenario)
    return found[0], found[1]


def test_when_none_is_whole_the_job_does_not_begin_anew_by_itself(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    directory = tmp_path / "c"
    shutil.copytree(saved[0], directory)
    for path in directory.glob("step-*/ps-1.safetensors"):
        flip(path)
    code, reason = refused(directory)
    assert code == 2
    assert f"none of the 3 checkpoints in {directory} is complete on every ps (the newest, step-00000003: " in reason
    assert "ps-1.safetensors was altered" in reason and "another --checkpoint-dir" in reason
    assert len(list(directory.glob("step-*"))) == 3, "nothing is moved when nothing was found"


def fail(monkeypatch: pytest.MonkeyPatch, name: str, number: int, times: float) -> None:
    """The disk fails so often where a file of this name, of the newest checkpoint, is opened to be read."""
    real, left = durable.open_file, [times]

    def open_file(path: Path) -> Any:
        if path.name == name and path.parent.name == "step-00000003" and left[0] > 0:
            left[0] -= 1
            raise OSError(number, os.strerror(number), str(path))
        return real(path)

    monkeypatch.setattr(durable, "open_file", open_file)


@pytest.mark.parametrize("name", ["ps-0.safetensors", "ps-1.json", "manifest.json"])
def test_a_disk_that_fails_for_a_moment_is_no_damage(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    shutil.copytree(saved[0], tmp_path / "c")
    fail(monkeypatch, name, errno.EIO, 12)  # the chief looks at manifests before
    assert start(tmp_path / "c", saved[1])[::2] == ([3, 3], 0)
    assert not list((tmp_path / "c").glob(".damaged-*"))


@pytest.mark.parametrize("name", ["ps-1.safetensors", "manifest.json"])
def test_a_disk_that_stays_unreadable_ends_the_job_and_nothing_is_moved(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    directory = tmp_path / "c"
    shutil.copytree(saved[0], directory)
    fail(monkeypatch, name, errno.EACCES, float("inf"))
    monkeypatch.setattr(servers, "READ_AGAIN_S", 0.2)
    code, reason = refused(directory)
    assert code == 2 and "cannot be read" in reason and "Permission denied" in reason
    assert "may be whole, and stays where it is: make it readable, and start again" in reason
    assert len(list(directory.glob("step-*"))) == 3


def test_checkpoints_without_their_manifest_are_no_reason_to_begin_anew(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Nobody saw them, and the job began anew without a word."""
    directory = tmp_path / "c"
    shutil.copytree(saved[0], directory)
    for path in directory.glob("step-*/manifest.json"):
        path.unlink()
    code, reason = refused(directory)
    assert code == 2 and "none of the 3 checkpoints" in reason and "its manifest.json is missing" in reason


@pytest.mark.parametrize("has_own", [True, False])
def test_a_newer_checkpoint_of_another_strategy_is_not_taken_for_a_damaged_one(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path, has_own: bool
) -> None:
    """It was set aside, and an older one taken, or was said to have no manifest."""
    directory = tmp_path / "c"
    if has_own:
        shutil.copytree(saved[0], directory)
    path = Path(sg.CheckpointManager(sg.Checkpoint(model=torch.nn.Linear(1, 1)), directory).save())
    code, reason = refused(directory)
    assert code == 2 and f"{path} was saved under DefaultStrategy" in reason and "another --checkpoint-dir" in reason
    assert path.exists(), "nothing is moved"
    if has_own:
        path.rename(directory / "step-00000002")  # an older one
        assert start(directory, saved[1])[::2] == ([3, 3], 0)


@pytest.mark.parametrize("num_ps", [1, 3])
def test_another_number_of_ps_goes_on_from_it(saved: tuple[Path, dict[str, Any]], tmp_path: Path, num_ps: int) -> None:
    shutil.copytree(saved[0], tmp_path / "c")
    assert start(tmp_path / "c", saved[1], num_ps)[::2] == ([3] * num_ps, 0)


@pytest.mark.parametrize("left", [1, 2])
def test_a_chief_whose_tasks_have_all_left_waits_for_the_ps_to_say_what_is_trained(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path, left: int
) -> None:
    """All were told to end, as when a node is drained: the next chief forgot every epoch, and had all trained again.
    Of two ps one need not come again: it was waited for in vain."""
    config: dict[str, Any] = {"num_workers": 1, "state_dir": str(tmp_path / "state")}
    config["checkpoint_dir"] = str(tmp_path / "c")

    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            first = await stack.enter_async_context(chief(**config, num_ps=left))
            stores = [await stack.enter_async_context(real_ps(first.address, index)) for index in range(left)]
            worker = await Task(first.address, "worker:0").ready()
            await train(worker, stores, saved[1], tmp_path / "c")
            worker.goodbye(143)
            await until(lambda: not first.job.sessions.live("worker"))
            await worker.die()
            port = first.address
            for session in first.job.sessions.ps:
                session.leaving = True
            await until(lambda: not first.job.sessions.live("ps"))
        async with chief(bind=port, **config, num_ps=1) as second:
            worker = await Task(port, "worker:0").welcomed()
            await second.job.recovery.open_books()
            assert not second.job.is_open
            async with real_ps(port, 0) as store:
                await worker.open(**saved[1])
                await until(lambda: second.job.is_open)
                attach(worker, [store])
                assert indices(await worker.next(want=9)) == [3]
                assert (store.state.step, second.job.sessions.num_ps) == (3, 1)
            await worker.die()

    run(scenario)
