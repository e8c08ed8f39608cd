"""The command line: exit codes, messages, options derived from the configurations."""

from __future__ import annotations

import http.server
import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import grpc
import pytest
import torch
from click.testing import CliRunner

from stratagem.cli import __main__ as cli
from stratagem.cli import asking, roles, run, scale, status
from stratagem.cli.options import UNREAD
from stratagem.cluster.config import RoleConfig
from stratagem.cluster.sources import CONFIGS, flag_of
from stratagem.errors import ClusterSpecError, JobStoppedError, PeerUnavailableError
from stratagem.launch.certificates import make_throw_away
from stratagem.launch.plan import LocalJob
from stratagem.launch.submit.record import JobRecord, JobStore
from stratagem.rpc.generated import chief_pb2, chief_pb2_grpc, observer_pb2, observer_pb2_grpc
from stratagem.rpc.security import OPEN
from stratagem.rpc.status_view import TaskState

NOTEBOOK = Path(__file__).parents[3] / "examples" / "submit.ipynb"
EVALUATOR = ["evaluator", "--chief", "127.0.0.1:1", "--start-timeout-s", "0.1", "--checkpoint-dir", "none"]
CLUSTER_YAML = """
cluster:
  chief: ["127.0.0.1:4000"]
  worker: ["127.0.0.1:0", "127.0.0.1:0"]
  ps: ["127.0.0.1:4001"]
defaults:
  num_threads: 3
worker:
  staleness: 2
"""


def invoke(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command, as :func:`main` gives them."""
    program = CliRunner()
    result = program.invoke(_main, arguments, standalone_mode=False)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def _main(arguments: tuple[str, ...]) -> None:
    before = sys.argv
    sys.argv = ["stratagem", *arguments]
    try:
        cli.main()
    finally:
        sys.argv = before


def _show(role: str, *arguments: str) -> dict[str, list[str]]:
    code, out, err = invoke("config", "show", role, *arguments)
    assert code == 0, err
    return {line.split()[0]: line.split(maxsplit=2)[1:] for line in out.splitlines()}


def test_version() -> None:
    for words in ("version", "--version"):
        code, out, err = invoke(words)
        assert code == 0 and out.strip().count(".") == 2, err


def test_an_interrupt_while_the_command_loads_is_130_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    command, environ = [sys.executable, "-m", "stratagem.cli", "run"], {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_ps_without_torch_is_not_to_be_tried_again() -> None:
    words = ["stratagem", "ps", "--task=ps:0", "--chief=127.0.0.1:1", "--insecure"]
    program = f"import sys; sys.modules['torch'] = None; sys.argv = {words}; import stratagem.cli.__main__ as cli"
    command = [sys.executable, "-c", f"{program}; cli.main()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("stratagem: there is no torch for ")


def test_a_script_whose_name_begins_as_an_option_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run_local", lambda job: 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-train.py").touch()
    assert invoke("run", "./-train.py", "--lr", "1") == (0, "", "")


def test_run_starts_nothing_for_a_script_that_is_no_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run_local", lambda job: 0)
    script = tmp_path / "train.py"
    script.write_text("print('\\d')\nfor batch in range(3)\n    pass\n")
    code, out, err = invoke("run", "--workers", "2", str(script))
    assert (code, out) == (1, "") and "SyntaxWarning" not in err
    assert f'File "{script}", line 2' in err and "SyntaxError: expected ':'" in err and "nothing was started" in err
    script.write_bytes(b"print(1)\0")
    assert invoke("run", str(script))[0] == 1
    script.write_text("print('\\d')\n")
    assert invoke("run", str(script)) == (0, "", "")


@pytest.mark.parametrize("command", ["run", "submit"])
def test_a_folder_that_has_been_removed(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, _, err = invoke(command, __file__)
    assert code == 2 and "the current folder has been removed" in err


@pytest.mark.parametrize("role", CONFIGS)
def test_every_field_is_a_flag_with_its_meaning(role: str) -> None:
    code, out, _ = invoke(role, "--help")
    words = " ".join(out.split())
    assert code == 0
    for name, field in CONFIGS[role].model_fields.items():
        is_read = name != UNREAD.get(role)
        assert (f" {flag_of(name)} " in words or f" {flag_of(name)} / " in words) == is_read
        assert " ".join((field.description or "").split())[:20] in words or not is_read


def test_config_show_says_where_values_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.yaml").write_text(CLUSTER_YAML)
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "7")
    file = str(tmp_path / "c.yaml")
    shown = _show("worker", "--cluster", file, "--task", "worker:1", "--insecure")
    assert shown["task"] == ["worker:1", "flag --task"]
    assert shown["insecure"] == ["True", "flag --insecure"]
    assert shown["peer_timeout_s"] == ["7.0", "environment STRATAGEM_PEER_TIMEOUT_S"]
    assert shown["staleness"] == ["2.0", f"{file} (worker)"]
    assert shown["num_threads"] == ["3", f"{file} (defaults)"]
    assert shown["chief"] == ["127.0.0.1:4000", f"{file} (cluster)"]
    assert shown["frame_bytes"] == ["4194304", "default"]


def test_run_without_a_temporary_folder_says_what_names_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    code, _, err = invoke("run", __file__)
    assert code == 2 and "job's own files: No such file or directory; set TMPDIR to a writable" in err


HEALING = ["run", "--workers", "2", "--min-workers", "1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["config", "show", "ps"], "task is needed"),
        (["ps", "--task", "ps:0"], "ps:0 needs the address of the chief"),
        (["ps", "--task", "worker:0"], "expected a task of type 'ps'"),
        (["chief"], "num_workers is needed"),
        (["ps", "--cluster", "nowhere.yaml"], "cannot read the cluster file nowhere.yaml: No such file"),
        (["worker", "nowhere.py"], "there is no file nowhere.py"),
        (["run", "nowhere.py"], "there is no file nowhere.py"),
        (["run", "-m", "nowhere.train"], "Python finds no nowhere.train"),
        (["worker", "-m", "nowhere.train"], "Python finds no nowhere.train"),
        (["run", "--workers", "2", "/dev/stdin"], "/dev/stdin is an open file of this command, and each task opens"),
        (["run", str(NOTEBOOK)], f"submit.ipynb is a notebook: `stratagem submit {NOTEBOOK}`"),
        (["run", "--ps", "1", "--strategy", "one", __file__], "the cluster has 1 ps"),
        (["run", "--workers", "2", "--strategy", "one", __file__], "the cluster has 2 workers"),
        (["run", "--ps", "1", "--strategy", "ring", __file__], "without parameter servers"),
        (["status"], 'which job? Name its chief, host:port (--chief, STRATAGEM_CHIEF, sg.status_widget("host:port"))'),
        (["status", "--chief", "nonsense"], "expected an address"),
        (["run", "--wrokers", "2", "x.py"], "No such option"),
        (["run", "--replicas", "2", "x.py"], "--replicas 2: say what the replicas are: --workers 2"),
        (["submit", "-m", "a.b", "x.py"], 'a file beside the package, with import runpy; runpy.run_module("a.b"'),
        (["chief", "--num-workers", "0"], "num_workers from flag --num-workers"),
        (
            ["chief", "--num-workers", "1", "--bind", "127.0.0.1:\u00b2"],
            "bind from flag --bind: expected an address",
        ),
        (["chief", "--num-workers", "1", "--bind", ":2222"], "flag --bind: expected an address like 'host:2222' ("),
        (["chief", "--num-workers", "1", "--web", "8080"], "web from flag --web: expected an address like"),
        (["chief", "--num-workers", "1", "--metrics-bind", "x"], "metrics_bind from flag --metrics-bind: expected an"),
        (
            ["ps", "--task", "ps:0", "--advertise", "x:70000"],
            "advertise from flag --advertise: expected an",
        ),
        (["chief", "--num-workers", "1", "--chief", "127.0.0.1:1"], "No such option '--chief'"),
        ([*EVALUATOR, "--bind", "127.0.0.1:0", __file__], "No such option '--bind'"),
        ([*EVALUATOR, "--checkpoint-dir", f"{__file__}/x", __file__], f"x', and {__file__} is a file"),
        (
            ["chief", "--num-workers", "1", "--state-dir", __file__],
            "state_dir from flag --state-dir: expected a",
        ),
        (["ps", "--task", "ps:0", "--checkpoint-dir", __file__], "checkpoint_dir from flag --checkpoint-dir: expected"),
        (["run", "--tls", "auto", __file__], "--tls is for several workers and has no effect in one process"),
        (["run", "--token-file", "none", __file__], "--token-file is for several workers and has no effect in one"),
        (["run", "--checkpoint-dir", "none", __file__], "the script itself says where it saves (sg.CheckpointManager"),
        (["run", "--checkpoint-roots", "none", __file__], "--checkpoint-roots is for several workers and has no eff"),
        (["why", "--summary", ""], "'--summary': expected the name of a file, but it is empty."),
        (["render", "--port", "70000", "x.py"], "expected ports from 1024 to 65535, as no task is root, got 70000"),
        (["render", "--ps", "1", "--checkpoint-every-s", "-1", "x.py"], "-1.0 is not in the range"),
        (["render", "--ps", "1", "--staleness", "-1", "x.py"], "expected a staleness of at least 0"),
        (["status", "--chief", "127.0.0.1:1", "--timeout-s", "inf"], "inf is not in the range"),
        (["health", "--task", "ps:0", "--timeout-s", "0"], "0.0 is not in the range"),
        (["scale", "--chief", "127.0.0.1:1", "--ps", "2", "--wait-s", "-1"], "-1.0 is not in the range"),
        (["scale", "--chief", "127.0.0.1:1", "--ps", "2", "--wait-s", "nan"], "nan is not in the range"),
        (["run", "--workers", "100000", __file__], "are 100000 processes on this host"),
        (["submit", ""], "but there is no file .;"),
        (["submit", "--label", "a=1", "--label", "a=2", __file__], "--label KEY=VALUE once for a, got a=1 and a=2"),
        (["jobs", "list", "--label", "team"], "expected --label KEY=VALUE, got 'team'"),
        (["submit", "--workers", "100000", "--dry-run", __file__], "are 100000 processes on this host"),
        (["run", "--ps", "1", "--staleness", "-1", __file__], "expected a staleness of at least 0"),
        (
            ["submit", "--workers", "2", "--staleness", "2", __file__],
            "a staleness of 2 needs parameter servers: add ps",
        ),
        (["run", "--ps", "1", "--checkpoint-dir", "", __file__], "'--checkpoint-dir': expected the name of a folder"),
        (["certs", "init", "--dir", ""], "'--dir': expected the name of a folder, but it is empty"),
        (["run", "--summary", "", "x.py"], "'--summary': expected the name of a file, but it is empty."),
        (["status", "--cluster", ""], "'--cluster': expected the name of a file, but it is empty."),
        (["trace", "--output", ""], "'--output': expected the name of a file, but it is empty."),
        (["run", "--workers", "2", "--stripes", "0", __file__], "stripes from flag --stripes"),
        (
            ["run", "--workers", "2", "--chunk-bytes", "9223372036854775808", __file__],
            "chunk_bytes from flag --chunk-bytes",
        ),
        (["run", "--workers", "2", "--devices", "foo", __file__], "expected a device like 'cpu', 'cuda:0' or '/gpu:0'"),
        (["worker", "--devices", "foo", "-m", "this"], "expected a device like 'cpu', 'cuda:0' or '/gpu:0'"),
        (["run", "--strategy", "one", "--devices", "cpu:0,cpu:1", __file__], "or --strategy mirrored"),
        (["run", "--devices", "meta", __file__], "'meta' was asked for, but torch cannot compute on it"),
        (["run", "--workers", "2", "--devices", "mps", __file__], "'mps' was asked for, but torch cannot compute on"),
        ([*HEALING, "--compression", "int8", __file__], "(--min-workers) cannot have compression='int8': leave out"),
        ([*HEALING, "--devices", "cpu:0,cpu:1", __file__], "cannot have 2 devices in a worker: leave out that"),
        (["run", "--workers", "2", "--staleness", "inf", __file__], "--staleness inf is asynchronous, and without p"),
        (["run", "--workers", "2", "--checkpoint-roots", ".", __file__], "is for checkpoints that parameter servers"),
        (["run", "--ps", "1", "--web", "0.0.0.0:0", __file__], "refusing to listen on 0.0.0.0:0: anybody who"),
        (["run", "--stripes", "4", __file__], "--stripes is for several workers and has no effect in one process"),
        (["worker", "--transport", "tcp", __file__], "--transport is for several workers and has no effect in one"),
    ],
)
def test_bad_input_is_one_paragraph_and_exit_code_2(arguments: list[str], words: str) -> None:
    code, out, err = invoke(*arguments)
    assert code == 2
    assert words in " ".join(err.split())
    assert out == "" and "Traceback" not in err


def test_a_seed_in_the_environment_is_read_before_one_process_starts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_SEED", "x")
    code, _, err = invoke("run", __file__)
    assert code == 2 and "seed from environment STRATAGEM_SEED" in err and "started" not in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without GPUs")
def test_nccl_without_gpus_is_refused_before_anything_starts() -> None:
    code, _, err = invoke("run", "--workers", "2", "--transport", "nccl", __file__)
    assert code == 2 and "NCCL was asked for, but torch sees no CUDA device here" in err


def test_a_job_is_listed_as_it_was_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    store, place, args = JobStore(), {"host": "elsewhere"}, ("[/bold]", "--names=[red]x", ":smile:", "a\nb")
    store.create("digits-1")
    store.save(JobRecord("digits-1", "local", "digits.py", "one", 0, 0, "2026-11-26", args=args, place=place))
    code, out, _ = invoke("jobs", "list")
    assert code == 0 and r"digits.py [/bold] --names=[red]x :smile: 'a\nb'" in out
    code, _, err = invoke("jobs", "cancel", "digits-1")
    assert code == 1 and "digits-1 unknown (it runs on elsewhere; ask there)" in err
    assert not store.load("digits-1").cancelled


def test_a_terminal_that_is_no_utf_8_is_shown_what_it_can_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    store = JobStore()
    folder = store.create("digits-1")
    store.save(JobRecord("digits-1", "local", "digits.py", "one", 0, 0, "2026-11-26", place={"host": "elsewhere"}))
    (folder / "output.log").write_bytes("caf\u00e9 \u0142".encode() + b" \xff")
    result = CliRunner(charset="latin-1").invoke(cli.stratagem, ["jobs", "logs", "digits-1"])
    assert result.stdout == "caf\u00e9 \\u0142 \\ufffd\n"


def test_a_path_that_the_system_refuses_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stratagem/jobs").mkdir(parents=True)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    code, _, err = invoke("jobs", "logs", "n" * 300)
    assert code == 2 and "/job.json cannot be read: File name too long" in err and "Traceback" not in err


def test_what_a_dry_run_shows_can_be_run() -> None:
    code, out, _ = invoke("submit", "--dry-run", __file__, "two words")
    assert code == 0 and shlex.split(out.splitlines()[-1])[-2:] == [__file__, "two words"]


def test_a_file_without_the_address_of_a_chief_is_named(tmp_path: Path) -> None:
    code, _, err = invoke("status", "--chief", f"file:{tmp_path}/missing")
    assert code == 1 and f"file:{tmp_path}/missing does not hold the address of a chief" in err


def test_each_chief_that_does_not_answer_is_named() -> None:
    code, _, err = invoke("status", "--chief", "127.0.0.1:1,127.0.0.1:2")
    assert code == 1 and all(f"the chief at 127.0.0.1:{port} cannot be reached" in err for port in (1, 2))


def test_the_address_of_a_page_is_told_from_one_where_nobody_answers() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            code, _, err = invoke("status", "--chief", f"127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            serving.join()
    assert code == 1 and "perhaps the page of a job, answers at the address of the chief" in err


def test_malformed_cluster_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    for text, words in [
        ("a: [", "is not YAML"),
        ("cluster: {}\ndefaults: {}\ncluster: {}\n", "is not YAML: cluster is given twice"),
        ("- 1", "expected sections"),
        ("clustre: {}", "did you mean 'cluster'"),
    ]:
        file.write_text(text)
        code, _, err = invoke("config", "show", "chief", "--cluster", str(file))
        assert code == 2 and words in err
    for text, words in [
        ("defaults: 3", "expected keys and values in section 'defaults'"),
        ("defaults: {tls: 3}", "tls from"),
        ("default: {tls: certs}", "did you mean 'defaults'"),
    ]:
        file.write_text(text)
        code, _, err = invoke("status", "--chief", "127.0.0.1:1", "--cluster", str(file))
        assert code == 2 and words in err


def test_malformed_tf_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{")
    code, _, err = invoke("config", "show", "worker")
    assert code == 2 and "TF_CONFIG is not JSON" in err


def test_an_unknown_strategy_is_refused_where_a_configuration_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = invoke("config", "show", "worker", "--task", "worker:0", "--strategy", "rink")
    assert code == 2 and "'rink'" in err and "ring" in err
    monkeypatch.setenv("STRATAGEM_STRATEGY", "rink")
    code, _, err = invoke("config", "show", "worker", "--task", "worker:0")
    assert code == 2 and "STRATAGEM_STRATEGY" in err and "ring" in err


def test_unknown_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_STALENES", "1")
    code, _, err = invoke("config", "show", "worker")
    assert code == 2 and "did you mean 'STRATAGEM_STALENESS'" in err


def test_an_unreachable_chief_is_one_paragraph() -> None:
    code, _, err = invoke("status", "--chief", "127.0.0.1:1", "--timeout-s", "2")
    assert code == 1
    assert err.startswith("stratagem: the chief at 127.0.0.1:1 cannot be reached") and err.count("\n") == 1


def test_exit_codes_of_errors() -> None:
    codes = [
        cli.exit_code_of(error) for error in (ClusterSpecError(""), PeerUnavailableError(""), JobStoppedError("", 143))
    ]
    assert codes == [2, 1, 143]


class _Role:
    """Stands for a role's ``run``: what it was called with, and what the script would see."""

    def __init__(self) -> None:
        self.called: list[Any] = []
        self.environ: dict[str, str] = {}

    def __call__(self, config: RoleConfig, *arguments: Any) -> int:
        self.called = [config, *arguments]
        self.environ = dict(os.environ)
        return 42


def test_a_worker_gets_its_configuration_and_the_script_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.yaml").write_text(CLUSTER_YAML)
    role = _Role()
    monkeypatch.setattr(roles, "role_entry", lambda name: role)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    code, _, err = invoke(
        *("worker", "--cluster", str(tmp_path / "c.yaml"), "--task", "worker:1", "--staleness", "0"),
        *(__file__, "--epochs", "2", "--task", "mine"),
    )
    assert code == 42, err
    config, script, arguments, is_module = role.called
    assert (config.task, config.chief, config.staleness) == ("worker:1", "127.0.0.1:4000", 0.0)
    assert (script, arguments, is_module) == (__file__, ["--epochs", "2", "--task", "mine"], False)
    assert json.loads(role.environ["TF_CONFIG"])["task"] == {"type": "worker", "index": 1}
    assert (role.environ["RANK"], role.environ["WORLD_SIZE"], role.environ["MASTER_PORT"]) == ("1", "2", "4000")
    assert (role.environ["STRATAGEM_STALENESS"], role.environ["STRATAGEM_NUM_THREADS"]) == ("0.0", "3")


def test_a_chief_that_worker_0_owns(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"worker": ["127.0.0.1:4000"], "ps": ["127.0.0.1:4001"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}))
    role = _Role()
    monkeypatch.setattr(roles, "role_entry", lambda name: role)
    code, _, err = invoke("chief", "--task", "chief:0")
    assert code == 42, err
    assert (role.called[0].bind, role.called[0].num_workers, role.called[0].num_ps) == ("127.0.0.1:4000", 1, 1)


class _Job(chief_pb2_grpc.ChiefServicer, observer_pb2_grpc.ObserverServicer):
    address = ""
    wanted = 0

    def GetStatus(self, request: chief_pb2.GetStatusRequest, context: grpc.ServicerContext) -> chief_pb2.GetStatusReply:
        if self.wanted == 8:
            context.abort(grpc.StatusCode.UNAVAILABLE, "it has ended with its job")
        reply = chief_pb2.GetStatusReply(
            ready=True, lead="worker:0", units_accepted=3, units_planned=9, wanted_workers=self.wanted
        )
        worker = reply.tasks.add(state="live", units_held=2)
        worker.info.task, worker.info.address, worker.info.incarnation = "worker:0", self.address, 4
        worker.progress.CopyFrom(
            chief_pb2.Progress(step=7, loss=0.5, has_loss=True, waiting_on="ps:0 to apply step 8", waiting_s=1.5)
        )
        ps = reply.tasks.add(state="live", progress=chief_pb2.Progress(step=6, store_epoch=2))
        ps.info.task = "ps:0"
        return reply

    def Scale(self, request: chief_pb2.ScaleRequest, context: grpc.ServicerContext) -> chief_pb2.ScaleReply:
        self.wanted = request.num_workers - 1  # somebody else was right behind
        return chief_pb2.ScaleReply()

    def GetStack(
        self, request: observer_pb2.GetStackRequest, context: grpc.ServicerContext
    ) -> observer_pb2.GetStackReply:
        return observer_pb2.GetStackReply(threads=["MainThread\n  train.py:3 in step"], flight=["1 s ago: barrier"])


@pytest.fixture
def job() -> Iterator[str]:
    """Address of a chief (and worker) that answers like a running job."""
    pool = futures.ThreadPoolExecutor(2)
    server = grpc.server(pool)
    servicer = _Job()  # type: ignore[abstract]  # the others are not called
    chief_pb2_grpc.add_ChiefServicer_to_server(servicer, server)
    observer_pb2_grpc.add_ObserverServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer.address
    server.stop(None).wait()
    pool.shutdown()


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        ([], None, ""),
        (["--tls", "auto"], None, "auto"),
        (["--tls", "--workers", "2"], None, "auto"),
        (["--tls=certs"], None, "certs"),
        ([], "certs", "certs"),
        (["--tls=auto"], "certs", "auto"),
    ],
)
def test_run_takes_tls_with_and_without_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], environment: str | None, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("certs").mkdir()
    Path("train.py").touch()
    jobs: list[LocalJob] = []
    monkeypatch.setattr(run, "run_local", jobs.append)
    monkeypatch.setattr(run, "security_of", lambda config: None)  # the folder is empty
    if environment is not None:
        monkeypatch.setenv("STRATAGEM_TLS", environment)
    code, _, err = invoke("run", "--workers", "2", *flags, "train.py", "--tls", "argument of the script")
    assert code == 0, err
    assert jobs[0].tls == expected and jobs[0].args == ("--tls", "argument of the script")


@pytest.mark.parametrize(
    ("text", "words", "is_warned"),
    [
        ("import torch", ["--workers", "2"], True),
        ("import torch", ["x", "--ps=1"], True),
        ("import torch", ["--epochs", "2"], False),
        ("import argparse", ["--workers", "2"], False),
        ("from sys import argv", ["--workers", "2"], False),
    ],
)
def test_run_says_that_a_flag_of_its_own_went_to_a_script_that_reads_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: list[str], is_warned: bool
) -> None:
    monkeypatch.setattr(run, "run_local", lambda job: 0)
    (script := tmp_path / "train.py").write_text(text)
    code, _, err = invoke("run", str(script), *words)
    assert code == 0 and ("before the script" in err) == is_warned


def test_a_chief_refuses_flags_that_would_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "role_entry", lambda role: lambda config: 0)
    code, _, err = invoke("chief", "--num-workers", "1", "--checkpoint-every-s", "5")
    assert code == 2 and "--checkpoint-every-s is for parameter servers" in err
    code, _, err = invoke("chief", "--num-workers", "2", "--num-ps", "1", "--max-workers", "1")
    assert code == 2 and "expected at least as many as it starts with" in err
    for name in ("CHECKPOINT_EVERY_S", "MAX_WORKERS"):  # as docker-compose says it to a job of any kind
        monkeypatch.setenv(f"STRATAGEM_{name}", "1")
    assert invoke("chief", "--num-workers", "2")[0] == 0


def test_a_worker_of_parameter_servers_refuses_flags_of_a_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "role_entry", lambda role: lambda config, *arguments: 0)
    environ = os.environ | {"STRATAGEM_STRIPES": "2"}  # as it is said to a job of any kind
    worker = ("worker", "--cluster", str(tmp_path / "c.yaml"), "--task", "worker:0")
    flag = ("--collective-timeout-s", "9", __file__)
    for ps, refused in (("  ps: [127.0.0.1:4003]\n", True), ("", False)):
        (tmp_path / "c.yaml").write_text(f"cluster:\n  chief: [127.0.0.1:4000]\n  worker: [127.0.0.1:4001]\n{ps}")
        monkeypatch.setattr(os, "environ", environ.copy())
        code, _, err = invoke(*worker, __file__)
        assert code == 0, err
        assert ("stripes (environment STRATAGEM_STRIPES) is for a ring of workers" in err) == refused
        code, _, err = invoke(*worker, *flag)
        assert (code == 2) == ("--collective-timeout-s is for a ring of workers" in err) == refused


def test_run_refuses_an_unknown_compression_before_it_starts_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run_local", lambda job: pytest.fail("it was started"))
    code, _, err = invoke("run", "--workers", "2", "--compression", "foo", __file__)
    assert code == 2 and "'foo' is not one of" in err and "powersgd" in err
    monkeypatch.setenv("STRATAGEM_COMPRESSION", "foo")
    code, _, err = invoke("run", "--workers", "2", __file__)
    assert code == 2 and "STRATAGEM_COMPRESSION" in err and "powersgd" in err


def test_run_heeds_the_environment_behind_its_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (script := tmp_path / "train.py").touch()
    jobs: list[LocalJob] = []
    monkeypatch.setattr(run, "run_local", jobs.append)
    for name, value in (("STALENESS", "0"), ("CHECKPOINT_DIR", str(tmp_path)), ("CHECKPOINT_EVERY_S", "2")):
        monkeypatch.setenv(f"STRATAGEM_{name}", value)
    assert invoke("run", "--ps", "1", "--checkpoint-every-s", "3", str(script))[0] == 0
    assert (jobs[0].staleness, jobs[0].checkpoint_dir, jobs[0].checkpoint_every_s) == (0.0, tmp_path, 3.0)


@pytest.mark.parametrize(
    ("field", "value"), [("transport", "tpc"), ("max_store_bytes", "-1"), ("keep_checkpoints", "0")]
)
def test_run_says_a_wrong_variable_of_any_task_before_one_starts(
    monkeypatch: pytest.MonkeyPatch, field: str, value: str
) -> None:
    monkeypatch.setattr(run, "run_local", lambda job: pytest.fail("it has begun"))
    monkeypatch.setenv(f"STRATAGEM_{field.upper()}", value)
    code, _, err = invoke("run", "--workers", "2", "--ps", "1", "--chiefs", "2", __file__)
    assert code == 2 and f"{field} from environment STRATAGEM_{field.upper()}" in err


def test_run_says_a_certificate_that_is_lacking_before_a_task_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "run_local", lambda job: pytest.fail("it has begun"))
    make_throw_away(tmp_path, ["chief:0", "ps:0", "worker:0"])
    code, _, err = invoke("run", "--workers", "2", "--ps", "1", "--tls", str(tmp_path), __file__)
    assert code == 2 and "no TLS for worker:1" in err


def test_a_file_where_a_folder_is_wanted_is_refused_whoever_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"evaluator: {{checkpoint_dir: {file}, start_timeout_s: 0.1}}")
    code, _, err = invoke("evaluator", "--chief", "127.0.0.1:1", "--cluster", str(file), __file__)
    assert code == 2 and f"checkpoint_dir from {file} (evaluator): expected a folder" in err
    monkeypatch.setenv("STRATAGEM_STATE_DIR", str(file))
    code, _, err = invoke("chief", "--num-workers", "1")
    assert code == 2 and "state_dir from environment STRATAGEM_STATE_DIR: expected a folder" in err


def test_what_a_variable_says_for_all_jobs_is_no_error_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[LocalJob] = []
    monkeypatch.setattr(run, "run_local", jobs.append)
    monkeypatch.setenv("STRATAGEM_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("STRATAGEM_NUM_THREADS", "3")
    code, _, err = invoke("run", __file__)
    assert code == 0, err
    assert jobs[0].num_threads == 3


@pytest.mark.parametrize("way", ["flags", "environment", "file"])
def test_status_is_told_who_the_operator_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    told: list[tuple[str, str, bool]] = []

    def stop(*words: Any) -> None:
        told.append(words)
        raise ClusterSpecError("far enough")

    monkeypatch.setattr(asking, "operator_security", stop)
    file = tmp_path / "c.yaml"
    file.write_text("defaults: {tls: certs, token_file: token, insecure: true}" if way == "file" else "{}")
    flags = ["--tls", "certs", "--token-file", "token", "--insecure"] if way == "flags" else []
    if way == "environment":
        for name, value in (("TLS", "certs"), ("TOKEN_FILE", "token"), ("INSECURE", "true")):
            monkeypatch.setenv(f"STRATAGEM_{name}", value)
    assert invoke("status", "--cluster", str(file), *flags)[0] == 2
    assert told == [(os.path.abspath("certs"), os.path.abspath("token"), True)]


def test_run_takes_a_script_for_no_folder(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    code, _, err = invoke("run", "--tls", str(tmp_path / "train.py"), str(tmp_path / "train.py"))
    assert code == 2 and "--tls auto" in err


def test_status_as_a_table(job: str) -> None:
    code, out, err = invoke("status", "--chief", job)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("running | lead worker:0 | epoch 0 | units 3/9")
    assert lines[1].split()[:5] == ["task", "state", "incarnation", "step", "version"]
    assert lines[2].startswith("worker:0  live   4") and "ps:0 to apply step 8 (1.5 s)" in lines[2]
    assert lines[3].split()[:5] == ["ps:0", "live", "-", "6", "2.6"]


def test_scale_does_not_wait_for_what_a_later_request_has_replaced(job: str) -> None:
    code, _, err = invoke("scale", "--chief", job, "--workers", "4", "--wait-s", "inf")
    assert (code, err) == (1, "stratagem: requested, but someone has requested 3 workers since\n")


def test_scale_does_not_wait_for_a_chief_that_has_ended(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "AWAY_S", 0.5)
    code, _, err = invoke("scale", "--chief", job, "--workers", "9", "--wait-s", "100")
    assert code == 1 and "the job has ended since, or its chief is away" in err


def test_status_as_json_with_stacks(job: str) -> None:
    code, out, err = invoke("status", "--chief", job, "--json", "--stacks")
    assert code == 0, err
    found = json.loads(out)
    assert (found["tasks"][0]["step"], found["tasks"][0]["loss"], found["tasks"][1]["loss"]) == (7, 0.5, None)
    told = ["MainThread\n  train.py:3 in step", "last collectives and commits\n  1 s ago: barrier"]
    assert found["stacks"] == {"worker:0": told}


def test_stacks_say_where_something_else_answers() -> None:
    """It ended the command, without the stacks of the others."""
    with futures.ThreadPoolExecutor(1) as pool:
        other = grpc.server(pool)
        port = other.add_insecure_port("127.0.0.1:0")
        other.start()
        view: Any = SimpleNamespace(tasks=[TaskState("ps:0", "live", f"127.0.0.1:{port}")])
        found = status._stacks(view, 5.0, OPEN)
        other.stop(None).wait()
    assert "something other than ps:0" in found["ps:0"][0]


def test_status_finds_the_chief_in_the_cluster_file(job: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"cluster: {{chief: ['{job}'], worker: ['127.0.0.1:0']}}")
    code, out, err = invoke("status", "--cluster", str(tmp_path / "c.yaml"), "--stacks")
    assert code == 0, err
    assert "train.py:3 in step" in out


def test_a_cluster_file_that_the_environment_contradicts_is_asked_nothing(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.yaml").write_text("cluster: {chief: ['127.0.0.1:1'], worker: ['127.0.0.1:0']}")
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"chief": [job], "worker": ["127.0.0.1:0"]}}))
    code, out, err = invoke("status", "--cluster", str(tmp_path / "c.yaml"))
    assert (code, out) == (2, "") and "unset one of the two" in err
    assert invoke("status", "--cluster", str(tmp_path / "c.yaml"), "--chief", job)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("trace", "--chief", "{job}", "--steps", "0"), "0 is not in the range x>=1"),
        (("trace", "--chief", "{job}", "-o", "{tmp}/none/trace.json"), "cannot write {tmp}/none/trace.json: there"),
        (("why", "--chief", "{job}", "--summary", "{tmp}/summary.json"), "got both"),
        (("why", "--summary", "{tmp}/summary.json"), "cannot read the summary {tmp}/summary.json: No such file"),
    ],
)
def test_what_cannot_be_asked_or_written_is_said_at_once(
    arguments: tuple[str, ...], words: str, job: str, tmp_path: Path
) -> None:
    code, out, err = invoke(*(each.format(job=job, tmp=tmp_path) for each in arguments))
    assert (code, out) == (2, "") and words.format(tmp=tmp_path) in err


def test_why_says_what_becomes_of_a_job_whose_chief_is_away() -> None:
    code, out, _ = invoke("why", "--chief", "127.0.0.1:1")
    assert code == 0 and "tasks that wait for it longer than peer_timeout_s end" in out


def test_as_a_process() -> None:
    run = subprocess.run([sys.executable, "-m", "stratagem", "status"], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("stratagem: which job?")


def test_a_full_disk_under_the_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [sys.executable, "-m", "stratagem.cli", "version"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (run.returncode, run.stderr) == (1, "stratagem: the output: No space left on device\n")
