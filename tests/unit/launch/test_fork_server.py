"""Tasks that are forked from a process which has loaded torch: the same as in a Python of their own, but at once."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from stratagem.cluster.task import TaskId
from stratagem.launch.fork_server import COMMAND_PREFIX
from stratagem.launch.plan import Launch
from stratagem.launch.preloaded import ForkServer
from stratagem.launch.processes import OwnChild, TaskProcess
from tests.polling import until
from tests.unit.launch.test_local import runs

DEADLINE_S = 60.0
# What a script can see of the process it is in; only the preloading may show.
LOOK = """
import json, os, random, signal, sys, threading, numpy, torch
print(json.dumps({
    "argv": sys.argv, "file": __file__, "name": __name__, "main": sys.modules["__main__"].__file__,
    "path": [path for path in sys.path if not path.startswith("/tmp/tmp")],  # that of torch 2.9's compiler
    "cwd": os.getcwd(), "stdin": sys.stdin.read(), "environ": dict(os.environ),
    "threads": threading.active_count(), "tasks": len(os.listdir("/proc/self/task")),
    "leads": os.getpgrp() == os.getpid() == os.getsid(0),
    "signals": [str(signal.getsignal(number)) for number in (signal.SIGCHLD, signal.SIGPIPE)],
    "torch": torch.initial_seed(), "numpy": numpy.random.random(), "random": random.random(),
    "descriptors": sorted({os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in (0, 1, 2)}),
    "command": [word for word in open("/proc/self/cmdline").read().replace("\\0", " ").split()],
}))
"""


ENVIRON = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}


def loaded() -> ForkServer:
    """A fork server that has loaded everything."""
    server = ForkServer(ENVIRON)
    while server.is_loading:
        server.receive(DEADLINE_S)
    return server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """One for the tests that leave it as it is; all are in a folder that has a module which nobody may load."""
    folder = tmp_path_factory.mktemp("current")
    (folder / "queue.py").write_text("raise RuntimeError('not the one of Python')")
    with contextlib.chdir(folder):
        made = loaded()
        yield made
        made.close()


class Tasks:
    """Starts scripts as workers, each process with its own source, and ends them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[TaskProcess] = []

    def start(self, source: str, starter: Any, **environ: str) -> TaskProcess:
        """Starts ``source``."""
        script = self.folder / f"script-{len(self.started)}.py"
        script.write_text(source)
        command = (*COMMAND_PREFIX, "worker", "--task=worker:0", "--strategy=one", str(script), "argument")
        task = TaskProcess(TaskId("worker", 0), Launch(command, ENVIRON | environ), starter)
        self.started.append(task)
        return task

    @staticmethod
    def output(task: TaskProcess) -> tuple[list[str], str]:
        """Standard output and error of a task that ends."""
        out: list[str] = []
        err: list[str] = []
        while not all(reader.at_end for reader in task.streams.values()):
            out += task.streams["stdout"].read()
            err += task.streams["stderr"].read()
            time.sleep(0.01)
        until(task.reap)
        return out, "\n".join(err)


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[Tasks]:
    """Ends what a test has started."""
    made = Tasks(tmp_path)
    yield made
    for task in made.started:
        task.kill()
        task.wait()
        task.close()


def test_a_fork_is_what_a_python_of_its_own_is(server: ForkServer, tasks: Tasks) -> None:
    seen = []
    for number, starter in enumerate((server.start, server.start, OwnChild)):
        out, err = tasks.output(tasks.start(LOOK, starter, STRATAGEM_NUM_THREADS="1", LOCAL_RANK="3"))
        assert tasks.started[-1].returncode == 0, err
        seen.append(json.loads(out[-1]))
        for name in ("argv", "file", "path"):  # each has a script of its own
            seen[-1][name] = json.dumps(seen[-1][name]).replace(f"script-{number}", "script")
        seen[-1]["main"] = seen[-1]["main"].replace(f"script-{number}", "script")
        seen[-1]["command"] = " ".join(seen[-1]["command"]).replace(f"script-{number}", "script")
    first, second, own = seen
    assert first.pop("command") in own.pop("command")  # a guard stands before it there, until it executes
    second.pop("command")
    for name in ("torch", "numpy", "random"):
        values = {one.pop(name) for one in (first, second, own)}
        assert len(values) == 3, f"{name} gives forks of one process the same numbers"
    assert first == second == own
    parents = [psutil.Process(task.pid).ppid() for task in tasks.started if psutil.pid_exists(task.pid)]
    assert not parents  # all reaped


def test_a_fork_that_ends_takes_nothing_apart_that_was_there_before_it(server: ForkServer, tasks: Tasks) -> None:
    """The kernel copied all pages of torch, so that each could be given back at once."""

    def look_after(source: str) -> tuple[int, int]:
        """How many pages forks that have ended have had, and how many the server has that are no file's."""
        task = tasks.start(f"import os\nprint(os.getppid(), flush=True)\n{source}", server.start)
        (pid,), err = tasks.output(task)
        assert task.returncode == 0, err
        until(lambda: not psutil.pid_exists(task.pid))  # the server has reaped it
        faults = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[8]
        (anonymous,) = re.findall(r"RssAnon:\s+(\d+)", Path("/proc", pid, "status").read_text())
        return int(faults), 1024 * int(anonymous) // mmap.PAGESIZE

    (before, _), (left, _), (tidied, num_pages) = (look_after(end) for end in ("", "os._exit(0)", ""))
    assert (tidied - left) - (left - before) < num_pages / 3


def test_words_that_are_not_utf8_reach_the_script(server: ForkServer, tasks: Tasks) -> None:
    tasks.folder = Path(f"{tasks.folder}/lat\udce9n")
    tasks.folder.mkdir()
    out, err = tasks.output(tasks.start("import os, sys\nprint(os.fsencode(sys.argv[0]))", server.start))
    assert out == [repr(os.fsencode(tasks.folder / "script-0.py"))], err


def test_beside_triton_nothing_is_kept_from_the_collector_at_the_end(server: ForkServer, tasks: Tasks) -> None:
    # It looks for leaks when Python ends, and would print pages about what the server has frozen.
    out, err = tasks.output(
        tasks.start(
            "import atexit, gc, sys\natexit._run_exitfuncs()\n"
            "print('triton' in sys.modules, gc.get_freeze_count() > 0)",
            server.start,
        )
    )
    assert out in (["True False"], ["False True"]), err


def test_what_c_has_buffered_is_written_and_python_tidies_up_as_ever(server: ForkServer, tasks: Tasks) -> None:
    source = """
import atexit, ctypes, sys
class Last:
    def __del__(self):
        libc.printf(b"deleted\\n")
libc, last = ctypes.CDLL(None), Last()
atexit.register(lambda: libc.printf(b"at exit\\n"))
libc.printf(b"buffered\\n")
sys.exit(3)
"""
    out, err = tasks.output(tasks.start(source, server.start))
    assert (out, tasks.started[-1].returncode) == (["buffered", "at exit", "deleted"], 3), err


def test_exit_codes_signals_and_what_a_task_leaves_behind(server: ForkServer, tasks: Tasks) -> None:
    failed = tasks.start("import sys; sys.exit(7)", server.start)
    waits = "import subprocess, sys, time\nprint(subprocess.Popen(['sleep', '600']).pid, flush=True)\n"
    killed = tasks.start(waits + "time.sleep(600)", server.start)
    left = tasks.start(waits, server.start)
    orphans = [int(until(task.streams["stdout"].read)[0]) for task in (killed, left)]
    killed.send(signal.SIGKILL)
    for task, code in ((failed, 7), (killed, -signal.SIGKILL), (left, 0)):
        until(task.reap)
        assert task.returncode == code
    until(lambda: not any(map(runs, orphans)))


def check_interrupts(server: ForkServer, tasks: Tasks) -> None:
    for _ in range(3):
        task = tasks.start("import time; time.sleep(600)", server.start)
        task.send(signal.SIGINT)  # on a busy machine perhaps when the script runs already
        _, err = tasks.output(task)
        assert task.returncode in (130, -signal.SIGINT), err


def test_an_interrupt_that_comes_at_once_ends_a_fork(server: ForkServer, tasks: Tasks) -> None:
    check_interrupts(server, tasks)


@pytest.mark.thorough
def test_in_a_script_s_background_too_and_nobody_outlives_a_fork_server_that_is_lost(tasks: Tasks) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = loaded()
    try:
        check_interrupts(server, tasks)
        task = tasks.start("import time; print('here', flush=True); time.sleep(600)", server.start)
        until(task.streams["stdout"].read)
        psutil.Process(psutil.Process(task.pid).ppid()).kill()
        until(task.reap)
        assert task.returncode == -signal.SIGKILL
        until(lambda: not runs(task.pid))
        where = "import os; print(os.getppid(), flush=True)"  # and the job goes on
        assert int(tasks.output(tasks.start(where, server.start))[0][0]) == os.getpid()
    finally:
        signal.signal(signal.SIGINT, before)
        server.close()


def test_a_fork_that_is_killed_before_it_has_a_group_of_its_own() -> None:
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    with subprocess.Popen(command) as child:  # in our group

        class Forked(OwnChild):
            def __init__(self, *_: object) -> None:
                self.pid = child.pid

            def ended(self) -> int | None:
                return child.poll()

            def reap(self) -> None: ...

        task = TaskProcess(TaskId("worker", 0), Launch(command, {}), Forked)
        task.kill()
        try:
            assert child.wait(DEADLINE_S) == -signal.SIGKILL and task.reap()
        finally:
            child.kill()
            task.close()


def test_the_end_of_a_task_is_not_that_of_another_one_with_its_id(server: ForkServer, tasks: Tasks) -> None:
    task = tasks.start("", server.start)
    until(task.reap)
    assert task.returncode == 0
    assert server.code_of(task.pid) is None, "the next process with this id would be over before it began"


@pytest.mark.thorough
def test_tasks_that_need_another_start_get_their_own_python(server: ForkServer, tasks: Tasks) -> None:
    """The current folder is no place of modules, for either."""
    assert Path("queue.py").exists()
    where = "import os, queue; print(os.getppid(), flush=True)"
    forked = int(tasks.output(tasks.start(where, server.start))[0][0])
    assert forked != os.getpid()
    assert int(tasks.output(tasks.start(where, server.start, OMP_NUM_THREADS="3"))[0][0]) == os.getpid()


def test_the_server_has_one_thread_and_no_grpc(server: ForkServer, tasks: Tasks) -> None:
    source = "import os, sys; print(os.getppid(), 'torch._dynamo' in sys.modules, flush=True)"
    parent, loaded = tasks.output(tasks.start(source, server.start))[0][0].split()
    assert loaded == "True"
    assert psutil.Process(int(parent)).num_threads() == 1
    assert not [entry.path for entry in psutil.Process(int(parent)).memory_maps() if "grpc" in entry.path]
    assert sys.executable in psutil.Process(int(parent)).cmdline()
