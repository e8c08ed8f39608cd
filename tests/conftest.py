"""A test that leaks fails: threads, child processes, file descriptors, shared memory, environment variables."""

from __future__ import annotations

import gc
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads: the processes of one test share two cores
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # as stratagem does, before any test loads grpc

import hypothesis
import psutil
import pytest

# Machines are shared: no test asserts how long an example takes.
hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")

_DEADLINE_S = 5.0
_POLL_S = 0.02
# pytest says which test runs; the others are set once for the process, by libraries as they load or with our log.
_ENVIRONMENT_OF_OTHERS = {
    "PYTEST_CURRENT_TEST",
    "KMP_INIT_AT_FORK",
    "KMP_DUPLICATE_LIB_OK",
    "TORCHINDUCTOR_CACHE_DIR",
    "GRPC_VERBOSITY",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", metavar="K/N", help="only this share of the tests, the same ones each time: 0/6 to 5/6")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of the share; all shares together are all tests."""
    if share := config.getoption("--share"):
        number, count = map(int, share.split("/"))
        chosen = [zlib.crc32(item.nodeid.encode()) % count == number % count for item in items]
        others = [item for item, is_ours in zip(items, chosen, strict=True) if not is_ours]
        items[:] = [item for item, is_ours in zip(items, chosen, strict=True) if is_ours]
        config.hook.pytest_deselected(items=others)


def _threads() -> dict[int, str]:
    return {thread.ident: thread.name for thread in threading.enumerate() if thread.ident is not None}


def _children() -> dict[int, str]:
    found = {}
    for child in psutil.Process().children(recursive=True):
        try:
            found[child.pid] = f"pid {child.pid}: {' '.join(child.cmdline())[:120]}"
        except psutil.NoSuchProcess:
            continue
    return found


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


def _shared_memory() -> dict[str, str]:
    return {path.name: str(path) for path in Path("/dev/shm").glob("*")} if os.path.isdir("/dev/shm") else {}


_RESOURCES: dict[str, Callable[[], Mapping[int, str] | Mapping[str, str]]] = {
    "threads": _threads,
    "child processes": _children,
    "file descriptors": _descriptors,
    "shared memory": _shared_memory,
}


def _snapshot() -> dict[str, set[tuple[int | str, str]]]:
    return {kind: set(look().items()) for kind, look in _RESOURCES.items()}


def _leaked(before: dict[str, set[tuple[int | str, str]]]) -> dict[str, list[str]]:
    now = _snapshot()
    return {kind: sorted(text for _, text in now[kind] - before[kind]) for kind in now if now[kind] - before[kind]}


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fails a test after which something is left that was not there before; waits for what is just ending."""
    before = _snapshot()
    environment = dict(os.environ)
    yield
    deadline = time.monotonic() + _DEADLINE_S
    while (leaks := _leaked(before)) and time.monotonic() < deadline:
        gc.collect()  # what an exception's traceback holds goes with the cycle it is in
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
