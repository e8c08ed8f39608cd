"""The same script without the launcher: `python train.py` in every task, with TF_CONFIG, with and without a chief."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from stratagem import latest_checkpoint
from stratagem.rpc.binding import free_port
from tests import forks
from tests.cluster.test_exactly_once import check_counts
from tests.cluster.test_synchronous import check_equal, one_process

SCRIPTS = Path(__file__).parent / "scripts"


def free_addresses(count: int, host: str = "127.0.0.1") -> list[str]:
    """TF_CONFIG names ports, so somebody must choose them."""
    return [f"{host}:{free_port(host.strip('[]'))}" for _ in range(count)]


def start(
    cluster: dict[str, list[str]], task_type: str, index: int, *arguments: object, script: str = "count_examples.py"
) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": task_type, "index": index}}),
        "PYTHONPATH": str(SCRIPTS.parents[2]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    return forks.Popen(command, env=environment, stderr=subprocess.PIPE)


@pytest.mark.parametrize("with_chief", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_python_train_py_in_every_task(
    tasks: list[subprocess.Popen[str]], tmp_path: Path, with_chief: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kept := tmp_path / "kept").mkdir()
    monkeypatch.setenv("STRATAGEM_CHECKPOINT_DIR", str(kept))
    addresses = free_addresses(4)
    cluster = {"worker": addresses[:2], "ps": addresses[2:3]} | ({"chief": addresses[3:]} if with_chief else {})
    out = tmp_path / "out.pt"
    roles = [("ps", 0), ("worker", 1), ("worker", 0), *([("chief", 0)] if with_chief else [])]
    tasks.extend(start(cluster, role, index, "--out", out) for role, index in roles)
    errors = [task.communicate(timeout=240)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0] * len(tasks), "\n".join(errors)
    check_counts(out, 2)
    assert ("started one at" in errors[2]) is not with_chief
    assert not list(kept.glob("leaves-*")), (
        "a ps of the next job that comes before its chief would take the end for its own"
    )


def test_a_ps_whose_script_makes_a_ring_says_so(tasks: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    """Its workers had failed at once, and the chief that it waited for with them."""
    (tmp_path / "train.py").write_text("import stratagem as sg\nsg.MultiWorkerMirroredStrategy()\n")
    workers, ps = free_addresses(1), free_addresses(1)
    tasks.append(start({"worker": workers, "ps": ps}, "ps", 0, script=str(tmp_path / "train.py")))
    assert "the cluster has 1 ps; use ParameterServerStrategy" in tasks[0].communicate(timeout=60)[1]
    assert tasks[0].returncode == 1


@pytest.mark.thorough
def test_a_worker_that_is_killed_as_it_ends_finds_that_the_job_is_over(
    tasks: list[subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chief had heard its goodbye and ended: started again, it waited for another one."""
    (tmp_path / "train.py").write_text(
        "import atexit, os, signal, stratagem as sg\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGKILL)\n"
        "sg.MultiWorkerMirroredStrategy()\n"
    )
    monkeypatch.setenv("STRATAGEM_CHECKPOINT_DIR", str(tmp_path))
    cluster = {"worker": free_addresses(1)}
    tasks.append(start(cluster, "worker", 0, script=str(tmp_path / "train.py")))
    _, errors = tasks[0].communicate(timeout=240)
    assert tasks[0].returncode == -signal.SIGKILL, errors

    (tmp_path / "leaves-worker-0").rename(tmp_path / "leaves-worker-1")  # of a cluster whose chief it does not start
    (tmp_path / "train.py").write_text("import stratagem as sg\nsg.strategy_from_environment()\n")
    cluster = {"chief": free_addresses(1), "worker": free_addresses(2)}
    tasks.append(start(cluster, "worker", 1, script=str(tmp_path / "train.py")))
    _, errors = tasks[1].communicate(timeout=240)
    assert tasks[1].returncode == 0, errors
    assert "worker:1: its script is done" in errors and "Traceback" not in errors


def torchrun(script: str, *arguments: object, flags: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Two ranks. Its agent keeps a store at MASTER_PORT, where worker 0's chief would have served."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *flags]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS.parents[2]), "OMP_NUM_THREADS": "1"}
    return forks.run([*command, str(SCRIPTS / script), *map(str, arguments)], env=environment, timeout=240)


@pytest.mark.thorough
def test_torchrun(tmp_path: Path) -> None:
    out = tmp_path / "ring.pt"
    done = torchrun("train_small.py", "--optimizer", "momentum", "--out", out)
    assert done.returncode == 0, done.stderr
    check_equal(one_process(tmp_path, "--optimizer", "momentum"), out)


@pytest.mark.thorough
def test_torchrun_starts_its_ranks_again(tmp_path: Path) -> None:
    """The store still has the addresses of their first start."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, stratagem as sg\n"
        "strategy = sg.strategy_from_environment()\n"
        "assert strategy.num_replicas_in_sync == 2\n"
        "assert os.environ['TORCHELASTIC_RESTART_COUNT'] == '1', 'the first start'\n"
    )
    done = torchrun(str(script), flags=["--max-restarts", "1"])
    assert done.returncode == 0 and "the first start" in done.stderr, done.stderr


@pytest.mark.thorough
def test_a_chief_that_cannot_serve_is_not_waited_for(tasks: list[subprocess.Popen[str]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        task = start({"worker": [f"127.0.0.1:{port}", "127.0.0.1:0"]}, "worker", 0)
        tasks.append(task)
        _, error = task.communicate(timeout=120)
    assert task.returncode == 1 and "the chief that this worker started ended with exit code 2" in error
    assert f"cannot listen on 127.0.0.1:{port}: the port is in use" in error


def test_a_chief_serves_one_worker_too(tasks: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    """As TensorFlow has it, both run the script; each trained a model of its own, and wrote it to the same place."""
    chief, worker = free_addresses(2)
    out = tmp_path / "ring.pt"
    for role in ("chief", "worker"):
        cluster = {"chief": [chief], "worker": [worker]}
        tasks.append(start(cluster, role, 0, "--optimizer", "momentum", "--out", out, script="train_small.py"))
    errors = [task.communicate(timeout=120)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], "\n".join(errors)
    assert "the chief is not a replica: the cluster trains with 1 workers" in errors[0]
    check_equal(one_process(tmp_path, "--optimizer", "momentum"), out)


def test_a_failed_worker_that_had_started_the_chief_is_named(
    tasks: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, time, stratagem as sg\n"
        "strategy = sg.strategy_from_environment()\n"
        "if '--fail' in sys.argv: raise ValueError('bad data')\n"
        "while True: time.sleep(0.05), strategy._runtime.session.raise_if_stopped()\n"
    )
    addresses = free_addresses(3)
    cluster = {"worker": addresses[:2], "ps": addresses[2:]}
    tasks.extend(start(cluster, role, index, script=str(script)) for role, index in (("ps", 0), ("worker", 1)))
    tasks.append(start(cluster, "worker", 0, "--fail", script=str(script)))
    errors = [task.communicate(timeout=120)[1] for task in tasks]
    for said in errors[:2]:
        assert "the worker that started the chief has ended; first failure: worker:0: ValueError: bad data" in said
    assert "SIGTERM" not in "".join(errors)


def test_one_address_in_two_spellings_is_told_from_a_chief(tasks: list[subprocess.Popen[str]]) -> None:
    [address] = free_addresses(1)
    tasks.append(start({"worker": [address.replace("127.0.0.1", "localhost"), address]}, "worker", 1))
    error = tasks[0].communicate(timeout=120)[1]
    assert "something other than chief answers at its address" in error and "check the addresses" in error


@pytest.mark.thorough
def test_the_chief_and_the_ps_of_an_estimator_know_where_it_saves(
    tasks: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    """No flag and no variable says it: they run the same script."""
    addresses = free_addresses(3)
    cluster = {"chief": addresses[:1], "worker": addresses[1:2], "ps": addresses[2:]}
    model_dir = tmp_path / "model"
    arguments = ("--model-dir", model_dir, "--max-steps", 4)
    tasks.extend(start(cluster, role, 0, *arguments, script="estimate.py") for role in cluster)
    errors = [task.communicate(timeout=120)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0] * 3, "\n".join(errors)
    assert str(latest_checkpoint(model_dir)).endswith("-00000004")
    assert not list(model_dir.glob("leaves-*")), (
        "a ps of the next job, there before its chief, took this end for its own"
    )


@pytest.mark.parametrize("chief_knows", [True, False])
def test_an_estimator_that_may_not_save_is_refused_before_its_first_step(
    tasks: list[subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chief_knows: bool
) -> None:
    """The script makes the strategy first: chief and ps serve before they hear of the Estimator."""
    addresses = free_addresses(3)
    cluster = {"chief": addresses[:1], "worker": addresses[1:2], "ps": addresses[2:]}
    arguments = ("--strategy-first", "--model-dir", tmp_path / "model", "--max-steps", 4)
    for role in cluster:
        with monkeypatch.context() as changed:
            if role == "chief" and chief_knows:
                changed.setenv("STRATAGEM_CHECKPOINT_ROOTS", str(tmp_path))
            tasks.append(start(cluster, role, 0, *arguments, script="estimate.py"))
    _, said = tasks[1].communicate(timeout=120)  # for a minute the others wait for its next start
    assert tasks[1].returncode, said
    assert "checkpoints may lie below no folder at all" in said and "STRATAGEM_CHECKPOINT_ROOTS" in said
    assert "step 4" not in said and not list(tmp_path.rglob("step-*"))


@pytest.mark.thorough
def test_over_ipv6(tasks: list[subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_TRANSPORT", "tcp")
    addresses = free_addresses(3, "[::1]")
    cluster = {"worker": addresses[:2], "ps": addresses[2:]}
    out = tmp_path / "out.pt"
    tasks.extend(start(cluster, role, index, "--out", out) for role, index in [("ps", 0), ("worker", 1), ("worker", 0)])
    errors = [task.communicate(timeout=240)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0] * 3, "\n".join(errors)
    check_counts(out, 2)


def test_a_worker_that_is_started_alone_says_what_it_waits_for(tasks: list[subprocess.Popen[str]]) -> None:
    addresses = free_addresses(3)
    task = start({"worker": addresses[:2], "ps": addresses[2:]}, "worker", 1)
    tasks.append(task)
    assert task.stderr is not None
    line = next(line for line in task.stderr if "Waiting" in line)
    assert f"worker:1: Waiting for the chief at {addresses[0]} (worker:0 starts it" in line


def test_a_worker_that_waits_for_a_chief_that_the_cluster_names_says_which_and_why(
    tasks: list[subprocess.Popen[str]],
) -> None:
    addresses = free_addresses(2)
    tasks.append(start({"chief": addresses[:1], "worker": addresses[1:]}, "worker", 0))
    assert tasks[0].stderr is not None
    line = next(line for line in tasks[0].stderr if "Waiting" in line)
    assert f"Waiting for the chief at {addresses[0]} (the task chief:0): " in line
    assert line.endswith(": no answer yet\n") or "refused" in line  # on a busy machine it comes later


@pytest.mark.thorough
def test_a_worker_that_ends_before_there_is_a_chief_says_why_it_waits(
    tasks: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"cluster: {{worker: {free_addresses(2)}}}\n")
    words = ("worker", "--cluster", str(path), "--task", "worker:1", str(SCRIPTS / "count_examples.py"))
    tasks.append(forks.Popen([sys.executable, "-m", "stratagem.cli", *words], stderr=subprocess.PIPE))
    assert tasks[0].stderr is not None
    waits = (line for line in tasks[0].stderr if "Waiting" in line)
    assert "(worker:0 starts it" in next(waits)
    tasks[0].terminate()
    assert "(to tell it how the script ended)" in next(waits)


def test_a_worker_whose_job_ends_before_it_is_complete_waits_for_nobody(
    tasks: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    path = tmp_path / "cluster.yaml"
    addresses = free_addresses(3)
    path.write_text(f"cluster: {{chief: {addresses[:1]}, worker: {addresses[1:]}}}\n")
    command = [sys.executable, "-m", "stratagem.cli"]
    words = ("worker", "--cluster", str(path), "--task", "worker:1", str(SCRIPTS / "count_examples.py"))
    for each in (("chief", "--cluster", str(path)), words):
        tasks.append(forks.Popen([*command, *each], stderr=subprocess.PIPE))
    chief, worker = tasks
    assert chief.stderr is not None and worker.stderr is not None
    assert any("Waiting for the cluster: worker:0" in line for line in worker.stderr)
    chief.send_signal(signal.SIGINT)
    errors = worker.communicate(timeout=120)[1]
    assert worker.returncode == 143 and "the chief got SIGINT" in errors, errors
    assert "to tell it how the script ended" not in errors


def test_a_worker_whose_chief_cannot_be_reached_says_so(tasks: list[subprocess.Popen[str]]) -> None:
    words = ("worker", "--task", "worker:1", "--chief", "127.0.0.1:1", "--start-timeout-s", "60", __file__)
    tasks.append(forks.Popen([sys.executable, "-m", "stratagem.cli", *words], stderr=subprocess.PIPE))
    assert tasks[0].stderr is not None
    line = next(line for line in tasks[0].stderr if "Waiting" in line)
    assert "worker:1: Waiting for the chief: the chief at 127.0.0.1:1 cannot be reached" in line


@pytest.mark.thorough
def test_an_evaluator_that_the_cluster_does_not_name(
    tasks: list[subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in TensorFlow: its TF_CONFIG has the cluster of the others, who know nothing of it.
    addresses = free_addresses(2)
    cluster = {"worker": addresses[:1], "ps": addresses[1:]}
    variables = {
        **os.environ,
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 0}}),
        "STRATAGEM_CHECKPOINT_DIR": str(tmp_path),
        "PYTHONPATH": str(SCRIPTS.parents[2]),
    }
    command = [sys.executable, "-c", "import stratagem as sg; print([new.step for new in sg.new_checkpoints()])"]
    tasks.append(forks.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    monkeypatch.setenv("STRATAGEM_CHECKPOINT_ROOTS", str(tmp_path))
    tasks.extend(start(cluster, role, 0, "--pause-s", 0.1, "--save", tmp_path / "step") for role in ("ps", "worker"))
    results = [task.communicate(timeout=240) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0, 0], "\n".join(errors for _, errors in results)
    assert results[0][0] == "[7]\n"


def test_a_port_in_use_is_said_in_one_paragraph(tasks: list[subprocess.Popen[str]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        cluster = {"chief": free_addresses(1), "worker": free_addresses(1), "ps": [address]}
        tasks.append(start(cluster, "ps", 0))
        _, errors = tasks[0].communicate(timeout=60)
    assert tasks[0].returncode == 2
    assert f"cannot listen on {address}" in errors
    assert "Traceback" not in errors


@pytest.mark.thorough
def test_closed_standard_streams_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os\nimport stratagem as sg\nsg.strategy_from_environment()\nprint('said to nobody')\n"
        "assert os.path.samestat(os.fstat(1), os.stat(os.devnull))\n"
    )
    cluster = {"cluster": {"worker": free_addresses(1)}, "task": {"type": "worker", "index": 0}}
    variables = {**os.environ, "TF_CONFIG": json.dumps(cluster), "PYTHONPATH": str(SCRIPTS.parents[2])}
    command = [sys.executable, "-m", "stratagem.cli", "worker", str(tmp_path / "train.py")]
    closed = ["sh", "-c", 'exec "$@" <&- >&-', "sh", *command]
    done = subprocess.run(closed, env=variables, stderr=subprocess.PIPE, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
