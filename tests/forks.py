"""Python processes that tests start: forks of one that has loaded torch, in milliseconds instead of seconds.

:class:`Popen` and :func:`run` take what those of `subprocess` take. ``python script.py …``, ``python -m module …``,
``python -c code`` and ``stratagem …``, also after ``ip netns exec NAME``, become forks of a process of the test session
(:func:`preloaded`), which has loaded what the fork servers of `stratagem run` load. Other commands, those whose
environment Python or torch would read as they start, and all outside of :func:`preloaded` are executed.

A fork is a child of the test's process, as `subprocess` wants it: it is forked twice, and goes as an orphan to the next
process above that takes orphans. Where it is `stratagem run`, the fork server of that is a fork too, of the same age.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from setproctitle import setproctitle

from stratagem.launch import fork_server
from stratagem.rpc import heap

ROOT = Path(__file__).parents[1]
READ_AT_START = ("PYTHON", "LD_", "OMP_", "KMP_", "OPENBLAS_", "MALLOC_", "TORCH", "PYTORCH")
"""Beginnings of the names of what Python, torch and C libraries read as they start."""
_OF_NO_WEIGHT = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "TORCHINDUCTOR_CACHE_DIR"}
"""Of those: a fork looks at the first itself; what it says is never buffered; torch sets the last where it compiles."""
_IN_NAMESPACE = ["ip", "netns", "exec"]
ALSO_PRELOADED = ("torchmetrics", "sklearn.datasets", "google.protobuf", "safetensors", "yaml")
"""What scripts of tests load, beside :data:`stratagem.launch.fork_server.PRELOADED`; nothing of the product."""
_STRATAGEM = Path(sys.executable).with_name("stratagem")
_MAX_BYTES = 1 << 20
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_MS_BIND, _MS_REC, _MS_SLAVE = 0x1000, 0x4000, 0x80000


class _Server:
    def __init__(self) -> None:
        self._environ = dict(os.environ)
        self._lock = threading.Lock()
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forks", str(theirs.fileno())],
                env={**heap.ENVIRONMENT, **self._environ, "PYTHONUNBUFFERED": "1"},  # as a launcher's fork server
                cwd=ROOT,
                pass_fds=(theirs.fileno(),),
            )
        self._link.recv(1)

    def takes(self, command: Sequence[str], environ: Mapping[str, str]) -> bool:
        names = {name for name in {*environ, *self._environ} if name.startswith(READ_AT_START)} - _OF_NO_WEIGHT
        ours = {**heap.ENVIRONMENT, **self._environ} if heap.ENVIRONMENT.items() <= environ.items() else self._environ
        return _is_python(command) and all(environ.get(name) == ours.get(name) for name in names)

    def fork(self, descriptors: Sequence[int], **order: Any) -> int:
        """The process id of a new child of ours."""
        with self._lock:
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._link, [json.dumps({**order, "parent": os.getpid()}).encode()], descriptors)
                return int(self._link.recv(64))
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0)

    def close(self) -> None:
        self._link.close()
        self._process.wait()


def _split(command: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The network namespace, or nothing, and what is to run there."""
    return (command[3], command[4:]) if list(command[:3]) == _IN_NAMESPACE else ("", command)


def _is_python(command: Sequence[str]) -> bool:
    _, (program, *arguments) = _split(command)
    is_plain = bool(arguments) and (arguments[0] in ("-m", "-c") or arguments[0].endswith(".py"))
    return program in ("stratagem", str(_STRATAGEM)) or (program == sys.executable and is_plain)


_server: _Server | None = None


@contextlib.contextmanager
def preloaded() -> Iterator[None]:
    """While it lasts, :class:`Popen` forks."""
    global _server
    _server = _Server()
    yield
    _server.close()
    _server = None


class Popen(subprocess.Popen[str]):
    """As in `subprocess`; text."""

    def __init__(self, args: Sequence[object], **options: Any) -> None:
        super().__init__([str(arg) for arg in args], **options, text=True)

    # What makes the process: private, but of this form since Python 3.11.
    def _execute_child(self, *given: Any) -> None:
        args, pass_fds, cwd, environ, *pipes, new_session = (given[at] for at in (0, 4, 5, 6, *range(10, 16), 21))
        environ = dict(os.environ if environ is None else environ)
        if _server is None or pass_fds or not _server.takes(args, environ):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        theirs = [pipe if pipe != -1 else own for own, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]
        cwd = str(cwd or Path.cwd())
        self.pid = _server.fork(theirs, command=args, environ=environ, cwd=cwd, new_session=new_session)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run(
    args: Sequence[object], *, timeout: float, check: bool = False, input: str = "", **options: Any
) -> subprocess.CompletedProcess[str]:
    """As in `subprocess`; text, and both outputs captured."""
    pipe = subprocess.PIPE
    with Popen(args, stdin=pipe, stdout=pipe, stderr=pipe, **options) as process:
        try:
            stdout, stderr = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    assert not check or process.returncode == 0, stderr
    return subprocess.CompletedProcess([str(arg) for arg in args], process.returncode, stdout, stderr)


def _prctl(option: int, value: int) -> None:
    assert ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0


class _Spare:
    """A fork of this process that becomes the fork server of a launcher, or ends with it."""

    def __init__(self) -> None:
        launcher = os.getpid()
        self._link, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid:
            theirs.close()
            return
        self._link.close()
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == launcher:
            data, descriptors, _, _ = socket.recv_fds(theirs, _MAX_BYTES, 1)
            theirs.close()
            if data:
                self._serve(json.loads(data), descriptors[0])
        sys.exit()

    def _serve(self, environ: Mapping[str, str], link: int) -> None:
        with open(os.devnull, "r+b") as null:
            os.dup2(null.fileno(), 0)
            os.dup2(null.fileno(), 1)
        os.environ.clear()
        os.environ.update(environ)
        setproctitle(f"{sys.executable} -m stratagem.launch.fork_server {link}")
        fork_server.serve(socket.socket(fileno=link))

    def start(self, environ: Mapping[str, str], link: socket.socket) -> _Spare:
        """As :func:`stratagem.launch.preloaded.start_server`."""
        with self._link:
            socket.send_fds(self._link, [json.dumps(dict(environ)).encode()], [link.fileno()])
        return self

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> None:
        os.waitpid(self._pid, 0)


def _serve(link: socket.socket) -> dict[str, Any]:
    """Forks until the test session ends; returns in the forks, with their orders."""
    link.send(b"!")
    while True:
        data, descriptors, _, _ = socket.recv_fds(link, _MAX_BYTES, 3)
        if not data:
            sys.exit()
        order: dict[str, Any] = json.loads(data)
        reading, writing = os.pipe()
        if not (between := os.fork()):
            if pid := os.fork():
                os.write(writing, str(pid).encode())
                os._exit(0)
            link.close()
            for target, descriptor in enumerate(descriptors):
                os.dup2(descriptor, target)
        else:
            os.waitpid(between, 0)
            link.send(os.read(reading, 64))
        for descriptor in (*descriptors, reading, writing):
            os.close(descriptor)
        if not between:
            while os.getppid() != order["parent"]:
                time.sleep(0.0005)
            return order


def _enter(namespace: str) -> None:
    """As ``ip netns exec``: its network, and its files of /etc/netns over those of /etc."""
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(source: str, target: str, kind: str, flags: int) -> None:
        assert libc.mount(source.encode(), target.encode(), kind.encode(), flags, None) == 0, target

    with open(f"/run/netns/{namespace}") as network:
        assert libc.setns(network.fileno(), _CLONE_NEWNET) == 0
    assert libc.unshare(_CLONE_NEWNS) == 0
    mount("", "/", "none", _MS_SLAVE | _MS_REC)
    for path in Path("/etc/netns", namespace).glob("*"):
        mount(str(path), f"/etc/{path.name}", "none", _MS_BIND)


def _become(command: Sequence[str], environ: Mapping[str, str], cwd: str, new_session: bool, parent: int) -> None:
    """Runs what Python would run in this process."""
    if new_session:
        os.setsid()
    namespace, (program, *arguments) = _split(command)
    if namespace:
        _enter(namespace)
    os.chdir(cwd)
    setproctitle(" ".join([program, *arguments]))
    os.environ.clear()
    os.environ.update(environ)
    fork_server.forget()
    # The one that came along knows of the server's file whether it can be sought.
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)))
    if program != sys.executable:
        arguments = [str(_STRATAGEM), *arguments]
    first, *rest = arguments
    if (first, *rest[:2]) == ("-m", "stratagem.cli", "run") or (first, *rest[:1]) == (str(_STRATAGEM), "run"):
        from stratagem.launch import cluster, preloaded

        preloaded.start_server = _Spare().start  # type: ignore[assignment]  # it is ended and waited for alike

        class Loaded(preloaded.ForkServer):
            """Has loaded everything when a launcher asks for it, so that the chief need not be a Python of its own."""

            def __init__(self, environ: Mapping[str, str]) -> None:
                super().__init__(environ)
                self.receive(None)
                vars(cluster).update(OwnChild=self.start)

        vars(cluster).update(ForkServer=Loaded)
    sys.path[1:1] = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if first == "-m":
        sys.path[0], sys.argv = cwd, ["", *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path[0], sys.argv = "", ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    else:
        sys.path[0], sys.argv = str(Path(first).resolve().parent), arguments
        runpy.run_path(first, run_name="__main__")


def main() -> None:
    """The life of the process that forks; in its forks theirs."""
    fork_server.preload((*ALSO_PRELOADED, *fork_server.PRELOADED))
    _become(**_serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
