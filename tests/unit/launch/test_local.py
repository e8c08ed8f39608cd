"""The launcher with real processes: tiny programs stand for chief, ps and script, at the seam of the command line."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from stratagem.cluster.task import TaskId
from stratagem.errors import ConfigurationError, StratagemError
from stratagem.launch import cluster, processes, summary
from stratagem.launch.local import run_local
from stratagem.launch.plan import Launch, LocalJob
from stratagem.launch.status import INTERVAL_S, StatusPoller
from stratagem.launch.supervisor import LATE_S
from stratagem.rpc.status_view import StatusView
from tests.polling import until

# A chief nobody answers at; it ends when every worker has written its "done" file.
CHIEF = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
print("listening on 127.0.0.1:1", flush=True)
while len([name for name in os.listdir(sys.argv[1]) if name.startswith("done")]) < int(sys.argv[2]):
    time.sleep(0.01)
"""
WORKER_DONE = "import sys, os; open(os.path.join(sys.argv[1], 'done' + sys.argv[3]), 'w').close()\n"
WAIT = "import time\nwhile True: time.sleep(0.01)\n"
DEADLINE_S = 60.0


@pytest.mark.parametrize(
    ("number", "file", "said"),
    [
        (errno.EMFILE, (), "Too many open files; `ulimit -a` shows"),
        (errno.EACCES, ("/root/bin/python",), "Permission denied: /root/bin/python$"),
    ],
)
def test_a_task_that_cannot_be_started_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, file: tuple[str, ...], said: str
) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number), *file)

    monkeypatch.setattr(cluster, "TaskProcess", refused)
    (tmp_path / "train.py").touch()
    with pytest.raises(StratagemError, match=f"worker:0 cannot be started: {said}"):
        run_local(LocalJob(script=tmp_path / "train.py"), stdout=io.StringIO(), stderr=io.StringIO())


def runs(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its new parent to notice does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Case:
    """A job of small programs, and what came out of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs: dict[str, str] = {
            "chief:0": CHIEF,
            "ps:0": CHIEF,
            "worker:0": WORKER_DONE,
            "worker:1": WORKER_DONE,
        }
        self.stdout, self.stderr = io.StringIO(), io.StringIO()
        self.starts: list[str] = []

    def launch(self, task: TaskId, chief_address: str) -> Launch:
        self.starts.append(str(task))
        program = (sys.executable, "-c", self.programs[str(task)], str(self.folder), "2", str(task))
        return Launch(program, {**os.environ, "LIFE": str(self.starts.count(str(task)))})

    def run(self, **changes: Any) -> int:
        script = self.folder / "train.py"
        script.touch()
        options: dict[str, Any] = {"num_workers": 2, "num_ps": 1, "state_dir": self.folder / "state"}
        options |= {"summary": self.folder / "summary.json", "shutdown_timeout_s": 5.0}
        job = LocalJob(script=script, **(options | changes))
        return run_local(job, launch_for=self.launch, stdout=self.stdout, stderr=self.stderr)

    @property
    def summary(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return loaded


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    yield Case(tmp_path)


def test_a_job_that_goes_well(case: Case, tmp_path: Path) -> None:
    case.programs["worker:0"] += "print('from the lead'); print('to stderr', file=sys.stderr)"
    case.programs["worker:1"] += "print('from the other')"
    assert case.run(log_dir=tmp_path / "logs") == 0
    assert case.stdout.getvalue() == "from the lead\n"
    assert "[worker:0] to stderr\n" in case.stderr.getvalue()
    assert "from the other" not in case.stderr.getvalue()
    assert (tmp_path / "logs" / "worker-1.log").read_text() == "from the other\n"
    assert case.starts == ["chief:0", "ps:0", "worker:0", "worker:1"]
    assert case.summary["exit_code"] == 0 and case.summary["first_failure"] is None
    assert case.summary["tasks"]["worker:1"] == {"exit_codes": [0], "restarts": 0}


@pytest.mark.parametrize("option", ["state_dir", "checkpoint_dir", "log_dir", "summary"])
def test_where_nothing_can_be_written_is_said_before_the_job(case: Case, tmp_path: Path, option: str) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "folder"
    flag = option.replace("_", "-")
    with pytest.raises(ConfigurationError, match=f"--{flag}: .* {tmp_path}/file.*: it, or one above it, is a file"):
        case.run(**{option: place / "summary.json" if option == "summary" else place})
    assert not case.starts


def test_no_more_tasks_are_started_than_this_host_bears(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def says(poller: StatusPoller, _: float) -> bool:
        poller.latest = StatusView(wanted_workers=4096, wanted_ps=0 if "worker:2" in case.starts else 9)
        return True

    monkeypatch.setattr(StatusPoller, "step", says)
    monkeypatch.setattr(cluster, "most_processes", lambda: 4)
    waits = "import os, sys, time\nwhile not os.path.exists(sys.argv[1] + '/doneworker:2'): time.sleep(0.01)\n"
    case.programs |= {"worker:0": waits + WORKER_DONE, "worker:1": waits + WORKER_DONE, "worker:2": WORKER_DONE}
    assert case.run() == 0
    assert case.starts.count("worker:2") == 1 and not {"worker:3", "ps:1"} & {*case.starts}
    assert "starting worker:2: the target is 4096, but this host takes at most 3\n" in case.stderr.getvalue()


def test_a_launcher_without_a_thread_to_ask_for_the_status_asks_later_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    poller, start = StatusPoller("127.0.0.1:1"), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert not poller.step(0.0)
    monkeypatch.setattr(threading.Thread, "start", start)
    assert not poller.step(INTERVAL_S)
    closing = threading.Thread(target=poller.close, daemon=True)
    closing.start()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()


@pytest.mark.parametrize("option", ["checkpoint_every_s", "shutdown_timeout_s"])
def test_negative_seconds_are_refused(case: Case, option: str) -> None:
    with pytest.raises(ConfigurationError, match="expected seconds of at least 0"):
        case.run(**{option: -1.0})


def test_checkpoints_by_the_chief_are_refused_where_it_takes_none(case: Case) -> None:
    with pytest.raises(ConfigurationError, match=r"for parameter servers.*sg\.CheckpointManager"):
        case.run(num_ps=0, checkpoint_every_s=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ps": 0, "staleness": 3.0}, "a staleness of 3 needs parameter servers: add ps"),
        ({"communication": {"wire_dtype": "bfloat16"}}, "--wire-dtype is for a ring of workers"),
        ({"communication": {"transport": "nccl"}}, "--transport nccl is for a ring of workers"),
        ({"communication": {"devices": "cpu:0,cpu:1"}}, "has one replica per process"),
        ({"communication": {"collective_timeout_s": "9"}}, "--collective-timeout-s is for a ring of workers"),
        (
            {"num_ps": 0, "communication": {"wire_dtype": "bfloat16", "compression": "int8"}},
            "--wire-dtype bfloat16 has no effect on gradients that --compression int8 makes smaller",
        ),
    ],
)
def test_what_would_do_nothing_is_refused(case: Case, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        case.run(**options)


def test_verbose_shows_every_worker(case: Case) -> None:
    case.programs["worker:1"] += "print('from the other')"
    assert case.run(verbose=True) == 0
    assert "[worker:1] from the other\n" in case.stderr.getvalue()


def test_a_broken_script_fails_at_once_and_its_traceback_is_shown_once(case: Case) -> None:
    for worker in ("worker:0", "worker:1"):
        case.programs[worker] = "def step():\n    raise ValueError('wrong shape')\nstep()"
    assert case.run() == 1
    shown = case.stderr.getvalue()
    assert shown.count("Traceback (most recent call last)") == 1
    assert "failed first (exit code 1; it failed before its first step); its last lines:\n  ValueError: wrong" in shown
    assert case.starts == ["chief:0", "ps:0", "worker:0", "worker:1"]
    failure = case.summary["first_failure"]
    assert failure["task"] in ("worker:0", "worker:1")
    assert (failure["code"], failure["last_lines"][-1]) == (1, "ValueError: wrong shape")


def test_a_killed_worker_is_started_again(case: Case) -> None:
    case.programs["worker:1"] = (
        "import os, signal, sys\nif os.environ['LIFE'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "open(sys.argv[1] + '/pid', 'w').write(str(os.getpid()))\n" + WORKER_DONE
    )
    # A chief that ended first would have the launcher kill a worker of whose steps it knows nothing.
    case.programs["chief:0"] += (
        "pid = int(open(sys.argv[1] + '/pid').read())\ntry:\n    while True: os.kill(pid, 0); time.sleep(0.01)\n"
        "except ProcessLookupError: pass\n"
    )
    assert case.run() == 0
    assert case.starts.count("worker:1") == 2
    assert case.summary["restarts"] == 1
    assert case.summary["tasks"]["worker:1"]["exit_codes"] == [-9, 0]
    assert "worker:1 ended (killed by SIGKILL); restarting it, 2 restarts left" in case.stderr.getvalue()


@pytest.fixture
def vmstat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The counts of a kernel that has killed seven processes for lack of memory."""
    counts = tmp_path / "vmstat"
    counts.write_text("nr_free_pages 9\noom_kill 7\n")
    monkeypatch.setattr(processes, "_VMSTAT", counts)
    return counts


def test_tasks_that_the_kernel_killed_for_lack_of_memory_are_told(case: Case, vmstat: Path) -> None:
    killed = "import os, signal, sys\n{}os.kill(os.getpid(), signal.SIGKILL)\n"
    case.programs["worker:1"] = killed.format(
        f"if os.environ['LIFE'] == '2': open({str(vmstat)!r}, 'w').write('oom_kill 8\\n')\n"
    )
    assert case.run(max_restarts=2) == 1
    told = [line for line in case.stderr.getvalue().splitlines() if "memory was used up when worker:1" in line]
    assert len(told) == 1 and case.starts.count("worker:1") == 3  # of the second life, not of the others


def test_who_failed_for_lack_of_memory_is_told_at_the_end(case: Case, vmstat: Path) -> None:
    kill = f"open({str(vmstat)!r}, 'w').write('oom_kill 8'); os.kill(os.getpid(), signal.SIGKILL)\n"
    case.programs["worker:1"] = f"import os, signal\n{kill}"
    assert case.run(max_restarts=0) == 1
    assert "memory was used up" in case.summary["first_failure"]["last_lines"][-1]


def test_memory_is_not_blamed_for_a_task_that_the_launcher_killed(case: Case, vmstat: Path) -> None:
    """Another job of the machine may have lacked memory meanwhile."""
    case.programs["worker:0"] = (
        "import sys, os, time\nwhile not os.path.exists(sys.argv[1] + '/deaf'): time.sleep(0.01)\n"
        f"open({str(vmstat)!r}, 'w').write('oom_kill 8')\nsys.exit(42)"
    )
    case.programs["worker:1"] = (
        "import signal, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen(sys.argv[1] + '/deaf', 'w')\n" + WAIT
    )
    assert case.run(shutdown_timeout_s=0.3) == 42
    assert case.summary["tasks"]["worker:1"]["exit_codes"] == [-signal.SIGKILL]
    assert "memory was used up" not in case.stderr.getvalue()


@pytest.mark.parametrize(("code", "lives"), [(42, 1), (2, 1), (3, 3)])
def test_exit_code_of_the_first_failure(case: Case, code: int, lives: int) -> None:
    case.programs["worker:0"] = f"import sys; sys.exit({code})"
    case.programs["worker:1"] = WAIT
    assert case.run(max_restarts=2) == code
    assert case.starts.count("worker:0") == lives
    assert case.summary["tasks"]["worker:1"]["exit_codes"] == [-signal.SIGTERM]


def test_who_failed_because_of_another_is_not_named_though_it_ended_first(case: Case) -> None:
    case.programs["worker:0"] = (
        "import glob, os, sys\n[root] = glob.glob(sys.argv[1] + '/state/stratagem-run-*')\n"
        "open(root + '/report-worker-0.json', 'w').write('{\"follows\": true}')\n"
        "open(sys.argv[1] + '/part', 'w').write(str(os.getpid()))\n"
        "os.rename(sys.argv[1] + '/part', sys.argv[1] + '/left')\nsys.exit(1)\n"
    )
    case.programs["worker:1"] = (  # ends when the launcher has noticed the end of the other
        "import os, sys, time\nwhile not os.path.exists(sys.argv[1] + '/left'): time.sleep(0.01)\n"
        "pid = int(open(sys.argv[1] + '/left').read())\ntry:\n    while True: os.kill(pid, 0); time.sleep(0.01)\n"
        "except ProcessLookupError: sys.exit(7)\n"
    )
    assert case.run(num_ps=0) == 7
    assert case.summary["first_failure"]["task"] == "worker:1"


def test_who_followed_is_not_named_while_the_lines_of_the_first_are_not_there(case: Case) -> None:
    """A process that a script has started holds its output open."""
    case.programs["worker:0"] = (
        "import os, subprocess, sys\nsubprocess.Popen(['sleep', '3'])\n"
        "open(sys.argv[1] + '/part', 'w').write(str(os.getpid()))\n"
        "os.rename(sys.argv[1] + '/part', sys.argv[1] + '/left')\nsys.exit(2)\n"
    )
    case.programs["ps:0"] = (  # ends when the launcher has noticed the end of the worker
        "import os, sys, time\nprint('listening on 127.0.0.1:1', flush=True)\n"
        "while not os.path.exists(sys.argv[1] + '/left'): time.sleep(0.01)\n"
        "pid = int(open(sys.argv[1] + '/left').read())\ntry:\n    while True: os.kill(pid, 0); time.sleep(0.01)\n"
        "except ProcessLookupError: sys.exit(2)\n"
    )
    assert case.run(num_workers=1) == 2
    assert case.summary["first_failure"]["task"] == "worker:0"


@pytest.mark.parametrize("report", ["has_stepped", "was_fenced"])
def test_a_step_that_only_the_report_knows_of_counts_in_the_life_that_made_it(case: Case, report: str) -> None:
    """And so does that the chief had taken the worker for lost: its script did not fail by itself."""
    case.programs["worker:0"] = (
        "import glob, os, sys\n[root] = glob.glob(sys.argv[1] + '/state/stratagem-run-*')\n"
        "if os.environ['LIFE'] == '1':\n"
        f"    open(root + '/report-worker-0.json', 'w').write('{{\"{report}\": true}}')\nsys.exit(1)\n"
    )
    case.programs["worker:1"] = WAIT
    assert case.run() == 1
    assert case.summary["tasks"]["worker:0"]["exit_codes"] == [1, 1]
    assert case.summary["first_failure"]["reason"] == "it failed before its first step"


def test_an_interrupt_while_the_chief_loads_ends_it_without_a_word(case: Case) -> None:
    case.programs["chief:0"] = "import os, signal\nos.kill(os.getppid(), signal.SIGINT)\n" + WAIT
    assert case.run() == 130
    assert "Traceback" not in case.stderr.getvalue()
    assert case.summary["tasks"]["chief:0"]["exit_codes"] == [-signal.SIGTERM]


def test_who_ignores_sigterm_is_killed_with_its_children(case: Case, tmp_path: Path) -> None:
    case.programs["worker:0"] = (
        "import sys, os, time\nwhile not os.path.exists(sys.argv[1] + '/child'): time.sleep(0.01)\n"
    )
    case.programs["worker:0"] += "sys.exit(42)"
    case.programs["worker:1"] = (
        "import os, signal, subprocess, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open(sys.argv[1] + '/part', 'w').write(str(child.pid))\n"
        "os.rename(sys.argv[1] + '/part', sys.argv[1] + '/child')\n" + WAIT
    )
    assert case.run(shutdown_timeout_s=0.3) == 42
    assert case.summary["tasks"]["worker:1"]["exit_codes"] == [-signal.SIGKILL]
    until(lambda: not runs(int((tmp_path / "child").read_text())))


def test_what_a_task_leaves_behind_is_killed(case: Case, tmp_path: Path) -> None:
    case.programs["worker:0"] = (
        "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open(sys.argv[1] + '/child', 'w').write(str(child.pid))\n" + WORKER_DONE
    )
    assert case.run() == 0
    until(lambda: not runs(int((tmp_path / "child").read_text())))


def test_the_run_folder_is_temporary_unless_it_failed(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    assert case.run(state_dir=None) == 0
    assert list((tmp_path / "tmp").iterdir()) == []
    case.programs["worker:0"] = "raise SystemExit(42)"
    assert case.run(state_dir=None) == 42
    (kept,) = (tmp_path / "tmp").iterdir()
    assert f"logs: {kept / 'logs'}" in case.stderr.getvalue()


def test_reports_of_the_workers_make_the_summary(case: Case, tmp_path: Path) -> None:
    for index, worker in enumerate(("worker:0", "worker:1")):
        report = {"steps": 5, "examples": 40, "loss": 0.5 + index, "metrics": {"accuracy": 0.9 + index / 100}}
        case.programs[worker] += (
            f"import glob, json; folder, = glob.glob(sys.argv[1] + '/state/*')\n"
            f"open(folder + '/report-worker-{index}.json', 'w').write(json.dumps({report!r}))"
        )
    assert case.run() == 0
    summary = case.summary
    assert (summary["strategy"], summary["steps"], summary["examples"]) == ("ps", 10, 80)
    assert (summary["loss"], summary["metrics"], summary["staleness"]) == (0.5, {"accuracy": 0.9}, "inf")


def test_what_a_restarted_worker_measured_is_of_its_last_life(case: Case) -> None:
    case.programs["worker:1"] = (
        "import glob, json, os, sys, time\n"
        "if os.environ['LIFE'] == '1': time.sleep(1); os.abort()\n"
        "folder, = glob.glob(sys.argv[1] + '/state/*')\n"
        "open(folder + '/report-worker-1.json', 'w').write(json.dumps({'measures': {'steps': 5.0}}))\n" + WORKER_DONE
    )
    assert case.run() == 0
    assert (case.summary["restarts"], case.summary["life"]) == (1, 1)
    measured = case.summary["measures"]["worker:1"]
    assert measured["values"] == {"steps": 5.0} and 0 < measured["window_s"] <= case.summary["duration_s"] - 1


CHIEF_WITH_STATUS = """
import os, sys, time
from concurrent import futures
import grpc
from stratagem.rpc.generated import chief_pb2 as pb, chief_pb2_grpc
class Servicer(chief_pb2_grpc.ChiefServicer):
    def GetStatus(self, request, context):
        path = sys.argv[1] + "/pid"
        reply = pb.GetStatusReply(ready=True, lead="worker:1", units_planned=10, units_accepted=4, examples=64,
                                  updates_lost=3)
        pid = int(open(path).read()) if os.path.exists(path) else 0
        progress = pb.Progress(step=3, loss=0.25, has_loss=True)
        reply.tasks.add(pid=pid, state="live", progress=progress).info.task = "worker:1"
        return reply
server = grpc.server(futures.ThreadPoolExecutor(1))
chief_pb2_grpc.add_ChiefServicer_to_server(Servicer(), server)
print("listening on 127.0.0.1:%d" % server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
while not os.path.exists(sys.argv[1] + "/doneworker:1"):
    time.sleep(0.01)
server.stop(None)
"""


def test_a_script_that_fails_after_a_step_is_started_again(case: Case) -> None:
    case.programs["chief:0"] = CHIEF_WITH_STATUS
    case.programs["ps:0"] = case.programs["worker:0"] = WORKER_DONE
    case.programs["worker:1"] = (
        "import os, sys, time\nif os.environ['LIFE'] == '1':\n"
        "    open(sys.argv[1] + '/part', 'w').write(str(os.getpid()))\n"
        "    os.rename(sys.argv[1] + '/part', sys.argv[1] + '/pid')\n"
        "    raise ValueError('after step 3')\nprint('lead now')\n" + WORKER_DONE
    )
    assert case.run() == 0
    assert case.summary["tasks"]["worker:1"]["exit_codes"] == [1, 0]
    assert (case.summary["examples"], case.summary["updates_lost"], case.summary["loss"]) == (64, 3, 0.25)
    assert "units 4/10 · loss 0.2500" in case.stderr.getvalue()
    assert "3 updates lost" in case.stderr.getvalue()
    assert case.stdout.getvalue() == "lead now\n"


def test_what_the_chief_noted_after_its_last_answer_is_in_the_summary(case: Case) -> None:
    # What takes seconds on a busy machine is loaded first: workers are done, and a chief gets five to end.
    loaded = "import glob\nfrom stratagem.chief.journal.journal import Journal\n"
    case.programs["chief:0"] = (loaded + CHIEF_WITH_STATUS) + (
        "journal = Journal(glob.glob(sys.argv[1] + '/state/*/chief')[0])\n"
        "journal.write('lost', task='ps:0', units=[[1, 0, '1f']])\n"
        "journal.write('restored', path='/ckpt-7', undone=2)\n"
        "plan = dict(num_examples=8, batch_size=4, drop_last=False, shuffle=False, num_slices=2, seed=0, staleness=0)\n"
        "journal.write('plan', dataset=1, plan=plan)\n"
        "for step, units in enumerate([[[1, 0, 0], [1, 0, 1]], [[1, 0, 2]], [[1, 0, 3]]]):\n"
        "    journal.write('step', step=step, units=units)\n"
        "journal.write('stopped', reason='all workers are done')\n"
    )
    case.programs["ps:0"] = WORKER_DONE
    assert case.run() == 0
    assert [case.summary[name] for name in ("updates_lost", "updates_undone", "restored")] == [5, 2, "/ckpt-7"]
    assert case.summary["updates_in_part"] == 2
    assert "5 updates lost, 2 updates of partial batches, unlike in a single process, 2 updates of damaged" in (
        case.stderr.getvalue()
    )


@pytest.mark.parametrize("is_done", [False, True], ids=["stands still", "has a thread that runs"])
def test_a_worker_that_stands_still_as_a_ring_with_min_workers_ends_is_killed(case: Case, is_done: bool) -> None:
    """The chief goes as it loses it, since the others are done; it was waited for without end."""
    case.programs["chief:0"] = (
        f"import glob\nfrom stratagem.chief.journal.journal import Journal\n{CHIEF}"
        "journal = Journal(glob.glob(sys.argv[1] + '/state/*/chief')[0])\n"
        "journal.write('over', task='worker:0', incarnation=1, done=True)\n"
        f"journal.write('over', task='worker:1', incarnation=2, done={is_done})\n"
    )
    case.programs["worker:1"] = WORKER_DONE + f"import time\ntime.sleep({LATE_S + 1 if is_done else DEADLINE_S})\n"
    assert case.run(num_ps=0, min_workers=1) == 0
    assert case.summary["tasks"]["worker:1"]["exit_codes"] == [0 if is_done else -9]


def test_an_evaluator_that_is_killed_after_its_goodbye_has_not_failed(case: Case) -> None:
    """The job ended with exit code 1; nothing was lost."""
    case.programs["chief:0"] = (
        f"import glob, os\nfrom stratagem.chief.journal.journal import Journal\n{CHIEF}"
        "journal = Journal(glob.glob(sys.argv[1] + '/state/*/chief')[0])\n"
        "journal.write('over', task='evaluator:0', incarnation=1, done=True)\n"
        "open(sys.argv[1] + '/pid', 'w').write(str(os.getpid()))\n"
    )
    case.programs["ps:0"] = WORKER_DONE
    case.programs["evaluator:0"] = (
        "import os, pathlib, sys, time\npid = pathlib.Path(sys.argv[1], 'pid')\n"
        "while not pid.exists() or not pid.read_text() or pathlib.Path('/proc', pid.read_text()).exists():\n"
        "    time.sleep(0.1)\n"
        "time.sleep(1)\nos.kill(os.getpid(), 9)\n"
    )
    assert case.run(evaluator=True) == 0


def test_a_signal_as_the_launcher_says_what_came_of_the_job_takes_nothing_of_that(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the launcher before the summary was written, and left the folder of the run."""
    heard: list[int] = []

    def build_summary(*arguments: Any) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        return summary.build_summary(*arguments)

    monkeypatch.setattr("stratagem.launch.local.build_summary", build_summary)
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        assert case.run() == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not heard and case.summary["exit_code"] == 0


RUN = """
import os, sys
from pathlib import Path
from stratagem.launch.local import run_local
from stratagem.launch.plan import Launch, LocalJob
folder = Path(sys.argv[1])
PROGRAM = '''
import os, signal, sys, time
from pathlib import Path
folder, task, ignore = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
for signum in (signal.SIGINT, signal.SIGTERM):
    def ended(signum, frame):
        (folder / f"{task}.got").write_text(str(signum))
        ignore == "yes" or os._exit(0)
    signal.signal(signum, ended)
if task == "chief:0":
    print("listening on 127.0.0.1:1", flush=True)
(folder / f"{task}.part").write_text(str(os.getpid()))
os.rename(folder / f"{task}.part", folder / f"{task}.pid")
while True:
    time.sleep(0.01)
'''
def launch(task, chief_address):
    return Launch((sys.executable, "-c", PROGRAM, str(folder), str(task), sys.argv[2]), dict(os.environ))
script = folder / "train.py"
script.touch()
job = LocalJob(script=script, num_workers=1, num_ps=1, state_dir=folder / "state")
sys.exit(run_local(job, launch_for=launch))
"""
TASKS = ("chief:0", "ps:0", "worker:0")


Starter = Callable[[str], tuple[subprocess.Popen[str], list[int]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    """Starts a launcher of its own whose tasks ignore signals or not; it ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def launcher(ignore: str) -> tuple[subprocess.Popen[str], list[int]]:
        command = [sys.executable, "-c", RUN, str(tmp_path), ignore]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        until(lambda: all((tmp_path / f"{task}.pid").exists() for task in TASKS))
        return started[-1], [int((tmp_path / f"{task}.pid").read_text()) for task in TASKS]

    yield launcher
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_forwarded_to_everyone(start: Starter, tmp_path: Path, signum: int, code: int) -> None:
    launcher, pids = start("no")
    launcher.send_signal(signum)
    _, shown = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == code, shown
    numbers = {task: int((tmp_path / f"{task}.got").read_text()) for task in TASKS}
    assert numbers.pop("chief:0") == signal.SIGINT, "SIGTERM would leave the job to another chief"
    assert set(numbers.values()) == {signum}
    assert not any(runs(pid) for pid in pids)


def test_the_second_signal_kills(start: Starter, tmp_path: Path) -> None:
    launcher, pids = start("yes")
    launcher.send_signal(signal.SIGINT)
    until(lambda: all((tmp_path / f"{task}.got").exists() for task in ("chief:0", "worker:0")))
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 130
    assert not any(runs(pid) for pid in pids)


def test_kill_9_of_the_launcher_leaves_no_process(start: Starter) -> None:
    launcher, pids = start("yes")
    launcher.kill()
    launcher.communicate(timeout=DEADLINE_S)
    until(lambda: not any(runs(pid) for pid in pids))
