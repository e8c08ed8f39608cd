"""Synchronous steps while ps, workers and chiefs come and go: whose a slice is, and in which step, over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from stratagem.cluster.units import Unit, UnitBitmap, Update
from stratagem.errors import ConfigurationError
from stratagem.rpc.generated import chief_pb2
from tests.contract.chief.fakes import (
    DEADLINE_S,
    SYNC,
    FakePs,
    Task,
    applied,
    chief,
    cluster,
    indices,
    ps,
    refused,
    until,
)


async def test_at_staleness_0_all_ps_go_back_together(tmp_path: Path) -> None:
    async with cluster(checkpoint_dir=str(tmp_path)) as (running, workers, servers):
        await until(lambda: running.job.journal.history.checkpoint)
        for worker in workers:
            await worker.open(**SYNC)
            await worker.next()
        applied(servers, 0, 1)
        [second] = (await workers[0].next([0])).leases
        assert (second.step, second.unit.index) == (2, 2)
        # worker:1 is still in step 1 (its reply got lost with ps:1); worker:0 is in step 2.
        await servers[1].session.die()
        await until(lambda: len(running.job.sessions.servers) == 1)
        async with ps(running.address, FakePs(1)) as reborn:
            await until(lambda: len(running.job.sessions.live("ps")) == 2)
            assert servers[0].restored_from == reborn.restored_from == str(tmp_path / "step-00000000")
            # worker:1 says that its slice is accepted, but it was so before the restore only.
            [first] = (await workers[1].next([1], held=[], wait=False)).leases
            assert running.job.lease_book.epoch(1, 0).num_accepted == 0
            # Both forget what they held and ask anew: the units come in the order of the plan, in a new step.
            [other] = (await workers[0].next([], held=[], wait=False)).leases
            assert {first.unit.index, other.unit.index} == {0, 1}
            assert first.step == other.step == 3
            for server in (servers[0], reborn):
                server.apply(Unit(1, 0, other.unit.index))
            await workers[0].next([other.unit.index], held=[], wait=False)
            assert other.unit.index in running.job.lease_book.epoch(1, 0).accepted


async def test_a_slice_that_a_checkpoint_has_leaves_the_step_that_it_came_into_since(tmp_path: Path) -> None:
    """All ps had gone back to a checkpoint with the unit, which was dealt again, and only then its worker reported it:
    it counted as done, and the others waited in the new step for a slice that nobody had."""
    async with cluster(checkpoint_dir=str(tmp_path)) as (running, workers, servers):
        await until(lambda: running.job.journal.history.checkpoint)
        for worker in workers:
            await worker.open(**SYNC)
            await worker.next()
        await servers[1].session.die()
        await until(lambda: len(running.job.sessions.servers) == 1)
        async with ps(running.address, FakePs(1)) as reborn:
            await until(lambda: len(running.job.sessions.live("ps")) == 2)
            applied([servers[0], reborn], 1)  # as the checkpoint has it
            [mine] = (await workers[0].next([], held=[], wait=False)).leases
            assert (mine.unit.index, mine.step) == (0, 2)
            assert not (await workers[1].next([1], held=[], wait=False)).leases, "not before it has step 2"
            assert running.job.lease_book.epoch(1, 0).num_accepted == 1
            assert servers[0].closings == reborn.closings == {2: ([Unit(1, 0, 0)], [])}
            applied([servers[0], reborn], 0)
            await workers[0].next([0], wait=False)
            [other] = (await workers[1].next()).leases
            assert (other.unit.index, other.step) == (3, 3)


async def test_a_restarted_chief_finds_owners_for_the_slices_of_a_step(tmp_path: Path) -> None:

    async def _welcomed(tasks: list[Task]) -> list[Any]:
        for task in tasks:
            await task.welcomed()
        return [None, (await tasks[1].next()).leases]

    async with contextlib.AsyncExitStack() as stack:
        async with chief(num_ps=1, state_dir=str(tmp_path)) as first:
            port = first.address
            server = await stack.enter_async_context(ps(port, FakePs(0)))
            workers = [Task(port, f"worker:{index}") for index in range(2)]
            for worker in workers:
                await worker.ready()
                await worker.open(**SYNC)
            [mine] = (await workers[0].next()).leases
            await first.kill()
        async with chief(bind=port, num_ps=1, state_dir=str(tmp_path)):
            tasks = [
                Task(port, "worker:0", resume=workers[0].incarnation, held=[mine]),
                Task(port, "worker:1", resume=workers[1].incarnation),
                Task(port, "ps:0", server.session.address, server.session.incarnation),
            ]
            [other] = (await _welcomed(tasks))[1]
            assert (other.unit.index, other.step, list(other.step_units)) == (1, 1, [0, 1])
            applied([server], 0)
            [later] = (await tasks[0].next([0])).leases
            assert later.step > 1
            for task in tasks:
                await task.die()
        for worker in workers:
            await worker.die()


async def test_a_restarted_chief_knows_who_has_left_a_pass(tmp_path: Path) -> None:
    """It gave them slices there, for which all others waited."""
    async with contextlib.AsyncExitStack() as stack:
        async with chief(num_ps=1, state_dir=str(tmp_path)) as first:
            port = first.address
            server = await stack.enter_async_context(ps(port, FakePs(0)))
            workers = [Task(port, f"worker:{index}") for index in (0, 1)]
            for worker in workers:
                await worker.ready()
                await worker.open(**SYNC)
            await workers[0].next(want=0, wait=False, leave=True)
            [lost] = (await workers[1].next()).leases
            assert list(lost.step_units) == [0]
            await first.kill()
        async with chief(bind=port, num_ps=1, state_dir=str(tmp_path)):
            tasks = [Task(port, f"worker:{index}", resume=one.incarnation) for index, one in enumerate(workers)]
            tasks.append(Task(port, "ps:0", server.session.address, server.session.incarnation))
            for task in tasks:
                await task.welcomed()
            [again] = (await tasks[1].next()).leases
            assert (again.unit, again.step) == (lost.unit, lost.step)
            applied([server], 0)
            [alone] = (await tasks[1].next([0])).leases
            assert list(alone.step_units) == [1]
            for task in tasks:
                await task.die()
        for worker in workers:
            await worker.die()


async def test_what_a_worker_leaves_is_closed_to_the_end_though_its_connection_breaks() -> None:
    """A ps waited for ever for a slice of the second step, of which it had not heard when the call was cancelled; the
    repeated call found nothing to close, and what was held was dealt again before all ps had heard of the first."""
    async with cluster(num_ps=1) as (_, workers, [server]):
        for worker in workers:
            await worker.open(**SYNC)
            assert len((await worker.next(want=2)).leases) == 2
        server.close_gate.clear()
        leaving = asyncio.create_task(workers[0].next(want=0, wait=False, leave=True))
        await until(lambda: 1 in server.closings)
        leaving.cancel()
        again = asyncio.create_task(workers[0].next(want=0, wait=False, leave=True))
        dealt = (await workers[1].next([1], held=[3], wait=False)).leases
        assert not dealt and not again.done(), "not before the ps has heard all of it"
        server.close_gate.set()
        await again
        assert server.closings == {1: ([Unit(1, 0, 1)], []), 2: ([Unit(1, 0, 3)], [])}


async def test_a_restarted_chief_knows_who_has_left_a_fit(tmp_path: Path) -> None:
    """By an exception that its script caught: slices were its, and the others waited for it at the end of the epoch."""
    async with contextlib.AsyncExitStack() as stack:
        async with chief(num_ps=1, num_workers=3, state_dir=str(tmp_path)) as first:
            port = first.address
            server = await stack.enter_async_context(ps(port, FakePs(0)))
            workers = [Task(port, f"worker:{index}") for index in range(3)]
            for worker in workers:
                await worker.ready()
                await worker.open(num_examples=6, batch_size=3, num_slices=3, staleness=0.0)
            ends = chief_pb2.Topic(group="fit 1, ends")
            await workers[0].stub.Agree(chief_pb2.AgreeRequest(sender=workers[0].sender, topic=ends, leave=True))
            [mine] = (await workers[1].next(group=ends.group)).leases
            assert list(mine.step_units) == [0, 1]
            await first.kill()
        async with chief(bind=port, num_ps=1, num_workers=3, state_dir=str(tmp_path)):
            held: dict[Task, list[Any]] = {workers[1]: [mine]}
            tasks = [Task(port, one.task, resume=one.incarnation, held=held.get(one, [])) for one in workers]
            tasks.append(Task(port, "ps:0", server.session.address, server.session.incarnation))
            for task in tasks:
                await task.welcomed()
            [other] = (await tasks[2].next(group=ends.group)).leases
            assert (other.unit.index, other.step) == (1, 1), "a reply that got lost had it"
            applied([server], 0, 1)
            assert list((await tasks[1].next([0], group=ends.group)).leases[0].step_units) == [2]
            applied([server], 2)
            for task, index in ((tasks[1], 2), (tasks[2], 1)):
                await task.next([index], want=0, wait=False, group=ends.group)
            said = [chief_pb2.AgreeRequest(sender=task.sender, topic=ends, value=0) for task in tasks[1:3]]
            await asyncio.gather(*(tasks[1].stub.Agree(each, timeout=DEADLINE_S) for each in said))
            for task in tasks:
                await task.die()
        for worker in workers:
            await worker.die()


async def test_a_worker_comes_back_to_no_job_in_step_whose_updates_are_of_several_batches() -> None:
    """Its first batch was the others' second one: all waited for each other."""
    async with cluster(num_workers=2, num_ps=1) as (running, [first, second], [server]):
        for worker in (first, second):
            await worker.open(num_slices=2, staleness=0.0)
        second.goodbye(exit_code=1)
        await until(lambda: not running.job.sessions.tasks["worker:1"].open)
        for server.accumulates in (True, False):
            again = await Task(running.address, "worker:1").ready()
            if server.accumulates:
                error = await refused(again.open(num_slices=2, staleness=0.0))
                assert isinstance(error, ConfigurationError) and "start the job again" in str(error)
            else:
                await again.open(num_slices=2, staleness=0.0)
            await again.die()


async def test_what_ps_have_of_an_update_of_several_batches_is_not_leased_again(tmp_path: Path) -> None:
    """The journal had not got to say so when the chief's machine crashed, and no ps had heard that it is closed."""
    async with contextlib.AsyncExitStack() as stack:
        async with chief(num_workers=1, num_ps=1, state_dir=str(tmp_path)) as first:
            port = first.address
            server = await stack.enter_async_context(ps(port, FakePs(0)))
            worker = await Task(port, "worker:0").ready()
            await worker.open(num_slices=1, staleness=0.0)
            assert indices(await worker.next(steps_per_unit=1)) == [0]
            assert indices(await worker.next(held=[0], steps_per_unit=1)) == [1]
            await first.kill()
        server.open[Update((Unit(1, 0, 0), Unit(1, 0, 1)), 0)], server.accumulates = 1, True
        async with chief(bind=port, num_workers=1, num_ps=1, state_dir=str(tmp_path)) as second:
            tasks = [
                Task(port, "worker:0", resume=worker.incarnation),
                Task(port, "ps:0", server.session.address, server.session.incarnation),
            ]
            for task in tasks:
                await task.welcomed()
            assert indices(await tasks[0].next(steps_per_unit=1)) == [2]
            assert second.job.lease_book.positions() == server.closed == {(1, 0): UnitBitmap.of([0, 1])}
            for task in tasks:
                await task.die()
        await worker.die()


async def test_a_report_of_before_all_went_back_says_nothing_of_what_another_worker_has_made_since(
    tmp_path: Path,
) -> None:
    """All ps had the other's updates, so the report was believed, and the worker refused: its script ended."""
    async with cluster(checkpoint_dir=str(tmp_path)) as (running, workers, servers):
        await until(lambda: running.job.journal.history.checkpoint)
        for worker in workers:
            await worker.open(**SYNC)
        await workers[0].next()
        applied(servers, 1)  # by worker:0, whose report does not come through
        await servers[1].session.die()
        await until(lambda: len(running.job.sessions.servers) == 1)
        async with ps(running.address, FakePs(1)) as reborn:
            await until(lambda: len(running.job.sessions.live("ps")) == 2)
            [theirs] = (await workers[1].next()).leases
            assert theirs.unit.index == 1
            applied([servers[0], reborn], 1)
            await workers[0].next([1], want=0, wait=False)
            accepted = running.job.lease_book.epoch(1, 0).accepted
            assert 1 not in accepted
            await workers[1].next([1], want=0, wait=False)
            assert 1 in accepted


async def test_a_report_that_was_not_believed_says_nothing_when_it_comes_again_after_all_went_back(
    tmp_path: Path,
) -> None:
    """Its reply was lost, and the slice leased anew meanwhile: the other worker waited for it for ever."""
    folders: dict[str, Any] = {"checkpoint_dir": str(tmp_path / "checkpoints"), "state_dir": str(tmp_path / "state")}
    servers = [FakePs(0), FakePs(1)]
    async with contextlib.AsyncExitStack() as stack:
        async with chief(num_workers=1, **folders) as first:
            port = first.address
            for server in servers:
                await stack.enter_async_context(ps(port, server))
            worker = await Task(port, "worker:0").ready()
            await until(lambda: first.job.journal.history.checkpoint)
            await worker.open(num_slices=1, staleness=0.0)
            assert indices(await worker.next(steps_per_unit=2)) == [0]
            place = first.job.sessions.tasks["ps:1"].address
            await first.kill()
        servers[1].open[Update((Unit(1, 0, 0),), 1)] = 1  # and what ps:0 had of it is gone
        async with chief(bind=port, num_workers=1, **folders) as second:
            resumed = Task(port, "worker:0", resume=worker.incarnation)
            survivor = Task(port, "ps:1", place, servers[1].session.incarnation, store_epoch=1)
            async with ps(port, FakePs(0)):
                for task in (resumed, survivor):
                    await task.welcomed()
                await until(lambda: len(second.job.sessions.live("ps")) == 2)
                book = second.job.lease_book
                await resumed.next([0], want=0, wait=False, steps_per_unit=2)
                assert 0 not in book.epoch(1, 0).accepted
                assert indices(await resumed.next(steps_per_unit=2)) == [0]
                await resumed.next([0], want=0, wait=False, steps_per_unit=2)
                assert 0 not in book.epoch(1, 0).accepted
            for task in (resumed, survivor, worker):
                await task.die()


async def test_a_slice_that_stays_in_its_step_is_accepted_once_every_ps_has_heard_it() -> None:
    """Workers were told that the epoch was over, and a chief that followed, which did not know of it, waited for it."""
    asked, heard = asyncio.Event(), asyncio.Event()

    class Slow(FakePs):
        async def CloseStep(self, request: Any, context: Any) -> Any:
            asked.set()
            await heard.wait()
            return await super().CloseStep(request, context)

    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(chief(num_ps=1))
        server = await stack.enter_async_context(ps(running.address, Slow(0)))
        workers = [Task(running.address, f"worker:{index}") for index in range(2)]
        for worker in workers:
            await worker.ready()
            await worker.open(**SYNC)
            await worker.next()
        await workers[0].next([0], want=0, wait=False)
        server.committed_slices = [(1, Unit(1, 0, 1))]
        await workers[1].die()
        await until(asked.is_set)
        accepted = running.job.lease_book.epoch(1, 0).accepted
        assert 1 not in accepted
        heard.set()
        await until(lambda: 1 in accepted and 1 in running.job.journal.history.accepted[1, 0])
        await workers[0].die()


async def test_a_slice_that_was_closed_out_of_its_step_comes_in_a_later_one(tmp_path: Path) -> None:
    """A chief that followed believed a worker that the step had it still, and leased it in that: no ps took it."""
    server = FakePs(0)
    async with contextlib.AsyncExitStack() as stack:
        async with chief(num_ps=1, state_dir=str(tmp_path)) as first:
            port = first.address
            await stack.enter_async_context(ps(port, server))
            workers = [Task(port, f"worker:{index}") for index in range(2)]
            for worker in workers:
                await worker.ready()
                await worker.open(**SYNC)
            [mine] = (await workers[0].next()).leases
            await workers[1].die()
            await until(lambda: 1 in server.closings)
            assert server.closings[1] == ([Unit(1, 0, 0)], [])
            place = first.job.sessions.tasks["ps:0"].address
            await first.kill()
        server.closings.clear()  # as if it had not heard: its workers wait for the slice
        async with chief(bind=port, num_ps=1, state_dir=str(tmp_path)) as second:
            resumed = Task(port, "worker:0", resume=workers[0].incarnation, held=[mine])
            await until(lambda: second.job.sessions.live("worker"))
            again = Task(port, "ps:0", place, server.session.incarnation, store_epoch=1)
            reborn = await Task(port, "worker:1").welcomed()
            await until(lambda: server.closings == {1: ([Unit(1, 0, 0)], [])})
            applied([server], 0)
            await resumed.next([0], wait=False)
            [theirs] = (await reborn.next()).leases
            assert theirs.unit.index == 1 and theirs.step > 1
            for task in (resumed, again, reborn, workers[0]):
                await task.die()


async def test_a_slice_counts_as_committed_whose_own_worker_committed_it(tmp_path: Path) -> None:
    """A chief that followed took another slice of the same step, which nobody had computed, for committed too."""
    server = FakePs(0)
    async with contextlib.AsyncExitStack() as stack:
        async with chief(num_ps=1, state_dir=str(tmp_path)) as first:
            port = first.address
            await stack.enter_async_context(ps(port, server))
            workers = [Task(port, f"worker:{index}") for index in range(2)]
            for worker in workers:
                await worker.ready()
                await worker.open(**SYNC)
            assert [lease.unit.index for lease in (await workers[0].next()).leases] == [0]
            place = first.job.sessions.tasks["ps:0"].address
            server.fence_gate.clear()
            await workers[0].die()
            await until(lambda: first.job.journal.history.fenced)
            await first.kill()
        server.committed_slices = [(1, Unit(1, 0, 0))]
        server.fence_gate.set()
        async with chief(bind=port, num_ps=1, state_dir=str(tmp_path)):
            resumed = Task(port, "worker:1", resume=workers[1].incarnation)
            again = Task(port, "ps:0", place, server.session.incarnation, store_epoch=1)
            await until(lambda: 1 in server.closings)
            included, committed = server.closings[1]
            assert included == [Unit(1, 0, 0), Unit(1, 0, 1)]
            assert [update.units for update in committed] == [(Unit(1, 0, 0),)]
            [mine] = (await resumed.next()).leases
            assert (mine.step, mine.unit.index) == (1, 1)
            for task in (resumed, again, workers[1]):
                await task.die()


async def test_a_chief_that_follows_does_not_take_back_what_was_leased_before_all_ps_went_back(tmp_path: Path) -> None:
    """A worker that had not heard of it held the unit in a step that was over, and the unit was in another step."""
    sizes: dict[str, Any] = {"num_ps": 1, "state_dir": str(tmp_path / "state"), "checkpoint_dir": str(tmp_path)}
    async with contextlib.AsyncExitStack() as stack:
        async with chief(**sizes) as first:
            port = first.address
            dead = await stack.enter_async_context(ps(port, FakePs(0)))
            workers = [Task(port, f"worker:{index}") for index in range(2)]
            for worker in workers:
                await worker.ready()
                await worker.open(**SYNC)
            [before] = (await workers[0].next()).leases
            await workers[1].next()
            await dead.session.die()
            await until(lambda: not first.job.sessions.servers)
            reborn = await stack.enter_async_context(ps(port, FakePs(0)))
            await until(lambda: first.job.sessions.live("ps"))
            assert reborn.restored_from
            [after] = (await workers[1].next()).leases
            assert (after.step, list(after.step_units)) == (2, [0, 1])
            place = first.job.sessions.tasks["ps:0"].address
            await first.kill()
        async with chief(bind=port, **sizes) as second:
            tasks = [
                Task(port, "worker:0", resume=workers[0].incarnation, held=[before]),
                Task(port, "worker:1", resume=workers[1].incarnation, held=[after]),
                Task(port, "ps:0", place, reborn.session.incarnation, store_epoch=2),
            ]
            await until(lambda: second.job.is_open or second.job.sessions.stopping)
            assert second.job.sessions.stopping is None
            [again] = (await tasks[0].next()).leases
            assert (again.step, again.unit.index) == (2, 0)
            for task in [*tasks, *workers]:
                await task.die()


async def test_who_has_heard_of_the_end_of_a_part_is_not_waited_for_in_it_after_all_went_back(tmp_path: Path) -> None:
    """`fit(steps_per_epoch=)`, after a restart of the chief: a worker that had died came to the part again and waited
    in it for the other one, which waited at its end."""
    config: dict[str, Any] = {"state_dir": str(tmp_path / "state"), "checkpoint_dir": str(tmp_path / "checkpoints")}
    config |= {"num_workers": 1, "num_ps": 1}
    async with contextlib.AsyncExitStack() as stack:
        async with chief(**config) as first:
            port = first.address
            worker, server = Task(port, "worker:0"), await stack.enter_async_context(ps(port, FakePs(0)))
            await until(lambda: first.job.journal.history.checkpoint)
            await worker.open(**{**SYNC, "num_slices": 1})
            await worker.next(stop=1)
            server.close_unit(Unit(1, 0, 0))
            assert (await worker.next([0], stop=1)).end
            place = first.job.sessions.tasks["ps:0"].address
            await first.kill()
        async with chief(bind=port, **config) as second:
            gone = Task(port, "ps:0", place, server.session.incarnation, store_epoch=1)
            resumed = Task(port, "worker:0", resume=worker.incarnation)
            await until(lambda: second.job.is_open)
            await gone.die()
            await stack.enter_async_context(ps(port, FakePs(0)))
            await until(lambda: second.job.get_status().updates_lost == 1)
            assert (await resumed.next(stop=1)).end
            for task in (resumed, worker):
                await task.die()


class Unmarked(FakePs):
    """It is not marked what was lost, until it may be."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.mark_gate = asyncio.Event()

    async def MarkLost(self, request: Any, context: Any) -> Any:
        await self.mark_gate.wait()
        return await super().MarkLost(request, context)


async def test_what_was_lost_of_an_epoch_that_is_over_is_lost_for_a_chief_that_follows(tmp_path: Path) -> None:
    """The chief died before the ps had closed it: a worker that was started anew got these units once more."""
    config: dict[str, Any] = {"state_dir": str(tmp_path / "state"), "checkpoint_dir": str(tmp_path / "checkpoints")}
    config |= {"num_workers": 1, "num_ps": 1}
    async with contextlib.AsyncExitStack() as stack:
        async with chief(**config) as first:
            port = first.address
            worker = Task(port, "worker:0")
            async with ps(port, FakePs(0)) as server:
                await until(lambda: first.job.journal.history.checkpoint)
                await worker.open(**{**SYNC, "num_examples": 4})
                for index in range(2):
                    await worker.next()
                    server.close_unit(Unit(1, 0, index))
                    await worker.next([index], wait=False, want=0)
            reborn = Unmarked(0)
            await stack.enter_async_context(ps(port, reborn))
            await until(lambda: first.job.journal.history.updates_lost)
            place = first.job.sessions.tasks["ps:0"].address
            await first.kill()
        reborn.mark_gate.set()
        async with chief(bind=port, **config) as second:
            tasks = [
                Task(port, "worker:0", resume=worker.incarnation),
                Task(port, "ps:0", place, reborn.session.incarnation, store_epoch=2),
            ]
            await until(lambda: second.job.is_open)
            assert second.job.lease_book.epoch(1, 0).closed and second.job.get_status().updates_lost == 2
            assert list(reborn.closed[1, 0]) == [0, 1]
            for task in (*tasks, worker):
                await task.die()


@pytest.mark.parametrize("breaks", [True, False])
async def test_it_is_said_when_batches_have_more_parts_than_there_are_workers(
    caplog: pytest.LogCaptureFixture, breaks: bool
) -> None:
    """A worker had ended early, with 0, or left its loop, and nobody heard that its parts became updates of their own,
    or why."""
    async with cluster() as (running, workers, servers):
        for worker in workers:
            await worker.open(**SYNC)
            await worker.next()
        applied(servers, 0, 1)
        await workers[1].next([1], wait=False)
        assert "parts of its batch" not in caplog.text
        if breaks:
            await workers[1].next(want=0, wait=False, leave=True)
        else:
            workers[1].goodbye()
            await until(lambda: len(running.job.sessions.live("worker")) == 1)
        accepted = 0
        for _ in range(2):
            [lease] = (await workers[0].next([accepted])).leases
            accepted = lease.unit.index
            applied(servers, accepted)
        why = "worker:1 left the dataset early" if breaks else "fewer workers take part than before"
        assert caplog.text.count(f"has 1 of the 2 parts of its batch, as {why}") == 1
