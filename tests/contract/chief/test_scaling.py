"""Another number of ps while training runs: in which order the chief does what, and what is left when that fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest

from stratagem.chief import wire
from stratagem.chief.membership.session import SessionState
from stratagem.chief.monitoring.why.reading import reading_of
from stratagem.chief.monitoring.why.verdict import judge
from stratagem.cluster.units import Unit, UnitBitmap, Update
from stratagem.errors import CheckpointError, ConfigurationError
from stratagem.rpc.generated import chief_pb2
from stratagem.rpc.status_view import from_reply
from tests.contract.chief.fakes import Chief, FakePs, Task, applied, chief, cluster, ps, refused, until


def folders(tmp_path: Path) -> dict[str, Any]:
    return {
        "state_dir": str(tmp_path / "state"),
        "checkpoint_dir": str(tmp_path / "checkpoints"),
        "num_ps": 1,
        "num_workers": 1,
    }


async def begun(running: Chief, worker: Task, server: FakePs) -> None:
    """A unit is applied, and not yet reported."""
    await until(lambda: running.job.journal.history.checkpoint)
    await worker.open()
    await worker.next(want=1)
    applied([server], 0)
    server.open = {update: 1 for update in server.open}


async def without_newcomer(stack: contextlib.AsyncExitStack, running: Chief) -> tuple[FakePs, FakePs, Task]:
    """A ps, one that is yet to come, and a worker; as :func:`begun`."""
    server = await stack.enter_async_context(ps(running.address, FakePs(0)))
    worker = await Task(running.address, "worker:0").ready()
    await begun(running, worker, server)
    return server, FakePs(1), worker


async def half_handed_over(
    stack: contextlib.AsyncExitStack, tmp_path: Path, staying: FakePs, num_workers: int
) -> tuple[Chief, list[Task]]:
    """A job in step, of which ps:0 was told to end in the middle of a batch, handed over half of it, and is gone."""
    running = await stack.enter_async_context(chief(**folders(tmp_path) | {"num_ps": 2, "num_workers": num_workers}))
    leaving = await stack.enter_async_context(ps(running.address, FakePs(0)))
    await stack.enter_async_context(ps(running.address, staying))
    workers = [Task(running.address, f"worker:{index}") for index in range(num_workers)]
    for worker in workers:
        stack.push_async_callback(worker.die)
        await worker.ready()
    await until(lambda: running.job.journal.history.checkpoint)
    for worker in workers:
        await worker.open(num_slices=num_workers, staleness=0.0)
        await worker.next(steps_per_unit=2)
    leaving.apply(Unit(1, 0, 0), 0, num_servers=1)
    leaving.session.beat(leaving=True)
    await until(lambda: running.job.sessions.tasks["ps:0"].state is SessionState.LOST)
    await leaving.session.die()
    return running, workers


def ask(worker: Task, num_ps: int) -> Any:
    return worker.stub.Scale(chief_pb2.ScaleRequest(num_ps=num_ps))


async def served(worker: Task, num_ps: int) -> None:
    """Waits until so many ps serve, and all tasks are there."""
    await until(lambda: worker.membership.num_ps == num_ps and all(task.live for task in worker.membership.tasks))


async def beside_newcomer(stack: contextlib.AsyncExitStack, tmp_path: Path, steps_per_unit: int) -> tuple[Task, FakePs]:
    """A worker that has a unit, of so many updates, and its ps; another one waits to be admitted."""
    running, [worker], [first] = await stack.enter_async_context(cluster(**folders(tmp_path)))
    await stack.enter_async_context(ps(running.address, FakePs(1)))
    await until(lambda: running.job.journal.history.checkpoint)
    await worker.open()
    await worker.next(steps_per_unit=steps_per_unit)
    return worker, first


async def test_there_and_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with contextlib.AsyncExitStack() as stack:
        running, [worker], [first] = await stack.enter_async_context(cluster(**folders(tmp_path)))
        await begun(running, worker, first)
        await ask(worker, 3)
        assert "The target is 3 ps" in caplog.text, "nobody has told a number of workers"
        await until(lambda: running.job.get_status().scaling == "waiting for ps:1, ps:2 to join")
        second = await stack.enter_async_context(ps(running.address, FakePs(1)))
        newcomer = second.session
        assert newcomer is not None
        tasks = await until(lambda: newcomer.membership.tasks)
        assert worker.membership.routing_epoch == 0
        assert {task.task for task in tasks} == {"worker:0", "ps:0"}
        first.calls.clear()
        third = await stack.enter_async_context(ps(running.address, FakePs(2)))
        await served(worker, 3)
        await until(lambda: first.token == 0)
        restored = first.calls.index("restore")
        assert first.calls.index("hold") < first.calls.index("save") < restored < first.calls.index("release")
        assert second.calls[0] == third.calls[0] == "restore", "they show that they can read it"
        assert {(each.restored_from, each.num_ps) for each in (first, second, third)} == {
            (running.job.journal.history.checkpoint, 3)
        }
        await ask(worker, 1)
        await served(worker, 1)
        assert (first.num_ps, second.num_ps) == (1, 3) and worker.membership.routing_epoch == 2
        assert running.job.get_status().scaling == ""
        newcomer.goodbye(0)
        await until(lambda: {t.task: t.state for t in running.job.get_status().tasks}["ps:1"] == "done")
        assert running.job.sessions.stopping is None


async def test_half_a_batch_is_in_what_another_number_of_ps_begins_from(tmp_path: Path) -> None:
    """The checkpoint of the change before was taken for it, for it has no batch less; what the ps had was gone."""
    async with contextlib.AsyncExitStack() as stack:
        worker, first = await beside_newcomer(stack, tmp_path, steps_per_unit=2)
        await ask(worker, 2)
        await served(worker, 2)
        await until(lambda: first.token == 0)
        first.apply(Unit(1, 0, 0), 0, num_servers=1)
        first.calls.clear()
        await ask(worker, 1)
        await served(worker, 1)
        assert "save" in first.calls


async def test_the_other_half_of_a_batch_is_in_what_another_number_of_ps_begins_from(tmp_path: Path) -> None:
    """Workers had made one update of each batch so far, so its first one counted as the batch: the checkpoint of the
    change before was taken for this one, and the second optimizer's update was gone."""
    async with contextlib.AsyncExitStack() as stack:
        worker, first = await beside_newcomer(stack, tmp_path, steps_per_unit=1)
        first.apply(Unit(1, 0, 0), 0, num_servers=1)
        await ask(worker, 2)
        await served(worker, 2)
        await until(lambda: first.token == 0)
        first.open[Update((Unit(1, 0, 0),), 1)] = 1
        first.num_of_second = 1
        first.calls.clear()
        await ask(worker, 1)
        await served(worker, 1)
        assert "save" in first.calls


async def test_half_a_batch_of_which_a_ps_that_ends_has_its_part_waits_for_the_next_one_in_step(tmp_path: Path) -> None:
    """The others got the rest of it meanwhile, as nothing waited for in step: it counted as done, and all went back."""
    tokens: list[int] = []

    class Staying(FakePs):
        async def RestoreShards(self, request: Any, context: Any) -> Any:
            tokens.append(self.token)
            return await super().RestoreShards(request, context)

    async with contextlib.AsyncExitStack() as stack:
        staying = Staying(1)
        running, _ = await half_handed_over(stack, tmp_path, staying, 1)
        tokens.clear()
        async with ps(running.address, FakePs(0)):
            await until(lambda: len(running.job.sessions.live("ps")) == 2 and not staying.token)
        assert tokens and all(tokens), "commits are held until all have gone back"


async def test_a_worker_that_dies_while_a_ps_is_waited_for_is_put_in_order_after_it_is_back(tmp_path: Path) -> None:
    """Its step was to be closed at once: a ps waited with that for its commits to be let through, these for the one
    that was away, and that one for the lock of the chief who closed the step."""

    class Held(FakePs):
        async def CloseStep(self, request: Any, context: Any) -> Any:
            await until(lambda: not self.token)
            return await super().CloseStep(request, context)

    async with contextlib.AsyncExitStack() as stack:
        staying = Held(1)
        running, workers = await half_handed_over(stack, tmp_path, staying, 2)
        workers[0].goodbye(exit_code=1)
        await until(lambda: "worker:0" in staying.fenced)
        await stack.enter_async_context(ps(running.address, FakePs(0)))
        await until(lambda: len(running.job.sessions.live("ps")) == 2 and not staying.token)


async def test_a_newcomer_that_cannot_read_it_leaves_all_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Elsewhere(FakePs):
        is_elsewhere, num_refused = True, 0

        async def RestoreShards(self, request: Any, context: Any) -> Any:
            if self.is_elsewhere:
                self.num_refused += 1
                raise CheckpointError("there is no such folder here")
            return await super().RestoreShards(request, context)

    async with contextlib.AsyncExitStack() as stack:
        running, [worker], [server] = await stack.enter_async_context(cluster(**folders(tmp_path)))
        await begun(running, worker, server)
        newcomer = Elsewhere(1)
        await stack.enter_async_context(ps(running.address, newcomer))
        await ask(worker, 2)
        await until(lambda: "no such folder here" in running.job.get_status().scaling)
        await until(lambda: server.token == 0)
        assert (worker.membership.num_ps, server.restored_from) == (1, "")
        assert running.job.journal.history.num_ps == 1
        await until(lambda: newcomer.num_refused > 2)
        assert caplog.text.count("remains 1 for now") == 1, "every second is too often"
        newcomer.is_elsewhere = False
        await until(lambda: worker.membership.num_ps == 2)


async def test_the_chief_dies_before_and_after_the_number_is_in_its_journal(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with chief(**folders(tmp_path)) as running:
            port = running.address
            server, newcomer, worker = await without_newcomer(stack, running)
            newcomer.restore_gate.clear()
            await stack.enter_async_context(ps(port, newcomer))
            server.calls.clear()
            await ask(worker, 2)
            await until(lambda: "save" in server.calls and running.job.journal.history.wanted_ps)
            assert running.job.journal.history.num_ps == 1
            numbers = (worker.incarnation, server.session.incarnation, newcomer.session.incarnation)
            homes = [running.job.sessions.tasks[f"ps:{index}"].address for index in range(2)]
            held = server.token
            assert held
            await running.kill()
            await worker.die()
        newcomer.restore_gate.set()
        server.restore_gate.clear()

        async def back() -> list[Task]:
            tasks = [
                Task(port, "worker:0", resume=numbers[0]),
                Task(port, "ps:0", homes[0], numbers[1], store_epoch=1),
                Task(port, "ps:1", homes[1], numbers[2]),
            ]
            for task in tasks:
                await task.welcomed()
            return tasks

        async with chief(bind=port, **folders(tmp_path)) as second:
            tasks = await back()
            await until(lambda: second.job.journal.history.num_ps == 2)
            assert (server.restored_from, newcomer.num_ps) == ("", 2), "between the journal and the restore"
            assert server.token > held
            await second.kill()
            for task in tasks:
                await task.die()
        server.restore_gate.set()
        async with chief(bind=port, **folders(tmp_path)) as third:
            tasks = await back()
            await until(lambda: tasks[0].membership.num_ps == 2 and all(t.live for t in tasks[0].membership.tasks))
            assert {server.restored_from, newcomer.restored_from} == {third.job.journal.history.checkpoint}
            assert (server.num_ps, server.token, newcomer.token) == (2, 0, 0)
            for task in tasks:
                await task.die()


async def test_what_came_between_the_journal_and_a_new_beginning_all_of_another_number_lack(tmp_path: Path) -> None:
    """The chief was gone, and the hold with it: of what one ps took then, it alone was asked when it had begun anew."""
    async with contextlib.AsyncExitStack() as stack:
        async with chief(**folders(tmp_path)) as running:
            port = running.address
            server, newcomer, worker = await without_newcomer(stack, running)
            stack.push_async_callback(worker.die)
            [lease] = (await worker.next(held=[0])).leases
            await stack.enter_async_context(ps(port, newcomer))
            server.restore_gate.clear()
            await ask(worker, 2)
            await until(lambda: running.job.sessions.tasks["ps:1"].state is SessionState.LIVE)
            numbers = (server.session.incarnation, newcomer.session.incarnation)
            homes = [running.job.sessions.tasks[f"ps:{index}"].address for index in range(2)]
            await running.kill()
        server.apply(Unit(1, 0, 1), num_servers=1)
        server.restore_gate.set()
        async with chief(bind=port, **folders(tmp_path)) as second:
            again = Task(port, "worker:0", resume=worker.incarnation, held=[lease])
            both = [Task(port, f"ps:{index}", homes[index], numbers[index]) for index in range(2)]
            for task in (again, *both):
                stack.push_async_callback(task.die)
            await until(lambda: again.membership.num_ps == 2 and all(task.live for task in again.membership.tasks))
            assert server.restored_from == newcomer.restored_from
            await again.next([0, 1], wait=False)
            await until(lambda: second.job.get_status().updates_lost == 2)


async def test_what_one_ps_lacked_all_of_another_number_lack_for_the_next_chief_too(tmp_path: Path) -> None:
    """It was in no journal: what was reported only to that chief was counted on the one alone."""
    async with contextlib.AsyncExitStack() as stack:
        running, [worker], [first] = await stack.enter_async_context(cluster(**folders(tmp_path)))
        await begun(running, worker, first)
        await first.session.die()
        await until(lambda: not running.job.sessions.servers)
        again, second = FakePs(0), FakePs(1)
        await stack.enter_async_context(ps(running.address, again))
        await until(lambda: running.job.sessions.live("ps"))
        assert again.restored_from
        await ask(worker, 2)
        await stack.enter_async_context(ps(running.address, second))
        await served(worker, 2)
        lacking = {"ps:0": again.session.incarnation, "ps:1": second.session.incarnation}
        assert running.job.journal.history.put_back == lacking


class Empty(FakePs):
    """No rows of any variable are on it."""

    def describe(self) -> Any:
        described = super().describe()
        described.initialized = False
        return described


async def test_a_ps_that_is_to_end_is_no_newcomer_and_one_that_held_nothing_has_lost_nothing(tmp_path: Path) -> None:
    async with cluster(**folders(tmp_path), max_ps=3) as (running, [worker], [first]):
        job = running.job
        await begun(running, worker, first)
        async with ps(running.address, Empty(1)) as second:
            await until(lambda: len(job.sessions.live("ps")) == 2)
            await worker.next([0], wait=False)
            await second.session.die()
            await until(lambda: len(job.sessions.servers) == 1)
            async with ps(running.address, Empty(1)):
                await until(lambda: len(job.sessions.live("ps")) == 2)
                assert job.get_status().updates_lost == 0
                await ask(worker, 1)
                await until(lambda: job.sessions.num_ps == 1)
                assert job.sessions.tasks["ps:1"].open and not job.sessions.newcomers
                job.scaling.tick()
                assert job.journal.history.wanted_ps == 1
            await until(lambda: not job.sessions.tasks["ps:1"].open)
            status = from_reply(wire.status_to_proto(job.get_status()))
            assert {task.task: task.state for task in status.tasks}["ps:1"] == "done", "nobody waits for it"
            assert "ps:1" not in judge(reading_of(status)).text()


def with_elements(described: Any, of_origin: int, taken: int) -> Any:
    described.origin_elements, described.taken_elements = of_origin, taken
    return described


class Told(FakePs):
    """It begins from a checkpoint of another number of ps, and says that it holds rows when a worker has told it so."""

    num_taken: int | None = None
    """Elements; None: nobody has told it yet."""

    def describe(self) -> Any:
        described = with_elements(super().describe(), 8, self.num_taken or 0)
        described.complete = self.num_taken is not None
        if self.index:
            described.num_updates = max(0, self.step - 1)  # ps:0 tells what was before
        return described


async def test_what_a_dead_worker_left_is_counted_once_it_is_known_what_each_ps_holds(tmp_path: Path) -> None:
    """Two optimizers that accumulate: the second one's update was lost, and no ps had rows yet that lacked it."""
    async with cluster(**folders(tmp_path)) as (running, [worker], [first]):
        job = running.job
        await begun(running, worker, first)
        await worker.next(held=[0], steps_per_unit=2)
        first.accumulates, first.per_unit = True, 2
        await ask(worker, 2)
        async with ps(running.address, Told(1)) as second:
            assert isinstance(second, Told)
            await until(lambda: len(job.sessions.live("ps")) == 2 and not first.token)
            num_described = first.num_described
            worker.goodbye(exit_code=1)
            await until(lambda: job.sessions.fenced.get("worker:0") and first.num_described > num_described + 2)
            assert job.lease_book.held(job.sessions.tasks["worker:0"].incarnation)
            second.num_taken = 0
            await until(lambda: not job.lease_book.held(job.sessions.tasks["worker:0"].incarnation))
            assert not job.journal.history.is_rerouted and job.get_status().updates_lost == 1


@pytest.mark.parametrize("of_first_model", [False, True])
async def test_what_one_ps_has_of_a_dead_worker_is_lost_on_another_that_is_told_of_its_rows_later(
    tmp_path: Path, of_first_model: bool
) -> None:
    """Of several units an update, for a chief that follows: they were closed on every ps before it was known that
    one lacks them, and that was never said; nor where a worker had told it of the first of two models, of which it
    holds nothing."""
    async with contextlib.AsyncExitStack() as stack:
        running, [worker], [first] = await stack.enter_async_context(cluster(**folders(tmp_path)))
        port, job = running.address, running.job
        await begun(running, worker, first)
        first.accumulates = True
        await ask(worker, 2)
        second = await stack.enter_async_context(ps(port, Told(1)))
        assert isinstance(second, Told)
        await until(lambda: len(job.sessions.live("ps")) == 2 and not first.token)
        places = [job.sessions.tasks[f"ps:{index}"].address for index in range(2)]
        first.apply(Unit(1, 0, 1), num_servers=1)
        if of_first_model:
            second.num_taken = 0
            described = first.describe
            first.describe = lambda: with_elements(described(), 8, 4)  # type: ignore[method-assign]
        await running.kill()
        async with chief(bind=port, **folders(tmp_path)) as following:
            tasks = [
                Task(port, server.session.task, place, server.session.incarnation, store_epoch=2)
                for server, place in zip((first, second), places, strict=True)
            ]
            tasks.append(await Task(port, "worker:0").ready())
            await until(lambda: following.job.is_open)
            assert following.job.journal.history.is_rerouted or of_first_model
            second.num_taken = 4 if of_first_model else 8
            await until(lambda: not following.job.journal.history.is_rerouted)
            if of_first_model:
                await following.job.recovery.count_lost()
            await until(lambda: following.job.get_status().updates_lost == 1)
            for task in tasks:
                await task.die()


@pytest.mark.parametrize("was_told", [False, True])
@pytest.mark.parametrize("num_taken", [0, 8])
async def test_what_a_ps_lacks_is_counted_once_it_is_known_whether_it_holds_rows(
    tmp_path: Path, num_taken: int, was_told: bool
) -> None:
    """It came back before any worker had told it, and updates that had no part there were reported lost; so it was
    with one that dies when workers had told its last process."""
    async with cluster(**folders(tmp_path)) as (running, [worker], [first]):
        job = running.job
        await begun(running, worker, first)
        await worker.next(held=[0])
        await ask(worker, 2)
        async with ps(running.address, Told(1)) as dead:
            assert isinstance(dead, Told)
            dead.num_taken = num_taken if was_told else None
            await until(lambda: len(job.sessions.live("ps")) == 2 and not first.token)
            await until(lambda: job.journal.history.is_rerouted is not was_told)
            applied([first, dead], 1)
            await worker.next([0, 1], wait=False)
            await dead.session.die()
            await until(lambda: len(job.sessions.servers) == 1)
        second = Told(1)
        async with ps(running.address, second):
            await until(lambda: len(job.sessions.live("ps")) == 2)
            assert second.restored_from and job.get_status().updates_lost == 0
            second.num_taken = num_taken
            await until(lambda: not job.journal.history.is_rerouted)
            await until(lambda: job.get_status().updates_lost == (1 if num_taken else 0))
            assert job.journal.history.initialized == ["ps:0", "ps:1"], "a worker may tell it more"


class TakesMeanwhile(Told):
    """Workers tell it what to take of that checkpoint just before commits are held for the next one."""

    def take(self) -> None:
        self.num_taken, self.step = 4, 1

    async def HoldCommits(self, request: Any, context: Any) -> Any:
        self.take()
        return await super().HoldCommits(request, context)


async def saved_by_one_ps(sizes: dict[str, Any]) -> Any:
    """The checkpoint that a job of one ps made after a step."""
    async with cluster(num_ps=1, **sizes) as (running, [worker], [server]):
        await until(lambda: running.job.journal.history.checkpoint)
        await worker.open()
        await worker.next()
        applied([server], 0, close=True)
        await worker.next([0], wait=False)
        return await running.job._maintenance.save()


async def test_what_ps_take_of_a_checkpoint_of_another_number_is_not_saved_as_another_one(tmp_path: Path) -> None:
    """Both are of the same step, and the chief, which had seen ps of step 0, ended the job."""
    sizes: dict[str, Any] = {"num_workers": 1, "checkpoint_dir": str(tmp_path)}
    made = await saved_by_one_ps(sizes)
    both = TakesMeanwhile(0), TakesMeanwhile(1)
    for each in both:
        each.num_taken = 0
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(chief(num_ps=2, **sizes))
        for each in both:
            await stack.enter_async_context(ps(running.address, each))
        worker = Task(running.address, "worker:0")
        stack.push_async_callback(worker.die)
        maintenance = running.job._maintenance
        await until(lambda: maintenance._delay[0] or running.job.sessions.stopping)
        assert "needs all variables, and 8 elements" in maintenance._delay[0]
        for each in both:
            each.take()
        await until(lambda: maintenance.newest)
        assert maintenance.newest is not None and maintenance.newest.path == made.path
        assert all("save" not in each.calls for each in both)


async def test_half_a_batch_that_a_ps_lacked_all_of_another_number_lack(tmp_path: Path) -> None:
    """Of two optimizers: the first one's update was gone with it, the second one's came to all, and was taken for the
    batch."""
    async with contextlib.AsyncExitStack() as stack:
        running, [worker], [first] = await stack.enter_async_context(cluster(**folders(tmp_path)))
        job = running.job
        await until(lambda: job.journal.history.checkpoint)
        await worker.open()
        await worker.next(steps_per_unit=2)
        await first.session.die()
        await until(lambda: not job.sessions.servers)
        both = FakePs(0), FakePs(1)
        await stack.enter_async_context(ps(running.address, both[0]))
        await until(lambda: job.sessions.live("ps"))
        await ask(worker, 2)
        await stack.enter_async_context(ps(running.address, both[1]))
        await until(lambda: len(job.sessions.live("ps")) == 2 and not both[0].token)
        for server in both:
            server.apply(Unit(1, 0, 0), 1)
        await until(lambda: not job.journal.history.is_rerouted)
        await worker.next([0], wait=False)
        manifest = (await job.saving.save(str(tmp_path / "checkpoints"), automatic=True)).manifest
        assert not manifest.accepted and manifest.unfinished == {(1, 0): UnitBitmap.of([0])}
        for server in both:
            server.per_unit = 2  # its worker has told them
        await job.recovery.count_lost()
        assert job.get_status().updates_lost == 2, "one on each"
        assert [server.closed for server in both] == [{(1, 0): UnitBitmap.of([0])}] * 2


async def test_a_ps_that_was_told_of_nothing_yet_goes_back_to_the_checkpoint_it_began_from(tmp_path: Path) -> None:
    """Workers were at their prepare: it was taken for one without rows, and came back empty where others had begun."""
    async with cluster(**folders(tmp_path)) as (running, [worker], [first]):
        job = running.job
        await begun(running, worker, first)
        await ask(worker, 2)
        second, reborn = Told(1), Told(1)
        second.num_taken = 0
        async with ps(running.address, second):
            await until(lambda: len(job.sessions.live("ps")) == 2 and not job.journal.history.is_rerouted)
            await second.session.die()
            await until(lambda: len(job.sessions.servers) == 1)
        async with ps(running.address, reborn):
            await until(lambda: len(job.sessions.live("ps")) == 2)
            assert (reborn.restored_from, reborn.num_ps) == (first.restored_from, 2)


async def test_a_checkpoint_that_waits_while_training_goes_on_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model lacks a variable of the checkpoint that the ps began from: no worker will ever take its rows."""
    server = Told(0)
    server.num_taken = 4
    caplog.set_level("INFO")
    async with chief(**folders(tmp_path)) as running, ps(running.address, server):
        worker = await Task(running.address, "worker:0").ready()
        await until(lambda: "4 elements of the one that the ps began from" in caplog.text)
        levels = {record.levelname for record in caplog.records if "has to wait" in record.getMessage()}
        assert levels == {"INFO"}, "a worker may be at its prepare"
        server.step = 1
        await until(lambda: any(r.levelname == "WARNING" and "has to wait" in r.getMessage() for r in caplog.records))
        await worker.die()


class Late(FakePs):
    """Its answer to one question takes a while."""

    gate: asyncio.Event | None = None

    async def DescribeUnits(self, request: Any, context: Any) -> Any:
        described, gate, self.gate = await super().DescribeUnits(request, context), self.gate, None
        if gate is not None:
            await gate.wait()
        return described

    async def RestoreShards(self, request: Any, context: Any) -> Any:
        self.complete = False
        return await super().RestoreShards(request, context)


@pytest.mark.parametrize("dies", [True, False])
async def test_what_ps_said_before_their_number_changed_says_nothing_of_what_they_hold_now(
    tmp_path: Path, dies: bool
) -> None:
    """The one that was left out was taken for all there were; when the other came back, it was put back to nothing."""
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(chief(**{**folders(tmp_path), "num_ps": 2}))
        servers = [Late(index) for index in range(2)]
        for server in servers:
            await stack.enter_async_context(ps(running.address, server))
        worker, job = Task(running.address, "worker:0"), running.job
        stack.push_async_callback(worker.die)
        await worker.ready()
        await begun(running, worker, servers[0])
        servers[0].gate = gate = asyncio.Event()
        looking = asyncio.create_task(job._maintenance._watch())
        await until(lambda: servers[0].gate is None)
        await ask(worker, 1)
        await until(lambda: worker.membership.num_ps == 1 and not servers[0].token)
        if dies:
            await servers[0].session.die()
            await until(lambda: not job.sessions.servers)
        gate.set()
        await looking
        assert job.journal.history.initialized == ["ps:0"] and job.journal.history.is_rerouted


@pytest.mark.parametrize(
    ("config", "plan", "words"),
    [
        ({"ps_replicas": 2, "num_ps": 2}, {}, "each one has a copy on another"),
        ({"checkpoint_dir": ""}, {}, "start the chief with --checkpoint-dir"),
        ({}, None, "has leased no data yet"),
        ({}, {"staleness": 0.0}, "at staleness 0"),
        ({}, {}, "expected at most 1,024 ps, got 4,000,000,000"),  # the chief would count them
    ],
)
async def test_what_is_refused(tmp_path: Path, config: dict[str, Any], plan: dict[str, Any] | None, words: str) -> None:
    async with cluster(**{**folders(tmp_path), **config}) as (_, [worker], _servers):
        if plan is not None:
            await worker.open(**plan)
        error = await refused(ask(worker, 4_000_000_000 if "at most" in words else 3))
        assert isinstance(error, ConfigurationError) and words in str(error)


async def test_a_checkpoint_of_another_number_of_ps_is_in_the_way_until_the_next_update(tmp_path: Path) -> None:
    """One ps went, and the whole job before an update; then both come again."""
    async with cluster(**folders(tmp_path) | {"num_ps": 2}) as (running, [worker], servers):
        await begun(running, worker, servers[0])
        await ask(worker, 1)
        await until(lambda: running.job.journal.history.num_ps == 1)
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(chief(**folders(tmp_path)))
        fakes = FakePs(0), FakePs(1)
        for fake in fakes:
            fake.step = 1
            await stack.enter_async_context(ps(running.address, fake))
        worker = Task(running.address, "worker:0")
        stack.push_async_callback(worker.die)
        await worker.ready()
        await ask(worker, 2)
        await until(lambda: "the files of another number of ps than now" in running.job.get_status().scaling)
        fakes[0].apply(Unit(1, 0, 1), num_servers=1)
        await until(lambda: running.job.journal.history.num_ps == 2)


async def test_what_no_ps_takes_of_a_checkpoint_of_another_number_is_told_before_units_are_leased(
    tmp_path: Path,
) -> None:
    """The model lacks a variable of it: all was trained, and could not be saved."""
    sizes: dict[str, Any] = {"num_workers": 1, "checkpoint_dir": str(tmp_path)}
    await saved_by_one_ps(sizes)
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(chief(num_ps=2, **sizes))
        for each in (Told(0), Told(1)):
            each.num_taken, each.step = 2, 1
            await stack.enter_async_context(ps(running.address, each))
        worker = Task(running.address, "worker:0")
        stack.push_async_callback(worker.die)
        maintenance = running.job._maintenance
        await until(lambda: maintenance.newest)
        await worker.open()
        await worker.next()
        assert "needs all variables, and 4 elements" in maintenance._delay[0]


@pytest.mark.parametrize(
    ("exit_code", "step", "is_told", "is_saved"),
    [(0, 2, True, True), (0, 0, True, False), (143, 2, True, False), (0, 2, False, False)],
)
async def test_what_no_model_has_is_left_out_of_the_last_checkpoint_of_a_job_that_is_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, exit_code: int, step: int, is_told: bool, is_saved: bool
) -> None:
    """The chief waited for a minute, and what was trained was not saved. It is not where another one would stay the
    newest, nor of a job that is shut down, which may prepare the rest yet, nor where a ps died as the workers ended and
    nobody tells its next process what it is to hold: the newest checkpoint lacked that, and the job ended with 0."""
    sizes: dict[str, Any] = {"num_workers": 1, "checkpoint_dir": str(tmp_path), "keep_checkpoints": 1}
    made = Path((await saved_by_one_ps(sizes)).path)
    both = Told(0), Told(1)
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(chief(num_ps=2, **sizes))
        servers = []
        for each in both:
            each.num_taken, each.step = 2, 1
            servers.append(await stack.enter_async_context(ps(running.address, each)))
        worker = Task(running.address, "worker:0")
        stack.push_async_callback(worker.die)
        await until(lambda: running.job._maintenance.newest)
        await worker.open()
        await worker.next()
        applied([*both], 1, close=True)
        await worker.next([0], wait=False)
        for each in both:
            each.step = step
        if not is_told:
            both[1].num_taken = None
        if exit_code:
            running.job.stop(exit_code, "the chief got SIGINT")
        worker.goodbye(exit_code)
        for server in servers:
            await server.session.stopped()
        assert await running.exit_code() == (0 if is_saved else 1)
    assert made.is_dir(), "it has them"
    assert [("save" in each.calls) for each in both] == [is_saved] * 2
    assert ("lacks 4 elements of the checkpoint that the ps began from" in caplog.text) is is_saved
    assert ("No last checkpoint" in caplog.text) is not is_saved
