"""The process under attack: a chief, a ps and a worker's server, as their own commands make them, without a job.

Prints one JSON line with their addresses, and ends in order when standard input does.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading

from stratagem.chief.job import ChiefJob
from stratagem.chief.servicer import SERVICE as CHIEF
from stratagem.chief.servicer import ChiefServicer
from stratagem.cluster.config import ChiefConfig, ServerConfig
from stratagem.cluster.membership import Member, Membership
from stratagem.ps.servicer import SERVICE as PS
from stratagem.ps.servicer import ParameterServerServicer
from stratagem.ps.socket_lanes import SocketLanes
from stratagem.ps.specs import Limits
from stratagem.ps.store import Store
from stratagem.rpc.confinement import AllowedFolders
from stratagem.rpc.generated import chief_pb2_grpc
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.logs import configure_logging
from stratagem.rpc.server import add_servicer, serve, serve_aio
from stratagem.rpc.session import SessionClient
from stratagem.worker.ring.ring_service import RingService
from stratagem.worker.servicer import SERVICE as WORKER
from stratagem.worker.servicer import WorkerServicer
from tests.fuzz.seeds import ATTACKERS, NUM_WORKERS

LIMITS = ServerConfig(task="ps:0", max_message_bytes=1 << 20, max_calls=256)
STORE_LIMITS = Limits(max_variables=64, max_store_bytes=1 << 20, max_peer_bytes=1 << 20, max_peers=64)


def membership() -> Membership:
    """The attackers are workers of this cluster."""
    tasks = (("worker:0", 1), *ATTACKERS.items())
    members = (Member(task, "127.0.0.1:1", incarnation, True) for task, incarnation in tasks)
    return Membership(True, tuple(members), "worker:0")


async def chief(addresses: dict[str, str], ready: threading.Event, over: threading.Event) -> None:
    """Serves a job without parameter servers."""
    config = ChiefConfig(num_workers=NUM_WORKERS, num_ps=0)
    job = ChiefJob(config)  # no ps come
    server = await serve_aio(
        LIMITS,
        lambda server: chief_pb2_grpc.add_ChiefServicer_to_server(ChiefServicer(job), server),
        services=[CHIEF],
    )
    running = asyncio.create_task(job.run())
    addresses["chief"] = server.address
    ready.set()
    await asyncio.to_thread(over.wait)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop(0)
    job.close()


def main() -> None:
    configure_logging("target")
    addresses: dict[str, str] = {}
    ready, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(chief(addresses, ready, over)))
    thread.start()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(limits=STORE_LIMITS, frames_timeout_s=0.2, folders=AllowedFolders([folder]))
        lanes = SocketLanes(store, "127.0.0.1")
        ps_servicer = ParameterServerServicer(store, lanes, LIMITS.max_message_bytes)
        ring_service = RingService("127.0.0.1", membership, BytesMeter())
        servers = [
            serve(
                LIMITS,
                lambda server, service=service, servicer=servicer: add_servicer(service, servicer, server),  # type: ignore[misc]
                services=[service.full_name],
            )
            for service, servicer in ((PS, ps_servicer), (WORKER, WorkerServicer(ring_service)))
        ]
        addresses["ps"], addresses["worker"] = (server.address for server in servers)
        ready.wait()
        sessions = [SessionClient(addresses["chief"], f"worker:{index}", "") for index in range(NUM_WORKERS)]
        for session in sessions:
            session.start()
        print(json.dumps(addresses), flush=True)
        sys.stdin.read()
        for session in sessions:
            session.close()
        over.set()
        for server in servers:
            server.stop(0)
        lanes.close()
        ring_service.close()
        thread.join()
    print("ended in order", flush=True)


if __name__ == "__main__":
    main()
