"""What a plain socket gets through a link: ``python -m benchmarks.links.goodput_job send|receive ADDRESS PORT``.

One connection, one direction, after a warm-up in which the congestion window grows and the link's burst is used up. The
median of a few windows counts: after a pause of the receiver one window sees too little and the next too much.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time

from benchmarks.job_files import result_path

WARMUP_S = 0.3
WINDOW_S = 0.4
NUM_WINDOWS = 5
CONNECT_TIMEOUT_S = 20.0
BLOCK_BYTES = 1 << 18


def main() -> None:
    """Plays one side; the receiver leaves bytes per second as the result."""
    address = (sys.argv[2], int(sys.argv[3]))
    if sys.argv[1] == "send":
        _send(address)
    else:
        result_path().write_text(json.dumps(_receive(address)))


def _receive(address: tuple[str, int]) -> float:
    """Bytes per second of the median window."""
    memory = bytearray(BLOCK_BYTES)
    with socket.create_server(address) as server:
        server.settimeout(CONNECT_TIMEOUT_S)
        with server.accept()[0] as peer:
            _receive_for(peer, memory, WARMUP_S)
            windows = [_receive_for(peer, memory, WINDOW_S) for _ in range(NUM_WINDOWS)]
    return statistics.median(num_bytes / elapsed_s for num_bytes, elapsed_s in windows)


def _receive_for(peer: socket.socket, memory: bytearray, duration_s: float) -> tuple[int, float]:
    """Bytes that came, and the seconds it took, a little more than ``duration_s``."""
    start, num_bytes, elapsed_s = time.perf_counter(), 0, 0.0
    while elapsed_s < duration_s:
        if not (got := peer.recv_into(memory)):
            raise ConnectionError("the sender ended before the receiver had measured")
        num_bytes, elapsed_s = num_bytes + got, time.perf_counter() - start
    return num_bytes, elapsed_s


def _send(address: tuple[str, int]) -> None:
    """Sends until the receiver has enough."""
    memory = bytes(BLOCK_BYTES)
    with _connect(address) as peer:
        try:
            while True:
                peer.sendall(memory)
        except (BrokenPipeError, ConnectionResetError):
            return


def _connect(address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            return socket.create_connection(address, CONNECT_TIMEOUT_S)
        except ConnectionRefusedError:  # the receiver is not there yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


if __name__ == "__main__":
    main()
