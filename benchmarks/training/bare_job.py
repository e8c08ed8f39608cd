"""What parameter servers cost in Python with nothing but their arithmetic and their messages: the floor of our rows.

``python -m benchmarks.training.bare_job ps PORT NUM_PS NUM_WORKERS`` and ``… worker WORKLOAD WARMUP_STEPS TIMED_STEPS
RANK NUM_WORKERS PORT...``, a port for each ps. Plain sockets, one message to each ps and one back for the rows, and
again for the update; asynchronous SGD. No chief, no ledger, no retry, no leases, no checkpoint: whoever dies ends the
job. The arithmetic is ours: the same rows in the same order, the same model.
"""

from __future__ import annotations

import itertools
import socket
import struct
import sys
import threading
import time
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.job_files import root_pid
from benchmarks.training.result import write_result, write_steps
from benchmarks.training.torch_models import make_loader, make_model, make_step
from benchmarks.training.workloads import LEARNING_RATE, NUM_CLASSES, SEED, TABLE_ROWS, TABLE_WIDTH, WORKLOADS, Workload
from benchmarks.window import between, read_counters
from stratagem.nn.remote_rows import pooled
from stratagem.ps.rows import RowTable
from stratagem.worker.push.row_reads import found_in

ROWS, UPDATE, MEET = range(3)
START_S = 60.0
"""For a ps to listen."""
_HEADER = struct.Struct("<III")  # what, how many rows, how many elements of the dense parameters


class Server:
    """One ps: rows of the table, and the dense parameters where a worker sends their gradient."""

    def __init__(self, num_rows: int, num_workers: int) -> None:
        self._table = RowTable(torch.randn(num_rows, TABLE_WIDTH).view(-1), TABLE_WIDTH)
        self._dense = torch.empty(0)
        self._guard = threading.Lock()
        self._meeting = threading.Barrier(num_workers)

    def serve(self, sock: socket.socket) -> None:
        """One worker, until it closes; a thread each."""
        while True:
            header = _read(sock, bytearray(_HEADER.size))
            if header is None:
                return
            what, num_rows, num_dense = _HEADER.unpack(header)
            if what == MEET:  # the first to come says what the dense parameters are
                given = torch.empty(num_dense)
                _read(sock, given.numpy())
                with self._guard:
                    if len(self._dense) != num_dense:
                        self._dense = given
                self._meeting.wait()
                sock.sendall(b"\0")
                continue
            ids = torch.empty(num_rows, dtype=torch.int64)
            _read(sock, ids.numpy())
            if what == ROWS:
                _send(sock, self._table.take(ids).numpy())
                continue
            rows, dense = torch.empty(num_rows, TABLE_WIDTH), torch.empty(num_dense)
            _read(sock, rows.numpy())
            _read(sock, dense.numpy())
            with self._guard:
                if num_rows:
                    self._table.put(ids, self._table.take(ids).add_(rows, alpha=-LEARNING_RATE))
                self._dense.add_(dense, alpha=-LEARNING_RATE)
                _send(sock, self._dense.numpy() if num_dense else b"\0")


class RemoteTable(nn.Module):
    """The table's rows from the ps, pooled by bag; keeps their gradient for the update."""

    def __init__(self, servers: list[socket.socket]) -> None:
        super().__init__()
        self._servers = servers
        self.rows = torch.empty(0, TABLE_WIDTH)
        self.parts: list[tuple[int, int, Any]] = []
        """Of each ps: first and last row of :attr:`rows`, and their numbers there."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``(bags, width)`` from ids ``(bags, ids of each)``."""
        numbers, found = found_in(ids.reshape(-1).numpy(), TABLE_ROWS)
        share = TABLE_ROWS // len(self._servers)
        edges = [0, *np.searchsorted(numbers, [share * ps for ps in range(1, len(self._servers))]), len(numbers)]
        self.parts = [
            (int(begin), int(end), numbers[begin:end] - share * ps)
            for ps, (begin, end) in enumerate(itertools.pairwise(edges))
        ]
        for server, (begin, end, own) in zip(self._servers, self.parts, strict=True):
            _send(server, _HEADER.pack(ROWS, end - begin, 0), own)
        self.rows = torch.empty(len(numbers), TABLE_WIDTH)
        for server, (begin, end, _) in zip(self._servers, self.parts, strict=True):
            _read(server, self.rows[begin:end].numpy())
        self.rows.requires_grad_()
        return pooled(self.rows, torch.from_numpy(found.place).view(ids.shape), "sum", found)


class RemoteSgd(torch.optim.Optimizer):
    """Sends gradients, and takes the dense parameters from the first ps."""

    def __init__(self, dense: nn.Parameter, table: RemoteTable | None, servers: list[socket.socket]) -> None:
        super().__init__([dense], {})
        self._dense, self._table, self._servers = dense, table, servers

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update on every ps."""
        dense = self._dense.grad
        assert dense is not None
        gradient = self._table.rows.grad if self._table is not None else None
        parts = self._table.parts if self._table is not None else [(0, 0, np.empty(0, np.int64))]
        for ps, (server, (begin, end, own)) in enumerate(zip(self._servers, parts, strict=True)):
            own_dense = dense if ps == 0 else dense[:0]
            rows = gradient[begin:end].numpy() if gradient is not None else b""
            _send(server, _HEADER.pack(UPDATE, end - begin, len(own_dense)), own, rows, own_dense.numpy())
        _read(self._servers[0], self._dense.detach().numpy())
        for server in self._servers[1:]:
            _read(server, bytearray(1))


class Sparse(nn.Module):
    """The model of the workload "sparse" with one flat tensor of dense parameters."""

    def __init__(self, table: RemoteTable, dense: nn.Parameter) -> None:
        super().__init__()
        self.table, self.dense = table, dense

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``(batch, classes)``."""
        weight, bias = self.dense.split([NUM_CLASSES * TABLE_WIDTH, NUM_CLASSES])
        return nn.functional.linear(self.table(ids), weight.view(NUM_CLASSES, TABLE_WIDTH), bias)


def work(
    workload: Workload, warmup_steps: int, timed_steps: int, rank: int, num_workers: int, ports: list[int]
) -> None:
    """Warms up, times, reports; every worker runs this."""
    torch.manual_seed(SEED)
    servers = [_connect(port) for port in ports]
    if workload.name == "sparse":
        linear = nn.Linear(TABLE_WIDTH, NUM_CLASSES)
        dense = nn.Parameter(torch.cat([linear.weight.detach().view(-1), linear.bias.detach()]))
        table = RemoteTable(servers)
        model: nn.Module = Sparse(table, dense)
    else:
        model, table = make_model(workload), None
        (dense,) = model.parameters()
    train_step = make_step(model, RemoteSgd(dense, table, servers))
    _meet(servers, dense)
    losses = [train_step(batch) for batch in make_loader(workload, warmup_steps, rank, num_workers)]
    loader = make_loader(workload, timed_steps, rank, num_workers)
    _meet(servers, dense)
    begin = read_counters(root_pid())
    timed_losses = [train_step(batch) for batch in loader]
    write_steps(len(timed_losses))
    _meet(servers, dense)
    window = between(begin, read_counters(root_pid()))
    if rank == 0:
        finite = bool(torch.isfinite(dense).all())
        write_result(window, losses + timed_losses, finite, None, {"torch": torch.__version__})


def _meet(servers: list[socket.socket], dense: nn.Parameter) -> None:
    for server in servers:
        given = dense.detach() if server is servers[0] else torch.empty(0)
        _send(server, _HEADER.pack(MEET, 0, len(given)), given.numpy())
        _read(server, bytearray(1))


def _send(sock: socket.socket, *parts: Any) -> None:
    """In one write: a socket that waits takes all of it."""
    sock.sendmsg([memoryview(part).cast("B") for part in parts if len(part)])


def _read(sock: socket.socket, memory: Any) -> Any:
    """Fills ``memory``, and gives it; None: the other side has closed."""
    view = memoryview(memory).cast("B") if len(memory) else memoryview(b"")
    while view:
        if not (count := sock.recv_into(view, 0, socket.MSG_WAITALL)):
            return None
        view = view[count:]
    return memory


def _connect(port: int) -> socket.socket:
    deadline = time.monotonic() + START_S
    while True:
        try:
            sock = socket.create_connection(("127.0.0.1", port), START_S)
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _serve(port: int, num_servers: int, num_workers: int) -> None:
    torch.manual_seed(SEED)
    server = Server(TABLE_ROWS // num_servers, num_workers)
    with socket.create_server(("127.0.0.1", port)) as listener:
        while True:
            sock, _ = listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=server.serve, args=(sock,), daemon=True).start()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "ps":
        _serve(*map(int, sys.argv[2:]))
    else:
        name, *numbers = sys.argv[2:]
        warmup_steps, timed_steps, rank, num_workers, *ports = map(int, numbers)
        work(WORKLOADS[name], warmup_steps, timed_steps, rank, num_workers, ports)
