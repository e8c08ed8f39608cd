"""Our tcp lane under TLS: ``python -m benchmarks.collectives.tls_job ADDRESSES CERTIFICATE KEY SIZES`` with RANK set.

No role can be given certificates yet, so the ring is built here, from the same lanes, sockets of TLS 1.3 between them.
"""

from __future__ import annotations

import os
import socket
import ssl
import sys
import time

from benchmarks import machine
from benchmarks.collectives.loop import measure_and_write
from benchmarks.collectives.sizes import parse_sizes
from benchmarks.collectives.stratagem_job import Stratagem
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.tcp_lane import TcpReceiver, TcpSender, tune
from stratagem.worker.ring.chunk_tuning import DEFAULT_BYTES, choose_chunk_bytes
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.ring_group import RingGroup

TIMEOUT_S = 60.0


def main() -> None:
    """Opens the ring, measures, closes it."""
    addresses, certificate, key, sizes = sys.argv[1].split(","), sys.argv[2], sys.argv[3], parse_sizes(sys.argv[4])
    communicator = open_ring(int(os.environ["RANK"]), addresses, certificate, key)
    try:
        measure_and_write(Stratagem(communicator, "float32", max(sizes)), sizes, machine.library_versions())
        communicator.barrier()
    finally:
        communicator.close()


def open_ring(rank: int, addresses: list[str], certificate: str, key: str) -> Communicator:
    """A ring over TLS: listens at its own address, connects to the next one's."""
    size = len(addresses)
    with socket.create_server(_split(addresses[rank])) as listener:
        listener.settimeout(TIMEOUT_S)
        right, left = (rank + 1) % size, (rank - 1) % size
        # Both sides of a handshake have to be at it, and each rank is in two: the even ranks begin to the right.
        if rank % 2 == 0:
            outward = _connect(_split(addresses[right]), certificate)
            inward = _accept(listener, certificate, key)
        else:
            inward = _accept(listener, certificate, key)
            outward = _connect(_split(addresses[right]), certificate)
    meter = BytesMeter()
    group = RingGroup(
        rank,
        size,
        TcpSender(outward, f"rank {right}", meter),
        TcpReceiver(inward, f"rank {left}", meter),
        chunk_bytes=DEFAULT_BYTES,
        wire_dtype=None,
        timeout_s=TIMEOUT_S,
    )
    communicator = Communicator(group, lambda error, position: error)
    choose_chunk_bytes(communicator)
    return communicator


def _connect(address: tuple[str, int], certificate: str) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=certificate)
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            plain = socket.create_connection(address, TIMEOUT_S)
        except ConnectionRefusedError:  # the other rank does not listen yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            tune(plain)
            return context.wrap_socket(plain, server_hostname=address[0])


def _accept(listener: socket.socket, certificate: str, key: str) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    plain, _ = listener.accept()
    tune(plain)
    return context.wrap_socket(plain, server_side=True)


def _split(address: str) -> tuple[str, int]:
    host, port = address.split(":")
    return host, int(port)


if __name__ == "__main__":
    main()
