"""A store behind a real gRPC server and its lanes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from stratagem.cluster.config import ServerConfig
from stratagem.errors import JobStoppedError
from stratagem.ps.servicer import SERVICE, ParameterServerServicer
from stratagem.ps.socket_lanes import SocketLanes
from stratagem.ps.store import Store
from stratagem.rpc.server import RunningServer, add_servicer, serve


@contextlib.contextmanager
def serving(store: Store, max_message_bytes: int = 8 << 20, host: str = "127.0.0.1") -> Iterator[RunningServer]:
    """Serves it on a port of the host."""
    lanes = SocketLanes(store, host.strip("[]"))
    servicer = ParameterServerServicer(store, lanes, max_message_bytes)
    running = serve(
        ServerConfig(task="ps:0", bind=f"{host}:0", max_message_bytes=max_message_bytes),
        lambda server: add_servicer(SERVICE, servicer, server),
        services=[SERVICE.full_name],
    )
    try:
        yield running
    finally:
        store.state.close_lanes(JobStoppedError("the test is over", 0))
        lanes.close()
        running.stop(0.2)
