"""A test that leaks fails: threads, child processes, file descriptors, shared memory, environment variables."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import multiprocessing
import os
import re
import signal
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from multiprocessing import forkserver
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads: the processes of one test share two cores
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # as stratagem does, before any test loads grpc
os.environ.setdefault("GRPC_DNS_RESOLVER", "native")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what runs in the background so
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import psutil
import pytest

# Machines are shared: no test asserts how long an example takes.
hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")

_DEADLINE_S = 30.0
_POLL_S = 0.02
_COLLECTION_S = 0.02
_ASYNC_S = 100.0
# pytest says which test runs; the others are set once for the process, by libraries as they load or with our log.
_ENVIRONMENT_OF_OTHERS = {
    "PYTEST_CURRENT_TEST",
    "KMP_INIT_AT_FORK",
    "KMP_DUPLICATE_LIB_OK",
    "TORCHINDUCTOR_CACHE_DIR",
    "GRPC_VERBOSITY",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", metavar="K/N", help="of the tests marked thorough only this share: 0/6 to 5/6")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of the share, the same ones each time; all shares together have all tests."""
    if share := config.getoption("--share"):
        number, count = map(int, share.split("/"))
        others = [
            item
            for item in items
            if item.get_closest_marker("thorough") and zlib.crc32(item.nodeid.encode()) % count != number % count
        ]
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=others)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Without the garbage collector: what is loaded stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), _ASYNC_S))
    return True


def pytest_sessionstart() -> None:
    """From Python 3.14 on processes start from one of multiprocessing's own, which lasts as long as this one."""
    if multiprocessing.get_all_start_methods()[0] == "forkserver":
        forkserver.ensure_running()


def _threads() -> dict[int, str]:
    return {thread.ident: thread.name for thread in threading.enumerate() if thread.ident is not None}


def _children() -> dict[int, str]:
    """Read from the kernel's own lists: psutil looks at every process of the machine, twice a test."""
    found: dict[int, str] = {}
    parents = [os.getpid()]
    while parents:
        with contextlib.suppress(OSError):  # it has ended
            for task in os.listdir(folder := f"/proc/{parents.pop()}/task"):
                pids = [int(pid) for pid in Path(folder, task, "children").read_text().split()]
                parents += pids
                found.update((pid, f"pid {pid}: {_command(pid)}") for pid in pids)
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
    return ""


def _descriptors() -> dict[int, str]:
    """Sockets, pipes and files; gRPC keeps some anonymous inodes (epoll, eventfd) for the life of the process."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if not target.startswith(("anon_inode:", "/dev/null", "/dev/urandom", "/proc/")):
            found[int(entry)] = target
    return found


def shared_memory() -> dict[str, str]:
    return {path.name: str(path) for path in Path("/dev/shm").glob("*")}


def is_of_others(name: str) -> bool:
    """Whether it has the id of a process that runs and is not ours, as torch and our tests name files; a simulation
    beside us may have been killed."""
    pids = [int(part) for part in re.split("[-_]", name) if part.isdigit()]
    return name.startswith("simulation-") or any(
        psutil.pid_exists(pid) and pid not in {os.getpid(), *_children()} for pid in pids
    )


_RESOURCES: dict[str, Callable[[], Mapping[int, str] | Mapping[str, str]]] = {
    "threads": _threads,
    "child processes": _children,
    "file descriptors": _descriptors,
    "shared memory": shared_memory,
}


def _snapshot() -> dict[str, set[tuple[int | str, str]]]:
    return {kind: set(look().items()) for kind, look in _RESOURCES.items()}


def _leaked(before: dict[str, set[tuple[int | str, str]]]) -> dict[str, list[str]]:
    now = _snapshot()
    # Asked of what is new alone: a file whose process, not ours, has ended meanwhile was there before.
    new = now["shared memory"] - before["shared memory"]
    now["shared memory"] = {(name, text) for name, text in new if not is_of_others(str(name))}
    return {kind: sorted(text for _, text in now[kind] - before[kind]) for kind in now if now[kind] - before[kind]}


@pytest.fixture(scope="session")
def preloaded() -> Iterator[None]:
    """The processes that :mod:`tests.forks` starts are forks."""
    from tests import forks  # here, because test_leaks.py takes this file elsewhere

    with forks.preloaded():
        yield


class _Garbage:
    """Collects it. With torch's modules that takes 0.2 s, so those that a test finds loaded are left out."""

    is_slow = True

    def before_test(self) -> None:
        if self.is_slow:
            gc.collect()
            gc.freeze()
            self.is_slow = False

    def collect(self) -> None:
        begun = time.process_time()
        gc.collect()
        self.is_slow = self.is_slow or time.process_time() - begun > _COLLECTION_S


_garbage = _Garbage()


@functools.cache
def _wake_gpus() -> None:
    """What CUDA, autograd (a thread that Python then knows) and NCCL keep for the life of a process is there before the
    first test."""
    if not Path("/dev/nvidiactl").exists():
        return
    import torch  # here, because not every run of tests needs it

    def meet(_: torch.Tensor) -> None:
        threading.current_thread()

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            tensor = torch.ones(1, device=f"cuda:{index}", requires_grad=True)
            tensor.register_hook(meet)
            (2 * tensor).sum().backward()
        if torch.distributed.is_nccl_available():
            each = [torch.ones(1, device=f"cuda:{index}") for index in range(torch.cuda.device_count())]
            torch.cuda.nccl.all_reduce(each, each)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fails a test after which something is left that was not there before; waits for what is just ending."""
    _wake_gpus()
    _garbage.before_test()
    before = _snapshot()
    environment = dict(os.environ)
    yield
    deadline = time.monotonic() + _DEADLINE_S
    while (leaks := _leaked(before)) and time.monotonic() < deadline:
        _garbage.collect()  # what an exception's traceback holds goes with the cycle it is in
        time.sleep(_POLL_S)
    changed = {
        name
        for name in environment.keys() | os.environ.keys()
        if environment.get(name) != os.environ.get(name) and name not in _ENVIRONMENT_OF_OTHERS
    }
    if changed:
        os.environ.clear()
        os.environ.update(environment)
        leaks["environment"] = sorted(changed)
    if leaks:
        pytest.fail("the test leaks " + "; ".join(f"{kind}: {', '.join(what)}" for kind, what in leaks.items()))
