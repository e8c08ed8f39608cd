"""Which line goes where, tracebacks once, progress in words, the plan's command lines, the summary."""

from __future__ import annotations

import dataclasses
import fcntl
import io
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from stratagem.checkpoint.catalog import newest
from stratagem.checkpoint.manifest import Manifest, encode
from stratagem.chief.journal.journal import Journal
from stratagem.cluster.spec import ClusterSpec
from stratagem.cluster.task import TaskId
from stratagem.cluster.tf_config import placement_from_environment
from stratagem.cluster.units import Plan
from stratagem.errors import ClusterSpecError, ConfigurationError
from stratagem.launch.actions import Failure
from stratagem.launch.display import JobPace, LiveDisplay, PlainDisplay, make_display, progress_words, task_words
from stratagem.launch.local import run_local
from stratagem.launch.output import OutputRouter, TracebackFilter, essence
from stratagem.launch.plan import Launch, LocalJob, RunFolders, check_size, plan_launch
from stratagem.launch.processes import LineReader, Stream
from stratagem.launch.summary import build_summary, failure_words, last_status, write_summary
from stratagem.launch.supervisor import Supervisor
from stratagem.rpc.status_view import StatusView, TaskState
from tests.polling import until

W0, W1, PS = TaskId("worker", 0), TaskId("worker", 1), TaskId("ps", 0)
BLOCK = ["Traceback (most recent call last):", '  File "x.py", line 1', "ValueError: no"]


class Shown:
    """A screen that remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def show(self, stream: Stream, line: str) -> None:
        self.lines.append((stream, line))


def test_who_writes_without_end_is_read_a_pipe_at_a_time() -> None:
    reading, writing = os.pipe()
    with open(writing, "wb") as pipe:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 1 << 20)
        pipe.write(b"y\n" * (1 << 18))
    reader = LineReader(reading)
    try:
        counts = [len(reader.read()) for _ in range(9)]
    finally:
        os.close(reading)
    assert counts == [1 << 15] * 8 + [0] and reader.at_end


def test_the_lead_moves(tmp_path: Path) -> None:
    shown = Shown()
    output = OutputRouter(shown.show, tmp_path, verbose=False, colour=False)
    output.line(W0, "stdout", "a")
    output.line(W1, "stdout", "b")
    output.lead = W1
    output.line(W0, "stdout", "c")
    output.line(W1, "stdout", "d")
    output.line(PS, "stdout", "e")
    output.line(W0, "stderr", "f")
    assert shown.lines == [("stdout", "a"), ("stdout", "d"), ("stderr", "[ps:0] e"), ("stderr", "[worker:0] f")]
    assert (tmp_path / "worker-0.log").read_text() == "a\nc\nf\n"  # while the job runs
    output.close()


def test_a_full_disk_ends_the_logs_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").symlink_to("/dev/full")
    shown = Shown()
    output = OutputRouter(shown.show, tmp_path, verbose=False, colour=False)
    output.line(PS, "stdout", "a")
    for line in ("b", "c"):
        output.line(W0, "stdout", line)
        output.ended(W0)
    output.close()
    assert [line for _, line in shown.lines] == [
        "[ps:0] a",
        f"stratagem: the logs in {tmp_path} end here: No space left on device",
        "b",
        "c",
    ]
    assert (tmp_path / "ps-0.log").read_text() == "a\n"


def test_colour(tmp_path: Path) -> None:
    shown = Shown()
    output = OutputRouter(shown.show, tmp_path, verbose=False, colour=True)
    output.line(PS, "stderr", "x")
    output.close()
    assert shown.lines == [("stderr", "\x1b[33m[ps:0]\x1b[0m x")]


def test_a_traceback_is_shown_once_and_other_lines_always() -> None:
    once = TracebackFilter()
    shown = [line for text in ["before", *BLOCK, "after"] for line in once.feed(W0, text)]
    assert shown == ["before", *BLOCK, "after"]
    assert [line for text in ["before", *BLOCK] for line in once.feed(W1, text)] == [
        "before",
        "ValueError: no (same traceback as worker:0)",
    ]
    other = [*BLOCK[:2], "KeyError: 1"]
    assert [line for text in other for line in once.feed(W1, text)] == other


def test_tracebacks_that_are_all_different_take_no_more_and_more_memory() -> None:
    once = TracebackFilter()
    for number in range(2000):
        other = [*BLOCK[:2], f"KeyError: {number}"]
        assert [line for text in other for line in once.feed(W0, text)] == other
    assert len(once._first) <= 1024
    assert [line for text in other for line in once.feed(W1, text)] == ["KeyError: 1999 (same traceback as worker:0)"]


def test_a_traceback_cut_short_is_shown_at_the_end() -> None:
    once = TracebackFilter()
    assert [line for text in BLOCK[:2] for line in once.feed(W0, text)] == []
    assert once.flush(W0) == BLOCK[:2]
    assert once.flush(W0) == []


@pytest.mark.parametrize("num_lines", [1, 2])
def test_what_was_cut_short_of_a_traceback_that_was_shown_is_not_another_one(num_lines: int) -> None:
    once = TracebackFilter()
    assert [line for text in BLOCK for line in once.feed(W0, text)] == BLOCK
    assert [line for text in BLOCK[:num_lines] for line in once.feed(W1, text)] == []
    assert once.flush(W1) == []


def test_essence_leaves_frames_out() -> None:
    assert essence(["one", "two"]) == ["one", "two"]
    assert essence(["one", *BLOCK, "", "worker:0: the script failed"], 2) == [
        "ValueError: no",
        "worker:0: the script failed",
    ]


def _status(**changes: Any) -> StatusView:
    worker = TaskState("worker:0", "live", step=3, loss=0.5, step_s=0.1, exposed_s=0.025)
    fields: dict[str, Any] = {"ready": True, "lead": "worker:0", "tasks": (worker,), "units_planned": 100, "epoch": 1}
    return StatusView(**(fields | changes))


def test_progress_in_words() -> None:
    pace = JobPace()
    pace.add(10.0, _status(examples=0, units_accepted=10))
    status = _status(examples=640, units_accepted=30, updates_lost=2)
    pace.add(12.0, status)
    assert progress_words(status, pace) == (
        "epoch 1 · units 30/100 · loss 0.5000 · 320 examples/s · epoch ends in 7 s · exposed communication 25% · "
        "updates lost 2"
    )
    assert "units" not in progress_words(_status(units_planned=0), JobPace())  # before a dataset is distributed
    assert progress_words(StatusView(waiting_for=("ps:0",)), JobPace()) == "waiting for the cluster: ps:0"


def test_pace_forgets() -> None:
    pace = JobPace()
    pace.add(0.0, _status(examples=0))
    pace.add(100.0, _status(examples=1000))
    pace.add(102.0, _status(examples=1100))
    assert pace.examples_per_s == pytest.approx(50.0)
    assert pace.eta_s(_status()) is None
    pace.add(103.0, _status(examples=5))
    assert pace.examples_per_s == 0.0


def test_what_a_job_resumes_from_was_not_made_in_its_first_second() -> None:
    pace = JobPace()
    pace.add(0.0, _status(examples=0, units_accepted=0))
    for now, more in ((5.0, 0), (6.0, 10)):
        status = _status(examples=2448 + 8 * more, units_accepted=306 + more, units_planned=500, restored="step-306")
        pace.add(now, status)
        assert pace.examples_per_s == 8.0 * more
    assert pace.eta_s(status) == pytest.approx(18.4)


def test_plain_display_is_patient_and_silent_without_news() -> None:
    out, err = io.StringIO(), io.StringIO()
    display = make_display(out, err)
    assert isinstance(display, PlainDisplay)
    for now, accepted in [(0.0, 1), (1.0, 2), (6.0, 3), (12.0, 3)]:
        display.update(_status(units_accepted=accepted), now)
    display.close()
    assert [line.split(" · ")[1] for line in err.getvalue().splitlines()] == ["units 1/100", "units 3/100"]


def test_what_is_off_is_told_once_when_it_stays() -> None:
    out, err = io.StringIO(), io.StringIO()
    display = make_display(out, err)
    silent = (TaskState("worker:0", "live", step=3), TaskState("worker:1", "live", step=3, heartbeat_age_s=9.0))
    for now, tasks in [(0.0, silent), (3.0, silent), (6.0, silent), (12.0, silent), (18.0, silent[:1])]:
        display.update(_status(tasks=tasks), now)
    told = [line for line in err.getvalue().splitlines() if "stratagem why" in line]
    assert len(told) == 1 and told[0].startswith("stratagem: worker:1 has been silent for 9.0 s"), err.getvalue()


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_live_display_on_a_terminal() -> None:
    out, err = io.StringIO(), Terminal()
    display = make_display(out, err)
    assert isinstance(display, LiveDisplay)
    display.update(_status(), 0.0)
    display.show("stdout", "result")
    display.show("stderr", "[ps:0] line")
    display.close()
    assert out.getvalue() == "result\n"
    assert "worker:0 live step 3" in err.getvalue() and "[ps:0] line" in err.getvalue()


def test_a_terminal_with_fewer_rows_than_tasks_shows_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a job of fourteen tasks in twelve rows, neither its epoch nor what slows it was to be seen."""
    monkeypatch.setenv("LINES", "12")
    monkeypatch.setenv("TERM", "xterm")
    err = Terminal()
    display = make_display(io.StringIO(), err)
    display.update(_status(tasks=tuple(TaskState(f"worker:{index}", "live") for index in range(14))), 0.0)
    until(lambda: "worker:0 live" in err.getvalue(), err.getvalue)  # a thread draws it
    shown = err.getvalue()
    display.close()
    assert "epoch 1" in shown and "worker:0 live" in shown and "worker:13" not in shown, shown


def _job(tmp_path: Path, **options: Any) -> LocalJob:
    (tmp_path / "train.py").touch()
    return LocalJob(script=tmp_path / "train.py", args=("--epochs", "2"), **options)


def test_command_lines_of_a_cluster(tmp_path: Path) -> None:
    job = _job(tmp_path, num_workers=2, num_ps=1, staleness=0.0, num_threads=3)
    environ = {"PATH": "p", "RANK": "9", "TF_CONFIG": "old", "STRATAGEM_TASK": "x", "STRATAGEM_PEER_TIMEOUT_S": "5"}
    folders = RunFolders(tmp_path)
    chief = plan_launch(job, TaskId("chief", 0), folders, environ, 8)
    assert chief.command[1:5] == ("-P", "-m", "stratagem.cli", "chief")
    assert {"--num-workers=2", "--num-ps=1", "--bind=127.0.0.1:0", f"--state-dir={folders.journal}"} <= set(
        chief.command
    )
    assert "TF_CONFIG" not in chief.environ and "--no-checkpoints-stay" in chief.command
    kept = dataclasses.replace(job, checkpoint_dir=tmp_path)
    assert "--no-checkpoints-stay" not in plan_launch(kept, TaskId("chief", 0), folders, environ, 8).command
    worker = plan_launch(job, W1, folders, environ, 8, "127.0.0.1:5")
    assert {"--chief=127.0.0.1:5", "--task=worker:1"} <= set(worker.command)
    assert (worker.environ["STRATAGEM_STRATEGY"], worker.environ["STRATAGEM_STALENESS"]) == ("ps", "0.0")
    assert worker.command[-3:] == (str(tmp_path / "train.py"), "--epochs", "2")
    placement = placement_from_environment(worker.environ)
    assert placement == (ClusterSpec(("127.0.0.1:5",), ("127.0.0.1:0",) * 2, ("127.0.0.1:0",)), W1)
    assert (worker.environ["RANK"], worker.environ["OMP_NUM_THREADS"], worker.environ["PATH"]) == ("1", "3", "p")
    assert worker.environ["STRATAGEM_PEER_TIMEOUT_S"] == "5" and "STRATAGEM_TASK" not in worker.environ
    assert worker.environ["STRATAGEM_REPORT_FILE"] == str(folders.report(W1))
    ps = plan_launch(job, PS, folders, environ, 8, "127.0.0.1:5")
    assert f"--checkpoint-dir={folders.checkpoints}" in ps.command and "RANK" not in ps.environ
    over_tcp = dataclasses.replace(job, communication={"transport": "tcp"})
    assert all(
        "--transport=tcp" in plan_launch(over_tcp, task, folders, environ, 8, "h:5").command for task in (PS, W1)
    )


def test_a_chief_goes_by_the_flags_of_the_run_and_not_by_variables(tmp_path: Path) -> None:
    environ = {"STRATAGEM_MIN_WORKERS": "1", "STRATAGEM_MAX_WORKERS": "9"}
    chief = plan_launch(_job(tmp_path, num_workers=2), TaskId("chief", 0), RunFolders(tmp_path), environ, 8)
    assert {"--min-workers=0", "--max-workers=0"} <= set(chief.command)


def test_a_count_that_no_host_bears_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(500))
    check_size(5000, 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    check_size(60, 4)
    for counts in ((5000, 0, 0), (1, 5000, 0), (1, 0, 5000)):
        with pytest.raises(ConfigurationError, match="on this host with 2 cores: expected at most 64"):
            check_size(*counts)


def test_certificates_and_token_reach_every_process_by_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "certs").mkdir()
    folders = RunFolders(tmp_path / "run")
    environ = {"STRATAGEM_TLS": "elsewhere", "STRATAGEM_TOKEN_FILE": "elsewhere"}
    expected = {"auto": str(folders.certificates), "certs": str(tmp_path / "certs"), "": None}
    for tls, folder in expected.items():
        job = _job(tmp_path, num_workers=2, num_ps=1, tls=tls, token_file="token" if tls else "")
        for task in (TaskId("chief", 0), W1, PS):
            variables = plan_launch(job, task, folders, environ, 8, "127.0.0.1:5").environ
            assert variables.get("STRATAGEM_TLS") == folder
            assert variables.get("STRATAGEM_TOKEN_FILE") == (str(tmp_path / "token") if tls else None)
    with pytest.raises(ConfigurationError, match=r"takes a folder of certificates.*train\.py is neither"):
        _job(tmp_path, num_workers=2, tls=str(tmp_path / "train.py"))


def test_places_of_checkpoints_are_below_the_current_folder_or_what_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    roots = {}
    for said in ({}, {"checkpoint_roots": "a:/b"}):
        job = _job(tmp_path, num_workers=2, num_ps=1, **said)
        for task in (TaskId("chief", 0), PS):
            environ = {"STRATAGEM_CHECKPOINT_ROOTS": "elsewhere"}
            variables = plan_launch(job, task, RunFolders(tmp_path), environ, 8, "127.0.0.1:5").environ
            roots[task, len(said)] = variables["STRATAGEM_CHECKPOINT_ROOTS"]
    assert set(roots.values()) == {str(tmp_path), f"{tmp_path / 'a'}:/b"} and len(roots) == 4


@pytest.mark.parametrize(
    ("cores", "workers", "ps", "threads"), [(8, 2, 2, 2), (2, 2, 2, 1), (64, 3, 1, 16), (4, 1, 0, 4)]
)
def test_cores_are_shared(tmp_path: Path, cores: int, workers: int, ps: int, threads: int) -> None:
    job = _job(tmp_path, num_workers=workers, num_ps=ps)
    assert plan_launch(job, W0, RunFolders(tmp_path), {}, cores, "h:1").environ["OMP_NUM_THREADS"] == str(threads)


def test_a_script_alone_has_no_cluster(tmp_path: Path) -> None:
    job = _job(tmp_path, strategy="one")
    launch = plan_launch(job, W0, RunFolders(tmp_path), {"OMP_NUM_THREADS": "7", "PYTHONINSPECT": "1"}, 4)
    assert "PYTHONINSPECT" not in launch.environ, "no task ended: Python asked what to do"
    assert launch.command[-3:] == (str(tmp_path / "train.py"), "--epochs", "2")
    assert not any("--chief" in word for word in launch.command)
    assert (launch.environ["STRATAGEM_STRATEGY"], launch.environ["OMP_NUM_THREADS"]) == ("one", "7")
    assert launch.environ["STRATAGEM_NUM_THREADS"] == "7"
    assert "TF_CONFIG" not in launch.environ and job.servers == ()


def test_jobs_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no file nowhere\.py"):
        LocalJob(script=Path("nowhere.py"))
    (tmp_path / "__main__.py").touch()
    with pytest.raises(ConfigurationError, match=r"is a folder: give .*/__main__\.py"):
        LocalJob(script=tmp_path)
    with pytest.raises(ConfigurationError, match="--workers 0"):
        _job(tmp_path, num_workers=0)
    with pytest.raises(ClusterSpecError, match="the cluster has 2 ps"):
        _job(tmp_path, num_ps=2, strategy="one")


def test_summary_of_a_synchronous_job(tmp_path: Path) -> None:
    job = _job(tmp_path, num_workers=2, num_ps=1, staleness=0.0)
    status = _status(examples=90, tasks=(TaskState("ps:0", "live", step=9), TaskState("worker:0", "live", loss=0.1)))
    supervisor = Supervisor(job.workers, job.servers)
    reports: dict[TaskId, dict[str, Any]] = {
        W0: {"steps": 10, "examples": 50},
        W1: {"steps": 10, "examples": 50, "loss": 0.3},
    }
    summary = build_summary(job, supervisor, status, reports, 0, 1.23456, [])
    assert (summary["steps"], summary["examples"], summary["loss"]) == (10, 90, 0.3)  # 10 were computed twice
    assert json.loads(json.dumps(summary))["duration_s"] == 1.235
    assert build_summary(job, supervisor, StatusView(), {}, 1, 1.0, [])["loss"] is None
    assert math.isinf(LocalJob(script=job.script).staleness)


def test_summary_of_a_ring(tmp_path: Path) -> None:
    job = _job(tmp_path, num_workers=2)
    reports = {worker: {"steps": 10, "examples": 50} for worker in (W0, W1)}
    summary = build_summary(job, Supervisor(job.workers, job.servers), StatusView(), reports, 0, 1.0, [])
    assert (summary["strategy"], summary["steps"], summary["examples"]) == ("ring", 10, 100)


def test_a_summary_has_what_the_journal_says_of_the_last_second(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    journal.write("plan", dataset=1, plan=dataclasses.asdict(Plan(10, 4)))
    for units in ([[1, 0, 0], [1, 0, 1], [1, 0, 2]], [[1, 1, 2]]):  # an epoch, and a short last batch
        journal.write("accepted", units=units, oldest_step=0)
    journal.write("checkpoint", path="/c/step-00000004")
    journal.close()
    status, *_ = last_status(_status(examples=8, tasks=(TaskState("ps:0", "live", step=2),)), tmp_path)
    job = _job(tmp_path, num_ps=1)
    summary = build_summary(job, Supervisor(job.workers, job.servers), status, {W0: {"steps": 1}}, 0, 1.0, [])
    assert (summary["steps"], summary["examples"]) == (4, 12)


def test_the_steps_of_a_summary_are_those_of_workers_that_were_started_again_too(tmp_path: Path) -> None:
    """Of a script that updates at some batches only it said the updates, or what the last processes had made."""
    journal = Journal(str(tmp_path))
    journal.write("plan", dataset=1, plan=dataclasses.asdict(Plan(10, 1)))
    journal.write("accepted", units=[[1, 0, index] for index in range(10)], oldest_step=0)
    journal.close()
    status = _status(tasks=(TaskState("ps:0", "live", step=2),))
    for job, steps in ((_job(tmp_path, num_ps=1), 10), (_job(tmp_path, num_ps=1, staleness=0.0), 3)):
        told: Any = (status, {W0: {"steps": 3}}, 0, 1.0, [""], "", {}, last_status(status, tmp_path)[1])
        assert build_summary(job, Supervisor(job.workers, job.servers), *told)["steps"] == steps
    assert last_status(status, tmp_path / "none") == (status, 0, 0)


def test_a_summary_is_json_whatever_the_loss_is(tmp_path: Path) -> None:
    write_summary(tmp_path / "s.json", {"loss": math.nan, "metrics": {"best": -math.inf}, "steps": 3})
    found = json.loads((tmp_path / "s.json").read_text(), parse_constant=pytest.fail)
    assert found == {"loss": "nan", "metrics": {"best": "-inf"}, "steps": 3}


def test_a_summary_takes_no_place_of_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_summary(tmp_path / "pipe", {"steps": 3})
        assert json.loads(os.read(reading, 100)) == {"steps": 3}
    finally:
        os.close(reading)


def test_a_full_disk_costs_the_summary_and_is_said(tmp_path: Path) -> None:
    (tmp_path / "s.json.partial").symlink_to("/dev/full")
    job, shown = _job(tmp_path, summary=tmp_path / "s.json"), io.StringIO()
    launched = Launch((sys.executable, "-c", "print('trained')"), dict(os.environ))
    assert run_local(job, launch_for=lambda task, chief: launched, stdout=shown, stderr=shown) == 1
    assert f"the summary cannot be written to {tmp_path}/s.json: No space left on device" in shown.getvalue()
    assert "failed, exit code 1" in shown.getvalue() and list(tmp_path.iterdir()) == [tmp_path / "train.py"]


def test_failure_in_words() -> None:
    failure = Failure(W1, -9, "no restarts are left")
    assert failure_words(failure, []) == "worker:1 failed first (killed by SIGKILL; no restarts are left)"
    assert failure_words(failure, BLOCK).endswith("; its last lines:\n  ValueError: no")


def test_newest_checkpoint_is_a_complete_one(tmp_path: Path) -> None:
    assert newest(tmp_path / "nowhere") is None
    for name, complete in [("step-00000002", True), ("step-00000010", True), ("step-00000011", False)]:
        (tmp_path / name).mkdir()
        if complete:
            manifest = Manifest(step=int(name[5:]), files=())
            (tmp_path / name / "manifest.json").write_bytes(encode(manifest.content()))
    assert newest(tmp_path) == tmp_path / "step-00000010"


def test_a_task_that_is_much_later_than_usual_is_called_slow() -> None:
    task = TaskState("ps:0", "live", step=3, heartbeat_age_s=2.5, suspicion=3.5)
    assert task_words(task) == "ps:0 slow, silent 2.5 s step 3"
    assert task_words(dataclasses.replace(task, suspicion=2.5)) == "ps:0 live step 3"
    assert task_words(dataclasses.replace(task, state="lost")) == "ps:0 lost step 3"
    assert task_words(TaskState("chief:0", state="live")) == "chief:0 live"
