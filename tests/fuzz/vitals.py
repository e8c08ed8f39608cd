"""What the process under attack takes, and whether it still serves."""

from __future__ import annotations

import dataclasses
import itertools
import threading

import psutil
import torch

from stratagem.rpc.channels import connect
from stratagem.rpc.generated import chief_pb2, chief_pb2_grpc, worker_pb2
from stratagem.rpc.generated.worker_pb2_grpc import WorkerStub
from tests.contract.ps.raw_client import RawClient

HONEST = "worker:40961"
"""A name that mutations do not hit."""
TIMEOUT_S = 30.0
PAUSE_S = 0.05


@dataclasses.dataclass(frozen=True)
class Vitals:
    """Of a process."""

    rss_bytes: int
    num_threads: int
    num_fds: int

    @classmethod
    def of(cls, pid: int) -> Vitals:
        """Those of now."""
        process = psutil.Process(pid)
        return cls(process.memory_info().rss, process.num_threads(), process.num_fds())


class Witness:
    """An honest client of all three servers, in a thread of its own: it must never be refused.

    Args:
        addresses: of each server, by its name.
    """

    def __init__(self, addresses: dict[str, str]) -> None:
        self.num_rounds = 0
        self.error: BaseException | None = None
        self._over = threading.Event()
        self._addresses = addresses
        self._thread = threading.Thread(target=self._run, name="witness")
        self._ready = threading.Event()
        self._thread.start()
        self._ready.wait(TIMEOUT_S)

    def check(self) -> None:
        """Raises what went wrong so far."""
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        """Ends it; raises what went wrong."""
        self._over.set()
        self._thread.join(2 * TIMEOUT_S)
        self.check()

    def _run(self) -> None:
        try:
            self._witness()
        except BaseException as error:
            self.error = error
        finally:
            self._ready.set()

    def _witness(self) -> None:
        client = RawClient(self._addresses["ps"], HONEST)
        channels = {name: connect(self._addresses[name]) for name in ("chief", "worker")}
        chief, worker = chief_pb2_grpc.ChiefStub(channels["chief"]), WorkerStub(channels["worker"])
        try:
            client.create(torch.arange(4.0))
            for transfer in itertools.count(100):
                if self._over.is_set():
                    return
                reply = client.pull(transfer)
                weights = client.receive(4, reply.versions[0].num_frames)
                assert weights.numel() == 4
                chief.GetStatus(chief_pb2.GetStatusRequest(), timeout=TIMEOUT_S)
                worker.GetPosition(worker_pb2.GetPositionRequest(), timeout=TIMEOUT_S)
                self.num_rounds += 1
                self._ready.set()
                self._over.wait(PAUSE_S)
        finally:
            client.close()
            for channel in channels.values():
                channel.close()
