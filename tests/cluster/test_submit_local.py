"""`sg.run()` and `stratagem submit` on this machine: real jobs in the background, also from a notebook's kernel."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import forks
from tests.notebooks import EXECUTE, notebook_of
from tests.polling import until

DEADLINE_S = 240.0
ROOT = Path(__file__).parents[2]
TRAIN = """
import os
import sys
import torch
import stratagem as sg

{call}
print("job", job.id, job.target, "of", os.environ["STRATAGEM_JOB_ID"])
strategy = sg.strategy_from_environment()
with strategy.scope():
    model = torch.nn.Linear(2, 1)
model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
inputs = torch.arange(64.0).reshape(32, 2) / 64
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))


def step(batch):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.detach()


for batch in strategy.distribute_dataset(torch.utils.data.DataLoader(data, batch_size=8)):
    strategy.run(step, args=(batch,))
print("trained with", type(strategy).__name__, sys.argv[1:])
open(os.path.join(job.folder, "trained"), "w").close()
"""
STRATAGEM = [sys.executable, "-m", "stratagem.cli"]


@dataclasses.dataclass(frozen=True)
class Desk:
    """A folder with a project and the records of its jobs."""

    folder: Path
    environ: dict[str, str]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command in the project."""
        return forks.run(command, cwd=self.folder, env=self.environ, timeout=DEADLINE_S)

    def write(self, name: str, text: str) -> None:
        """Writes a file of the project."""
        (self.folder / name).write_text(text)

    def jobs(self) -> list[dict[str, Any]]:
        """What `stratagem jobs list` knows."""
        done = self.run(*STRATAGEM, "jobs", "list", "--json")
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def wait(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The only job, once it fulfils the condition."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition(job := self.jobs()[0]):
            assert time.monotonic() < deadline, (job, self.log(job["id"]))
            time.sleep(0.05)
        return job

    def record(self, job_id: str) -> Path:
        """The folder of a job."""
        return self.folder / "state" / "stratagem" / "jobs" / job_id

    def log(self, job_id: str) -> str:
        """What a job has written."""
        return (self.record(job_id) / "output.log").read_text()

    def pid(self, job_id: str) -> int:
        """Of the job's launcher."""
        return int((self.record(job_id) / "alive").read_text())


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("STRATAGEM_")}
    environ |= {"XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    desk = Desk(tmp_path, environ)
    yield desk
    for job in desk.jobs():
        if job["state"]["phase"] == "running":
            desk.run(*STRATAGEM, "jobs", "cancel", job["id"])


@pytest.mark.thorough
def test_a_script_that_calls_run_on_itself_trains_in_the_job_only(desk: Desk) -> None:
    call = 'job = sg.run(worker_count=2, entry_point_args=["--epochs", "1"], job_labels={"team": "vision"})'
    desk.write("train.py", TRAIN.format(call=call))
    caller = desk.run(sys.executable, "train.py")
    assert caller.returncode == 0, caller.stderr
    assert caller.stdout == ""  # the rest of the script did not run here
    job = desk.jobs()[0]
    followed = desk.run(*STRATAGEM, "jobs", "logs", "--follow", job["id"])
    assert followed.returncode == 0, followed.stdout
    assert f"job {job['id']} local of {job['id']}" in followed.stdout
    assert "trained with MultiWorkerMirroredStrategy ['--epochs', '1']" in followed.stdout
    after = desk.jobs()
    assert len(after) == 1  # the script called run() again in the job, twice
    assert after[0]["state"] == {"phase": "succeeded", "exit_code": 0, "detail": ""}
    assert after[0]["labels"] == {"team": "vision"}
    assert (desk.record(job["id"]) / "trained").exists()
    assert desk.run(*STRATAGEM, "jobs", "remove", job["id"]).returncode == 0
    assert desk.jobs() == []


def test_submit_prints_the_id_and_the_exit_code_of_the_script_is_kept(desk: Desk) -> None:
    desk.write("broken.py", "import sys\nprint('before', sys.argv[1:], flush=True)\nsys.exit(42)\n")
    submitted = desk.run(*STRATAGEM, "submit", "--label", "team=a", "broken.py", "--lr", "1")
    assert submitted.returncode == 0, submitted.stderr
    job_id = submitted.stdout.strip()
    streamed = desk.run(*STRATAGEM, "jobs", "logs", "--follow", job_id)
    assert streamed.returncode == 42 and "before ['--lr', '1']" in streamed.stdout
    job = desk.jobs()[0]
    assert (job["id"], job["state"]["phase"], job["state"]["exit_code"]) == (job_id, "failed", 42)
    table = desk.run(*STRATAGEM, "jobs", "list", "--label", "team=a").stdout
    assert job_id in table and "failed" in table and "42" in table and "broken.py --lr 1" in table
    assert job_id not in desk.run(*STRATAGEM, "jobs", "list", "--label", "team=b").stdout
    nearest = desk.run(*STRATAGEM, "jobs", "logs", job_id[:-1])
    assert nearest.returncode == 2 and f"did you mean '{job_id}'" in nearest.stderr


WAITS = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a script of ours would end its step and save, up to 20 s
pathlib.Path("started").write_text(str(os.getpid()))
while True:
    time.sleep(0.05)
"""


def start_waiting(desk: Desk) -> dict[str, Any]:
    """A job whose script runs and does not end by itself."""
    desk.write("wait.py", WAITS)
    submitted = desk.run(*STRATAGEM, "submit", "wait.py")
    assert submitted.returncode == 0, submitted.stderr
    until((desk.folder / "started").exists, lambda: desk.log(submitted.stdout.strip()), DEADLINE_S)
    job = desk.jobs()[0]
    assert job["state"]["phase"] == "running"
    return job


def is_gone(pid: int) -> bool:
    """Whether a process has ended; nobody may have reaped it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.thorough
def test_cancel_ends_the_job_and_all_its_processes(desk: Desk) -> None:
    job = start_waiting(desk)
    refused = desk.run(*STRATAGEM, "jobs", "remove", job["id"])
    assert refused.returncode == 2 and "jobs cancel" in refused.stderr
    cancelled = desk.run(*STRATAGEM, "jobs", "cancel", job["id"])
    assert cancelled.returncode == 0 and "cancelled, exit code 143" in cancelled.stderr
    assert desk.jobs()[0]["state"]["phase"] == "cancelled"
    assert is_gone(int((desk.folder / "started").read_text()))
    again = desk.run(*STRATAGEM, "jobs", "cancel", job["id"])
    assert again.returncode == 0 and "cancelled" in again.stderr


@pytest.mark.thorough
def test_a_killed_launcher_is_noticed_though_it_wrote_nothing(desk: Desk) -> None:
    job = start_waiting(desk)
    script = int((desk.folder / "started").read_text())
    os.kill(desk.pid(job["id"]), signal.SIGKILL)
    state = desk.wait(lambda job: job["state"]["phase"] != "running")["state"]
    assert state == {"phase": "failed", "exit_code": None, "detail": "its launcher was killed"}
    until(lambda: is_gone(script), deadline_s=DEADLINE_S)


def test_a_dry_run_shows_everything_and_does_nothing(desk: Desk) -> None:
    desk.write("wait.py", WAITS)
    desk.write("requirements.txt", "torchmetrics\n")
    options = ["--target", "compose", "--workers", "2", "--ps", "1", "--requirements", "requirements.txt"]
    shown = desk.run(*STRATAGEM, "submit", "--dry-run", *options, "--base-image", "base:1", "wait.py", "--cost", "$5")
    assert shown.returncode == 0, shown.stderr
    for words in ("FROM base:1", "--requirement /tmp/requirements.txt", "context: 2 files", "ps-0:", "$$5"):
        assert words in shown.stdout, shown.stdout
    assert desk.jobs() == [] and not (desk.folder / "started").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--target", "kubernetes", "wait.py"], "needs docker_image_bucket_name (--registry)"),
        (["--chief-config", "T4", "wait.py"], "one by name, got 'T4'"),
        (["--label", "team", "wait.py"], "expected --label KEY=VALUE"),
        (["nowhere.py"], "no file nowhere.py"),
        (["--target", "compose", "../wait.py"], "to be in the working directory"),
        (["--requirements", "needs.txt", "wait.py"], "lacks no-such-package-of-ours"),
    ],
)
def test_what_cannot_work_is_refused_with_exit_code_2(desk: Desk, options: list[str], words: str) -> None:
    desk.write("wait.py", WAITS)
    (desk.folder.parent / "wait.py").write_text(WAITS)
    desk.write("needs.txt", "# comment\ntorch>=2\nno-such-package-of-ours\n")
    refused = desk.run(*STRATAGEM, "submit", *options)
    assert refused.returncode == 2 and words in " ".join(refused.stderr.split()), refused.stderr
    assert desk.jobs() == []


SWEEP = """
import stratagem as sg

jobs = [sg.run("train.py", entry_point_args=[rate]) for rate in ("0", "3")]
ends = [jobs[0].wait(), jobs[1].wait(stream_logs=True)]
print([end.exit_code for end in ends], [job.state().phase for job in jobs], repr(jobs[0].logs().splitlines()[0]))
long = sg.run("long.py")
print(long.state().phase)
long.cancel()
print(long.wait().phase)
for job in (*jobs, long):
    job.remove()
try:
    long.state()
except sg.ConfigurationError as error:
    print("refused:", str(error)[:11])
"""


@pytest.mark.thorough
def test_the_jobs_of_a_sweep_are_waited_for_read_and_ended_by_the_script_that_submits_them(desk: Desk) -> None:
    # What a notebook calls after run() is part of the job's script, too.
    asks = (
        "import stratagem as sg\njob = sg.run()\nassert job.wait() == job.state() == job.cancel() and not job.logs()\n"
    )
    desk.write("train.py", f"{asks}import sys\nprint('rate', sys.argv[1], flush=True)\nsys.exit(int(sys.argv[1]))\n")
    desk.write("long.py", "import time\ntime.sleep(600)\n")
    desk.write("sweep.py", SWEEP)
    swept = desk.run(sys.executable, "sweep.py")
    assert swept.returncode == 0, swept.stderr
    lines = swept.stdout.splitlines()
    assert "rate 3" in lines[0], lines
    assert lines[-4:] == [
        "[0, 3] ['succeeded', 'failed'] 'rate 0'",
        *("running", "cancelled"),
        "refused: unknown job",
    ]
    assert desk.jobs() == []


def test_who_stops_looking_at_the_log_is_told_what_ends_the_job(desk: Desk) -> None:
    desk.write("long.py", "import time\nprint('began', flush=True)\ntime.sleep(600)\n")
    command = [*STRATAGEM, "submit", "--stream-logs", "long.py"]
    options = {"cwd": desk.folder, "env": desk.environ, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with forks.Popen(command, **options) as looking:
        try:
            assert looking.stdout is not None
            while "began" not in (line := looking.stdout.readline()):
                assert line, desk.log(desk.jobs()[0]["id"])
            looking.send_signal(signal.SIGINT)
            _, told = looking.communicate(timeout=DEADLINE_S)
        finally:
            looking.kill()
    job = desk.jobs()[0]
    assert f"the job goes on; what ends it: stratagem jobs cancel {job['id']}" in told, told
    assert job["state"]["phase"] == "running"


@pytest.mark.thorough
def test_from_a_cell_of_a_running_kernel(desk: Desk) -> None:
    executed = desk.run(sys.executable, "-c", EXECUTE, str(ROOT / "examples" / "submit.ipynb"), "90")
    assert executed.returncode == 0, executed.stderr
    assert "took all 4 cells that this kernel has executed so far" in executed.stdout
    assert "accuracy" not in executed.stdout  # nothing was trained in the kernel
    job = desk.jobs()[0]
    assert f"stratagem jobs logs --follow {job['id']}" in executed.stdout
    followed = desk.run(*STRATAGEM, "jobs", "logs", "--follow", job["id"])
    log = followed.stdout
    assert followed.returncode == 0, log
    assert f" on {job['id']}" in log and "accuracy 0." in log
    assert len(desk.jobs()) == 1  # run() was called in the job too, by each worker
    script = (desk.record(job["id"]) / "notebook_cells.py").read_text()
    assert "_subprocess.run(['python', '--version'], check=True)" in script


@pytest.mark.thorough
def test_a_notebook_file_with_modules_beside_it(desk: Desk) -> None:
    desk.write("beside.py", "WORD = 'beside'\n")
    desk.write("work.ipynb", notebook_of("import beside\nprint('found', beside.WORD)"))
    done = desk.run(*STRATAGEM, "submit", "--stream-logs", "work.ipynb")
    assert done.returncode == 0 and "found beside" in done.stdout, done.stdout + done.stderr
