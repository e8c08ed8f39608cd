"""Puts the simulated ``threading``, ``time``, ``queue``, gRPC and disk in the place of the real ones, and back."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import importlib
import os
import queue
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from stratagem.chief.journal.lock import CheckpointsLock, JournalLock
from stratagem.measuring.process_use import ProcessUse, ThreadWaits
from stratagem.ps import optimizers, snapshot
from stratagem.ps.peer_client import PeerStore
from stratagem.rpc import channels, handshake, host_id
from stratagem.strategy import roles
from stratagem.worker.interrupts import END_S
from stratagem.worker.reduction import backward
from stratagem.worker.ring import ring_member
from tests.simulation import copies, invariants, rings, schedule
from tests.simulation.disk import Os
from tests.simulation.threads import Future, Futures, Queue, Threading, ThreadPoolExecutor, Time, here
from tests.simulation.world import Process

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

_MODULES = (
    "stratagem.chief.__main__",
    "stratagem.ps.__main__",
    "stratagem.strategy.multi_worker_mirrored",
    "stratagem.strategy.parameter_server",
    "stratagem.worker.runtime",
)
_STAND_INS: dict[Any, Any] = {
    threading: Threading,
    time: Time,
    queue: Queue,
    concurrent: types.SimpleNamespace(futures=Futures),
    concurrent.futures.Future: Future,
    concurrent.futures.ThreadPoolExecutor: ThreadPoolExecutor,
}
_ON_DISK = (
    *("stratagem.chief.journal.journal", "stratagem.chief.journal.lock"),
    *("stratagem.checkpoint.durable", "stratagem.checkpoint.draft"),
)
_NOT = ("stratagem.rpc.logs", "stratagem.rpc.tls_files", "stratagem.cli", "stratagem.launch")


def _functions() -> Iterator[Any]:
    """All functions and methods of the product."""
    for name, module in list(sys.modules.items()):
        if name.startswith("stratagem."):
            for value in list(vars(module).values()):
                members = vars(value).values() if isinstance(value, type) else (value,)
                yield from (each for each in members if isinstance(each, types.FunctionType))


def _slow(read: Callable[..., bool]) -> Callable[..., bool]:
    """Reading a checkpoint takes as long as writing one."""

    def check(*arguments: Any) -> bool:
        world = here()
        if _cluster().disk.slow:
            world.block(_cluster().disk.slow * 4 * world.random.random())
        return read(*arguments)

    return check


def _taken_from_the_dead(kind: type[JournalLock]) -> Callable[..., JournalLock]:
    """As the system does it."""

    def make(*arguments: str) -> JournalLock:
        lock = kind(*arguments)
        here().process.on_death.append(lock.release)  # type: ignore[union-attr]
        return lock

    return make


class _Gc:
    """In the place of the module ``gc``: what one process makes permanent would stay for all schedules."""

    @staticmethod
    def freeze() -> None:
        """A process of its own keeps what it has when it is complete."""


def _process() -> Process:
    thread = here().thread
    assert thread is not None, "nothing of the product runs outside of threads here"
    return thread.process


class _Preemption:
    """In the place of the worker's: no signal is sent."""

    is_leaving = False

    @staticmethod
    def request() -> None:
        """The worker sees by its session that the job is over."""

    @staticmethod
    def end_soon(reason: str) -> None:
        process = _process()
        process.world.after(END_S, process, process.end, 1)


class _Ids:
    """In the place of the module ``os``, of which only the id of the process is asked."""

    @staticmethod
    def getpid() -> int:
        return _process().pid


def _cluster() -> Cluster:
    found: Cluster = here().cluster  # type: ignore[attr-defined]
    return found


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Inside, every module of the product has the simulated ones: nothing of it may run outside of a world."""
    for name in _MODULES:
        importlib.import_module(name)
    undo: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    connect_aio, explain, host = channels.connect_aio, handshake.explain_refusal, host_id.own_host_id
    stand_ins = {id(real): stand_in for real, stand_in in _STAND_INS.items()}
    for name, module in list(sys.modules.items()):
        if name.startswith("stratagem.") and not name.startswith(_NOT):
            for attribute, value in list(vars(module).items()):
                if id(value) in stand_ins:
                    put(module, attribute, stand_ins[id(value)])
                elif getattr(value, "__module__", "") == "time":  # one of its functions, under a name of the module
                    put(module, attribute, getattr(Time, value.__name__))
                elif value is connect_aio:
                    put(module, attribute, lambda *a, **k: _cluster().connect_aio(*a, **k))
                elif value is explain:
                    put(module, attribute, lambda *_, **__: "")
                elif value is host:
                    put(module, attribute, lambda: "one host")
                elif value is os and name in _ON_DISK:
                    put(module, attribute, Os)
    for function in _functions():
        if time.monotonic in (function.__defaults__ or ()):
            given = tuple(Time.monotonic if value is time.monotonic else value for value in function.__defaults__)
            put(function, "__defaults__", given)
    put(channels, "connect", lambda *a, **k: _cluster().connect(*a, **k))
    for name in ("join_as", "join_or_alone"):
        put(roles, name, lambda resolver: _cluster().join_as(resolver))
    put(ring_member, "free_store_address", lambda host: "")  # of NCCL
    put(backward, "_queue_callback", rings.at_end_of_backward)
    put(torch.autograd, "backward", rings.backward)
    for name in ("stratagem.ps.__main__", "stratagem.worker.runtime"):
        put(sys.modules[name], "serve", lambda *a, **k: _cluster().serve(*a, **k))
    put(sys.modules["stratagem.chief.__main__"], "serve_aio", lambda *a, **k: _cluster().serve_aio(*a, **k))
    for lock in (JournalLock, CheckpointsLock):
        put(sys.modules["stratagem.chief.__main__"], lock.__name__, _taken_from_the_dead(lock))
    put(sys.modules["stratagem.chief.journal.lock"], "JournalLock", _taken_from_the_dead(JournalLock))  # of who is next
    put(sys.modules["stratagem.worker.runtime"], "preemption", _Preemption)
    put(sys.modules["stratagem.rpc.session"], "os", _Ids)
    put(PeerStore.__init__, "__defaults__", ("grpc",))
    put(optimizers, "warm_up", lambda: None)
    put(roles, "say_goodbye_at_exit", lambda runtime: None)
    put(sys.modules["stratagem.ps.__main__"], "keep_freed_memory", lambda: None)
    put(sys.modules["stratagem.ps.store"], "give_back_freed_memory", lambda: None)
    for name in ("stratagem.chief.__main__", "stratagem.ps.__main__"):
        put(sys.modules[name], "gc", _Gc)  # else what a schedule leaves is never looked at again
    put(snapshot, "check", _slow(snapshot.check))
    put(ProcessUse, "values", lambda self: {})  # of the real process, and it looks for long
    put(ThreadWaits, "start", lambda self: None)  # of a real thread
    for owner, name, wrap in (*invariants.hooks(), *copies.hooks(), *rings.hooks(), *schedule.hooks()):
        put(owner, name, wrap(getattr(owner, name)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    optimizers_warm()
    gc.freeze()  # torch's objects stay: looking through them after each schedule would take most of the time
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
        torch.set_num_threads(threads)
        for owner, name, value in reversed(undo):
            setattr(owner, name, value)


def optimizers_warm() -> None:
    """Torch loads its compiler with the first step."""
    parameter = torch.zeros(1)
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], fused=True).step()
