"""The launcher's side of the fork server: tasks that start in milliseconds, because torch is already loaded."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from stratagem.launch.fork_server import COMMAND_PREFIX
from stratagem.launch.plan import OF_ONE_TASK, Launch
from stratagem.launch.processes import Child, OwnChild, start_guarded

ANSWER_S = 30.0
"""Seconds in which a fork server that is ready must have forked; one that has not is ended, and whom it forked too."""


def start_server(environ: Mapping[str, str], link: socket.socket) -> subprocess.Popen[bytes]:
    """Starts a fork server that is told what to do through ``link``."""
    command = (sys.executable, "-P", "-m", "stratagem.launch.fork_server", str(link.fileno()))
    return start_guarded(command, environ, stdout=subprocess.DEVNULL, pass_fds=(link.fileno(),))


class ForkServer:
    """A fork server, and whom it has forked. When it is lost, its children are killed by the kernel. It is started with
    an ``environ``: Python, torch and the C library read some of it as they start."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = dict(environ)
        self._link, theirs = socket.socketpair()
        with theirs:
            self._process = start_server(self._environ, theirs)
        self._text = b""
        self._codes: dict[int, int] = {}
        self._forked: list[int] = []
        self.is_loading = True
        self.is_lost = False

    @property
    def fd(self) -> int:
        """Readable when :meth:`receive` has something to do."""
        return self._link.fileno()

    def receive(self, timeout_s: float | None = 0.0) -> None:
        """Takes in what the server has said; waits for it at most ``timeout_s`` (None: until it says something)."""
        self._link.settimeout(timeout_s)
        try:
            data = self._link.recv(1 << 16)
        except (BlockingIOError, TimeoutError):
            return
        except ConnectionError:
            data = b""
        if not data:
            self.is_lost, self.is_loading = True, False
        *whole, self._text = (self._text + data).split(b"\n")
        for message in map(json.loads, whole):
            self.is_loading = False
            if "forked" in message:
                self._forked.append(message["forked"])
            elif "ended" in message:
                self._codes[message["ended"]] = message["code"]

    def start(self, launch: Launch, stdout: int, stderr: int) -> Child:
        """Starts a task: forked where that is the same as a Python of its own, else so."""
        if self.is_lost or self.is_loading or not self._is_alike(launch):
            return OwnChild(launch, stdout, stderr)
        deadline = time.monotonic() + ANSWER_S
        with contextlib.suppress(OSError):
            self._send({"command": launch.command, "environ": launch.environ}, [stdout, stderr])
            while not self._forked and not self.is_lost and (left_s := deadline - time.monotonic()) > 0:
                self.receive(left_s)
        if self._forked:
            return _ForkedChild(self, self._forked.pop())
        self._process.kill()
        self.is_lost = True
        return OwnChild(launch, stdout, stderr)

    def code_of(self, pid: int) -> int | None:
        self.receive()
        return self._codes.get(pid, -signal.SIGKILL if self.is_lost else None)

    def reap(self, pid: int) -> None:
        """Lets go of a child that has ended; another one may get its id."""
        self._codes.pop(pid, None)
        with contextlib.suppress(OSError):
            self._send({"reap": pid})

    def close(self) -> None:
        """Ends the server; its children have ended before."""
        self._process.kill()  # first: at the link's end it would tidy up
        self._process.wait()
        self._link.close()

    def _send(self, message: Mapping[str, Any], descriptors: list[int] | None = None) -> None:
        self._link.settimeout(ANSWER_S)
        data = json.dumps(message).encode() + b"\n"
        sent = socket.send_fds(self._link, [data], descriptors or [])
        self._link.sendall(data[sent:])

    def _is_alike(self, launch: Launch) -> bool:
        """Whether the command is the program's own, and its environment the server's but for what a task reads."""
        differ = {name for name, _ in self._environ.items() ^ launch.environ.items()}
        is_ours = launch.command[: len(COMMAND_PREFIX)] == COMMAND_PREFIX
        return is_ours and all(name.startswith("STRATAGEM_") or name in OF_ONE_TASK for name in differ)


class _ForkedChild:
    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server

    def ended(self) -> int | None:
        return self._server.code_of(self.pid)

    def reap(self) -> None:
        self._server.reap(self.pid)

    def wait(self) -> None:
        while self._server.code_of(self.pid) is None:
            self._server.receive(None)
