"""The workers of the ``chief`` benchmark, all in one process: ``chief_job.py WORKERS RATE SECONDS``.

The chief is a process of its own, with a journal. Each worker has a connection, a session with heartbeats, and leases.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio

from benchmarks.chief import ChiefResult
from benchmarks.job_files import result_path
from benchmarks.window import between, read_counters
from stratagem.cluster.config import ChiefConfig
from stratagem.cluster.units import Plan
from stratagem.rpc.channels import connect_aio
from stratagem.rpc.generated import chief_pb2, chief_pb2_grpc, common_pb2
from stratagem.worker.leases import LeaseClient

NUM_UNITS = 1_000_000
JOINING = 50
"""Workers that join at once."""
WARM_UP_S = 3.0


class SimulatedWorker:
    """A worker that trains ``rate`` units a second as long as it has some."""

    def __init__(self, chief: str, index: int, rate: float) -> None:
        self.latencies: list[float] = []
        self.num_trained = 0
        self._period_s = 1.0 / rate
        self._leases = LeaseClient(_no_chief(), Plan(NUM_UNITS, 1))  # says what to ask for; asked here, without threads
        self._channel = connect_aio(chief)
        self._stub: Any = chief_pb2_grpc.ChiefStub(self._channel)
        self._sender = common_pb2.Sender(task=f"worker:{index}")
        self._welcome: asyncio.Future[chief_pb2.Welcome] = asyncio.get_running_loop().create_future()
        self._ready = asyncio.Event()
        self._ending = asyncio.Event()
        self._session = asyncio.create_task(self._attend())

    async def joined(self) -> None:
        """Waits until it is a member."""
        self._sender.incarnation = (await self._welcome).incarnation

    async def train(self, until: asyncio.Event) -> None:
        """Trains until told, and reports the rest."""
        await self._ready.wait()
        request = chief_pb2.OpenDatasetRequest(sender=self._sender, dataset=1, num_examples=NUM_UNITS, batch_size=1)
        request.num_slices, request.staleness = 1, float("inf")
        await self._stub.OpenDataset(request)
        self._leases.start_epoch(1, 0, 0)
        await asyncio.sleep(random.random())
        due = time.perf_counter()
        while not until.is_set():
            self._leases.take(await self._call(self._leases.request(wait=True)))
            units = [lease.unit for lease in iter(self._leases.ready, None)]
            due = max(due, time.perf_counter() - self._period_s) + len(units) * self._period_s
            await asyncio.sleep(due - time.perf_counter())
            for unit in units:
                self._leases.accept(unit)
            self.num_trained += len(units)
        report = self._leases.request(wait=False)
        report.want = 0
        await self._call(report)

    async def end(self) -> None:
        """Says goodbye."""
        self._ending.set()
        with contextlib.suppress(grpc.aio.AioRpcError):  # the chief was gone first
            await self._session
        await self._channel.close(None)

    async def _call(self, request: chief_pb2.NextUnitsRequest) -> chief_pb2.NextUnitsReply:
        begin = time.perf_counter()
        request.sender.CopyFrom(self._sender)
        reply: chief_pb2.NextUnitsReply = await self._stub.NextUnits(request)
        self.latencies.append(time.perf_counter() - begin)
        return reply

    async def _attend(self) -> None:
        async for event in self._stub.Session(self._says()):
            if event.HasField("welcome"):
                self._welcome.set_result(event.welcome)
            elif event.HasField("membership") and event.membership.ready:
                self._ready.set()

    async def _says(self) -> AsyncIterator[chief_pb2.SessionRequest]:
        yield chief_pb2.SessionRequest(join=chief_pb2.Join(task=self._sender.task, address="localhost:1"))
        interval_s = (await self._welcome).heartbeat_interval_s
        while not self._ending.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), interval_s)
            yield chief_pb2.SessionRequest(heartbeat=chief_pb2.Heartbeat(progress=chief_pb2.Progress(step=1)))
        yield chief_pb2.SessionRequest(goodbye=chief_pb2.Goodbye(exit_code=0))


def _no_chief() -> Any:
    return None


@contextlib.contextmanager
def _chief(num_workers: int) -> Iterator[tuple[str, int]]:
    """A chief: its address and its process."""
    with tempfile.TemporaryDirectory() as folder:
        config = ChiefConfig(bind="127.0.0.1:0", num_workers=num_workers, state_dir=folder, start_timeout_s=600.0)
        command = [sys.executable, "-m", "stratagem.chief", "--print-address", "--until-eof", "--config-json"]
        with subprocess.Popen(
            [*command, config.model_dump_json()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process.pid
            process.stdin.close()


async def measure(num_workers: int, rate: float, seconds: float) -> ChiefResult:
    """Runs the job."""
    with _chief(num_workers) as (address, pid):
        workers: list[SimulatedWorker] = []
        for first in range(0, num_workers, JOINING):
            some = [SimulatedWorker(address, i, rate) for i in range(first, min(num_workers, first + JOINING))]
            await asyncio.gather(*(worker.joined() for worker in some))
            workers += some
        gc.collect()
        gc.disable()  # all workers have one heap here: looking through it holds all of them up, 25 ms of the p99
        until = asyncio.Event()
        training = [asyncio.create_task(worker.train(until)) for worker in workers]
        await asyncio.sleep(WARM_UP_S)
        for worker in workers:
            worker.latencies.clear()
        begin, num_before = read_counters(pid), _num_trained(workers)
        await asyncio.sleep(seconds)
        window = between(begin, read_counters(pid))
        num_units = _num_trained(workers) - num_before
        latencies = sorted(latency for worker in workers for latency in worker.latencies)
        until.set()
        await asyncio.gather(*training)
        async with connect_aio(address) as channel:
            stub: Any = chief_pb2_grpc.ChiefStub(channel)
            num_accepted = (await stub.GetStatus(chief_pb2.GetStatusRequest())).units_accepted
        await asyncio.gather(*(worker.end() for worker in workers))
        p50_s, p99_s = latencies[len(latencies) // 2], latencies[len(latencies) * 99 // 100]
        is_exact = num_accepted == _num_trained(workers)
        return ChiefResult(window.elapsed_s, num_units, len(latencies), window.cpu_s, p50_s, p99_s, is_exact)


def _num_trained(workers: list[SimulatedWorker]) -> int:
    return sum(worker.num_trained for worker in workers)


def main() -> None:
    """Measures, and leaves the result."""
    num_workers, rate, seconds = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    result = asyncio.run(measure(num_workers, rate, seconds))
    result_path().write_text(json.dumps(dataclasses.asdict(result)))


if __name__ == "__main__":
    main()
