"""``python -m stratagem.launch.fork_server FD``: a process that has loaded torch, and forks into tasks.

A Python that loads torch and its compiler works for three seconds or more; a fork of one that has is ready after
milliseconds. The fork server loads neither grpc nor any user module and starts no thread, so a child is like a fresh
process after the same imports. :mod:`stratagem.launch.preloaded` is the launcher's side of the socket FD.

Messages are JSON, one a line. To here: ``{"command": […], "environ": {…}}`` with two descriptors, stdout and stderr,
and ``{"reap": pid}``. From here: ``{"ready": 1}``, ``{"forked": pid}``, ``{"ended": pid, "code": code}``; a child that
has ended stays a zombie until it is reaped, which keeps its process group's id from being reused.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import weakref
from collections.abc import Sequence
from types import ModuleType

from setproctitle import setproctitle

# torch.optim loads the compiler as soon as an optimizer is made; of ours, what most tasks need and does not load grpc.
PRELOADED = (
    *("torch", "torch._dynamo", "numpy", "click", "pydantic", "asyncio", "stratagem.cluster.config"),
    *("stratagem.cli.options", "stratagem.data.distribute", "stratagem.checkpoint.reading", "stratagem.rpc.shm_lane"),
)
COMMAND_PREFIX = (sys.executable, "-P", "-m", "stratagem.cli")
"""What a command must begin with to be run in a fork; -P: modules of the current folder are none of the script's."""
_PR_SET_PDEATHSIG = 1
_of_libraries: dict[str, ModuleType] = {}
"""What has been loaded for all forks, but Python's own."""


class _ForkServer:
    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._selector = selectors.DefaultSelector()
        self._selector.register(link, selectors.EVENT_READ)
        self._text = b""
        self._descriptors: list[int] = []

    def serve(self) -> tuple[str, ...] | None:
        """Serves until the launcher goes: None. In a child it returns at once: the child's command."""
        self._say(ready=1)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._link:
                    self._child_ended(key.fd, key.data)
                    continue
                data, descriptors, _, _ = socket.recv_fds(self._link, 1 << 16, 8)
                if not data:
                    return None
                self._descriptors += descriptors
                *whole, self._text = (self._text + data).split(b"\n")
                for order in map(json.loads, whole):
                    if "reap" in order:
                        os.waitpid(order["reap"], 0)
                    elif command := self._fork(order["command"], order["environ"]):
                        return command

    def _say(self, **message: int) -> None:
        self._link.sendall(json.dumps(message).encode() + b"\n")

    def _child_ended(self, fd: int, pid: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        self._say(ended=pid, code=found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)

    def _fork(self, command: list[str], environ: dict[str, str]) -> tuple[str, ...] | None:
        stdout, stderr = self._descriptors[:2]
        del self._descriptors[:2]
        server = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # what a fork runs first would lose it
        if pid := os.fork():
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(stdout)
            os.close(stderr)
            self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
            self._say(forked=pid)
            return None
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != server:  # it died before the signal was armed
            os.kill(os.getpid(), signal.SIGKILL)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        others = [key.fd for key in self._selector.get_map().values() if key.fileobj is not self._link]
        for fd in (stdout, stderr, *others):
            os.close(fd)
        self._selector.close()
        self._link.close()
        title = " ".join(command).encode(errors="replace").decode()
        setproctitle(title)  # which looks for its place beside the first environment
        os.environ.clear()
        os.environ.update(environ)
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except KeyboardInterrupt:  # the job was told to end meanwhile
            os._exit(130)
        return tuple(command)


def serve(link: socket.socket) -> None:
    """The server's life; in its children the task's."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        if command := _ForkServer(link).serve():
            forget()
            sys.argv = ["", *command[len(COMMAND_PREFIX) :]]
            runpy.run_module(COMMAND_PREFIX[-1], run_name="__main__", alter_sys=True)


def forget() -> None:
    """In a fork: what a Python of its own would not have."""
    import numpy as np
    import torch

    if "triton" in sys.modules:  # prints pages about what it still finds alive at the very end
        atexit.register(gc.unfreeze)  # a second of the CPU: the collector looks at all of torch once more
    libc = ctypes.CDLL(None)  # at the very end its functions are called in the reverse order
    libc.on_exit(libc._exit, None)  # what torch's libraries would tidy up costs as much as a start: the kernel does it
    libc.__cxa_atexit(libc.fflush, None, None)
    np.random.seed()  # seeded from the system's entropy once, for all forks; so may torch be
    torch.default_generator.seed()


def preload(names: Sequence[str] = PRELOADED) -> None:
    """Loads modules, and what they load; whoever has forked takes none of them apart as it ends."""
    atexit.register(_leave_libraries)  # before they are loaded: it comes after what they do at the end
    for name in names:
        importlib.import_module(name)
    for each in weakref.finalize._registry:  # type: ignore[attr-defined]
        if each.peek()[1].__module__ == "torch.library":
            each.atexit = False  # it takes operators out of tables
    own = {*sys.stdlib_module_names, "__main__"}
    _of_libraries.update({name: each for name, each in sys.modules.items() if name.partition(".")[0] not in own})
    gc.collect()
    gc.freeze()  # what is here already is never garbage: a collection in a child would only copy its pages


def _leave_libraries() -> None:
    """Where Python would take torch apart at the end, the kernel copied all its pages first: most of what a short task
    cost. What the task itself has loaded ends as ever."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_of_libraries))
    for name, module in _of_libraries.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]


if __name__ == "__main__":
    preload()
    serve(socket.socket(fileno=int(sys.argv[1])))
