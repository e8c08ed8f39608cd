"""What the user did wrong is said in one paragraph, the other processes end within seconds, nothing is left behind."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import forks

Start = Callable[..., Any]


def script(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text(
        "import torch, stratagem as sg\n"
        "strategy = sg.strategy_from_environment()\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n" + body
    )
    return path


def check_words(stderr: str, *words: str) -> None:
    for word in words:
        assert word in stderr, f"{word!r} not in:\n{stderr}"


def test_a_script_that_raises(cluster: Start, tmp_path: Path) -> None:
    done = cluster(2, 1, script(tmp_path, "def broken():\n    return 1 / 0\nbroken()\n")).finish()
    assert done.code == 1
    check_words(done.stderr, "ZeroDivisionError: division by zero", "in broken", "failed first")
    assert "runpy" not in done.stderr
    assert done.summary["restarts"] == 0  # it never made a step: starting it again would not help
    assert done.summary["first_failure"]["task"].startswith("worker:")
    assert done.stderr.index("Traceback") < done.stderr.index("failed first")


RAISES_ONCE = """
import os, sys
model, optimizer = strategy.prepare(model, optimizer)
def step(batch):
    model(batch).sum().backward()
    optimizer.step()
    if not os.path.exists(sys.argv[1]):
        open(sys.argv[1], "w").close()
        raise OSError("after the step")
for batch in strategy.distribute_dataset(torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)):
    strategy.run(step, args=(batch,))
"""


def test_a_script_that_raises_right_after_its_first_step_is_started_again(cluster: Start, tmp_path: Path) -> None:
    done = cluster(1, 1, script(tmp_path, RAISES_ONCE), str(tmp_path / "raised")).succeed()
    assert done.summary["restarts"] == 1


PARTS = """
import sys
try:
    if str(strategy.task) == "worker:1":
        raise MemoryError("no room") if sys.argv[1] == "1" else SystemExit(int(sys.argv[1]))
    while True:
        strategy.reduce("SUM", torch.ones(2))
except sg.CollectiveError as error:
    raise RuntimeError("what a script says that watches its ring") from error
"""


@pytest.mark.parametrize(
    ("code", "num_ps"), [(42, 0), *(pytest.param(*each, marks=pytest.mark.thorough) for each in [(1, 0), (42, 1)])]
)
def test_who_failed_first_is_named_and_its_exit_code_is_the_jobs(
    cluster: Start, tmp_path: Path, code: int, num_ps: int
) -> None:
    done = cluster(2, num_ps, script(tmp_path, PARTS), str(code)).finish()
    assert done.code == code
    assert done.summary["first_failure"]["task"] == "worker:1", done.stderr


def test_a_script_without_a_strategy_is_told_and_keeps_nobody_waiting(cluster: Start, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("print('only this')\n")
    done = cluster(1, 1, path).succeed()
    check_words(
        done.stderr, "ended without making its cluster", "sg.strategy_from_environment()", "every worker has fin"
    )


def test_workers_with_a_strategy_of_one_process_are_told_at_their_first_step(cluster: Start, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "import torch, stratagem as sg\n"
        "strategy, model = sg.OneDeviceStrategy(), torch.nn.Linear(2, 1)\n"
        "model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))\n"
        "strategy.run(lambda: (model(torch.ones(1, 2)).sum().backward(), optimizer.step()))\n"
    )
    done = cluster(2, 0, path).succeed()
    check_words(done.stderr, "this job has 2 workers, and the strategy", "is of one process", "ended without making")


@pytest.mark.parametrize("code", [0, pytest.param(5, marks=pytest.mark.thorough)])
def test_a_script_that_leaves_at_once_says_goodbye(cluster: Start, tmp_path: Path, code: int) -> None:
    body = f"import os\nstrategy.prepare(model, optimizer)\nif not os.fork():\n    os._exit(7)\nos._exit({code})\n"
    done = cluster(1, 1, script(tmp_path, body), flags=("--max-restarts", "0")).finish()
    assert done.code == code, done.stderr
    check_words(done.stderr, f"worker:0 said goodbye with exit code {code}", f"left by os._exit({code})" * bool(code))


@pytest.mark.parametrize("num_ps", [1, pytest.param(0, marks=pytest.mark.thorough)])
def test_a_worker_that_leaves_with_0_in_mid_script_has_failed(cluster: Start, tmp_path: Path, num_ps: int) -> None:
    body = "strategy.prepare(model, optimizer)\nimport ctypes\nctypes.CDLL(None)._exit(0)\n"  # as a library may
    done = cluster(1, num_ps, script(tmp_path, body), flags=("--strategy", "ps" if num_ps else "ring")).finish()
    assert done.code == 1
    check_words(done.stderr, "worker:0 exited with code 0 in the middle of its script", "worker:0 failed first")
    assert done.summary["first_failure"]["task"] == "worker:0"


FORKS = """
import os, sys
strategy.prepare(model, optimizer)
data = strategy.distribute_dataset([torch.ones(4, 2)] if sys.argv[1] == "ring" else torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=4))
for batch in data:
    if not (child := os.fork()):
        sys.exit(0)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("num_ps", [1, pytest.param(0, marks=pytest.mark.thorough)])
def test_what_a_script_forks_leaves_by_itself(cluster: Start, tmp_path: Path, num_ps: int) -> None:
    name = "ps" if num_ps else "ring"
    done = cluster(1, num_ps, script(tmp_path, FORKS), name, flags=("--strategy", name)).finish()
    assert done.code == 0 and "child 0" in done.stdout, done.stderr


@pytest.mark.parametrize("num_ps", [1, pytest.param(0, marks=pytest.mark.thorough)])
def test_a_second_strategy_in_a_process_is_refused(cluster: Start, tmp_path: Path, num_ps: int) -> None:
    done = cluster(
        1,
        num_ps,
        script(tmp_path, "another = sg.strategy_from_environment()\n"),
        flags=("--strategy", "ps" if num_ps else "ring"),
    ).finish()
    assert done.code != 0
    check_words(done.stderr, "has joined the cluster as worker:0 already", "make one strategy")
    assert "Traceback" not in done.stderr


@pytest.mark.thorough
def test_a_process_that_reads_data_does_not_join_in_the_place_of_its_worker(cluster: Start, tmp_path: Path) -> None:
    """Its worker was fenced: "a new process joined in its place"."""
    body = (
        "data = torch.utils.data.TensorDataset(torch.ones(8, 2))\n"
        "loader = torch.utils.data.DataLoader(data, 4, num_workers=1, multiprocessing_context='spawn')\n"
        "next(iter(loader))\n"
    )
    done = cluster(1, 0, script(tmp_path, body), flags=("--strategy", "ring")).finish()
    assert done.code == 1
    check_words(done.stderr, "in the place of worker:0", 'put if __name__ == "__main__": before')
    assert "a new process joined" not in done.stderr


@pytest.mark.thorough
def test_an_optimizer_that_the_ps_cannot_run(cluster: Start, tmp_path: Path) -> None:
    body = "optimizer = torch.optim.LBFGS(model.parameters())\nstrategy.prepare(model, optimizer)\n"
    done = cluster(1, 1, script(tmp_path, body)).finish()
    assert done.code == 2
    check_words(done.stderr, "UnsupportedOptimizerError", "LBFGS", "Adam")
    assert "Traceback" not in done.stderr


NO_LOSS = """
model, optimizer = strategy.prepare(model, optimizer)
for batch in strategy.distribute_dataset(torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)):
    torch.zeros((), requires_grad=True).backward()
    optimizer.step()
"""


@pytest.mark.thorough
def test_a_slice_without_a_loss_at_staleness_0(cluster: Start, tmp_path: Path) -> None:
    """It was told to call optimizer.step(), which it did: there was no gradient."""
    done = cluster(1, 1, script(tmp_path, NO_LOSS), flags=["--staleness", "0"]).finish()
    assert done.code == 2, done.stderr
    check_words(done.stderr, "Where a slice has no loss, that of (model(torch.zeros_like(x)) * 0).sum() is one")


SCALES = """
model, optimizer, scaler = strategy.prepare(model, optimizer, torch.amp.GradScaler("cpu", enabled=False))
scaler.scale(model(torch.ones(1, 2)).sum()).backward()
scaler.unscale_(optimizer)
scaler.step(optimizer)
scaler.update()
scaler = torch.amp.GradScaler("cpu")
scaler.scale(model(torch.ones(1, 2)).sum()).backward()
scaler.unscale_(optimizer)
scaler.step(optimizer)
"""


@pytest.mark.thorough
def test_a_scaler_that_was_not_prepared_is_refused(cluster: Start, tmp_path: Path) -> None:
    """What had left during backward, of parameters of some kilobytes, was applied as scaled."""
    done = cluster(1, 1, script(tmp_path, SCALES)).finish()
    assert done.code == 2, done.stderr
    check_words(done.stderr, "a GradScaler cannot be used with parameter servers: gradients leave during backward")
    check_words(done.stderr, "make it GradScaler(enabled=False)", "script.py:14, in")


@pytest.mark.parametrize("by_rank", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_data_that_a_script_cuts_by_rank_beside_parameter_servers(
    cluster: Start, tmp_path: Path, by_rank: bool
) -> None:
    """Each batch is made of what the worker holds that trains it: examples were left out without a word."""
    part = "torch.arange(8.0)[strategy.task.index::2]" if by_rank else "torch.arange(4.0)"
    body = f"list(strategy.distribute_dataset(torch.utils.data.DataLoader({part}.view(4, 1), batch_size=2)))\n"
    done = cluster(2, 1, script(tmp_path, "strategy.prepare(model, optimizer)\n" + body)).succeed()
    assert ("other examples in dataset 1" in done.stderr) == by_rank


STATE_ELSEWHERE = """
optimizer = torch.optim.Adam(model.parameters())
model, optimizer = strategy.prepare(model, optimizer)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
state = optimizer.state_dict()["state"][0]
assert type(state) is dict and state["exp_avg"].abs().min() > 0
optimizer.state[model.weight]["exp_avg"]
"""


@pytest.mark.thorough
def test_state_of_an_optimizer_that_is_on_the_ps_says_so(cluster: Start, tmp_path: Path) -> None:
    done = cluster(1, 1, script(tmp_path, STATE_ELSEWHERE)).finish()
    assert done.code == 2, done.stderr
    check_words(done.stderr, "['exp_avg'] is on the parameter servers: optimizer.state_dict() fetches")


def test_workers_with_different_models(cluster: Start, tmp_path: Path) -> None:
    body = (
        "if str(strategy.task) == 'worker:1':\n"
        "    model = torch.nn.Linear(3, 1)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "strategy.prepare(model, optimizer)\n"
    )
    done = cluster(2, 1, script(tmp_path, body)).finish()
    assert done.code == 1
    check_words(done.stderr, "VariableError", "weight", "[1, 3]", "[1, 2]")


def test_asynchronous_workers_that_ask_otherwise_of_prepare(cluster: Start, tmp_path: Path) -> None:
    """The gradients of one were clipped, and those of the other not."""
    body = "strategy.prepare(model, optimizer, clip_norm=1.0 if strategy.is_lead else None)\nstrategy.barrier()\n"
    done = cluster(2, 1, script(tmp_path, body)).finish()
    assert done.code == 2, done.stderr
    check_words(done.stderr, "worker:0", "clip_norm=1.0", "worker:1", "clip_norm=None", "must prepare the same")
    assert "Traceback" not in done.stderr


COMPRESSED = """
import os
os.environ["STRATAGEM_COMPRESSION"] = "bf16" if os.environ["STRATAGEM_TASK"] == "worker:0" else "fp16"
import torch, stratagem as sg
strategy = sg.MultiWorkerMirroredStrategy()
strategy.prepare(torch.nn.Linear(2, 1))
"""


@pytest.mark.thorough
def test_workers_of_a_ring_that_compress_otherwise(cluster: Start, tmp_path: Path) -> None:
    """They heard that ranks make other calls: one had perhaps left its loop early."""
    path = tmp_path / "script.py"
    path.write_text(COMPRESSED)
    done = cluster(2, 0, path).finish()
    assert done.code == 2, done.stderr
    check_words(done.stderr, "rank 0 has", "compression bf16, rank 1 has", "compression fp16")
    assert "Traceback" not in done.stderr


ONE_MORE = """
import os, sys, time
if not strategy.is_lead:
    optimizer.param_groups[0]["momentum"] = 0.5
strategy.prepare(model, optimizer)
while strategy.is_lead and not os.path.exists(sys.argv[1]):
    strategy._runtime.session.raise_if_stopped(), time.sleep(0.05)
strategy.prepare(torch.nn.Linear(3, 1))
"""


@pytest.mark.thorough
def test_a_worker_that_prepares_more_than_the_lead_says_what_it_waits_for(cluster: Start, tmp_path: Path) -> None:
    job = cluster(2, 1, script(tmp_path, ONE_MORE), tmp_path / "go")
    job.wait_for(lambda: "until worker:0 gives ps:0 its values of 2 variables" in job.stderr, "a word")
    (tmp_path / "go").touch()
    done = job.succeed()
    check_words(done.stderr, "'momentum': 0,", "'momentum': 0.5,", "each update uses the settings of its own worker")


PREPARES_ALONE = """
model, optimizer = strategy.prepare(model, optimizer)
def step(batch):
    model(batch).sum().backward()
    optimizer.step()
for number, batch in enumerate(strategy.distribute_dataset(torch.utils.data.DataLoader(torch.ones(8, 2), 2))):
    strategy.run(step, args=(batch,))
    if not number and not strategy.is_lead:
        strategy.prepare(torch.nn.Linear(3, 1))
"""


@pytest.mark.thorough
def test_staleness_0_a_worker_alone_in_a_further_prepare_ends_the_job(cluster: Start, tmp_path: Path) -> None:
    """It waited 300 s for values that the lead, which waited for its part of the next step, never gave."""
    done = cluster(2, 1, script(tmp_path, PREPARES_ALONE), flags=["--staleness", "0"]).finish()
    assert done.code == 2, done.stderr
    check_words(done.stderr, "worker:1 waits for worker:0 to come to further prepare 1", "prepare()")


@pytest.mark.parametrize("policy", ["error", pytest.param("skip", marks=pytest.mark.thorough)])
def test_non_finite_gradients(cluster: Start, tmp_path: Path, policy: str) -> None:
    arguments = ["--poison-step", 3, "--nan", policy, "--epochs", 2]
    done = cluster(1, 2, "train_small.py", *arguments, flags=["--max-restarts", "0"]).finish()
    if policy == "error":
        assert done.code == 1
        check_words(done.stderr, "NonFiniteGradientError", "body.2.weight", 'nan="skip"', "train_small.py")
        assert "Traceback" not in done.stderr
    else:
        assert done.code == 0, done.stderr
        check_words(done.stderr, "skipped an update", "1 so far")


@pytest.mark.thorough
def test_synchronous_nan_is_skipped_by_all(cluster: Start, tmp_path: Path) -> None:
    arguments = ["--poison-step", 3, "--nan", "skip", "--epochs", 2]
    done = cluster(2, 2, "train_small.py", *arguments, flags=["--staleness", "0"]).succeed()
    assert done.stderr.count("skipped an update") == 2


def test_a_missing_script(cluster: Start, tmp_path: Path) -> None:
    done = cluster(1, 1, tmp_path / "nowhere.py").finish()
    assert done.code == 2
    check_words(done.stderr, "nowhere.py")
    assert "Traceback" not in done.stderr


MODULE = """
import sys
from .model import make
if __name__ == "__main__":
    strategy = sg.strategy_from_environment() if not sg.is_evaluator() else None
    print(sys.argv[0].rpartition("/")[2], sys.argv[1:], __spec__.name, make(), file=sys.stderr)
"""


@pytest.mark.thorough
def test_a_module_in_the_place_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "model.py").write_text("def make():\n    return 'made'\n")
    (tmp_path / "package" / "train.py").write_text("import stratagem as sg\n" + MODULE)
    run = [sys.executable, "-m", "stratagem.cli", "run", "--workers", "2", "--evaluator", "-m"]
    done = forks.run([*run, "package.train", "-m", "1"], timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for task in ("worker:0", "worker:1", "evaluator:0"):
        assert f"[{task}] train.py ['-m', '1'] package.train made" in done.stderr, done.stderr
    done = forks.run([*run, "package.nowhere"], timeout=120, cwd=tmp_path)
    assert done.returncode == 2 and "no package.nowhere: the current folder is" in done.stderr
    assert "runpy" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_interrupted_jobs_leave_no_process(cluster: Start, number: signal.Signals) -> None:
    job = cluster(2, 2, "count_examples.py", "--epochs", 1000, "--pause-s", 0.01)
    job.wait_for(lambda: "/15" in job.stderr, "training to begin")  # "units 7/15": an epoch has 15
    processes = job.processes()
    assert len(processes) >= 6
    os.kill(job.process.pid, number)
    done = job.finish()
    assert done.code == 128 + number
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


def test_a_killed_launcher_takes_its_processes_along(cluster: Start) -> None:
    job = cluster(2, 2, "count_examples.py", "--epochs", 1000, "--pause-s", 0.01)
    job.wait_for(lambda: "Cluster is ready" in job.stderr, "the cluster")
    processes = job.processes()
    assert len(processes) >= 6
    os.kill(job.process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


@pytest.mark.parametrize("who", ["==", pytest.param("!=", marks=pytest.mark.thorough)])
def test_a_barrier_where_another_worker_loads(cluster: Start, tmp_path: Path, who: str) -> None:
    """It passed, and what the other one loaded had no effect."""
    body = (
        "strategy.prepare(model, optimizer)\n"
        f"if str(strategy.task) {who} 'worker:0':\n"
        "    strategy.barrier()\n"
        "else:\n"
        "    strategy.load_once(lambda: torch.nn.init.ones_(model.weight))\n"
        "strategy.barrier()\n"
    )
    done = cluster(2, 1, script(tmp_path, body)).finish()
    assert done.code == 2, done.stderr
    check_words(done.stderr, "this worker calls barrier() where another one calls load_once()")
