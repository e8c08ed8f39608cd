"""Whole jobs with TLS and with a token: same numbers, and strangers get nothing while the job goes on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from stratagem.errors import ForbiddenError, IdentityError, PeerUnavailableError
from stratagem.launch.status import fetch_status
from stratagem.rpc.channels import connect
from stratagem.rpc.errors import error_from_rpc
from stratagem.rpc.generated import chief_pb2, chief_pb2_grpc, common_pb2, ps_pb2, ps_pb2_grpc
from stratagem.rpc.security import OPEN, Security
from stratagem.rpc.session import SessionClient
from tests import forks
from tests.cluster.test_by_hand import free_addresses
from tests.cluster.test_synchronous import check_equal, one_process
from tests.contract.rpc.securities import TOKEN, make_certificates, with_tls, with_token

Start = Callable[..., Any]
SCRIPTS = Path(__file__).parent / "scripts"
TASKS = ("chief:0", "ps:0", "worker:0", "worker:1", "operator")


@pytest.mark.parametrize("num_ps", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_one_flag_encrypts_everything_and_the_numbers_are_the_same(cluster: Start, tmp_path: Path, num_ps: int) -> None:
    out = tmp_path / "out.pt"
    flags = ["--tls", "auto", "--transport", "tcp", *(["--staleness", "0"] if num_ps else [])]
    job = cluster(2, num_ps, "train_small.py", "--out", out, flags=flags)
    expected = one_process(tmp_path)
    done = job.succeed()
    assert re.search(r"chief:0 listening on \S+, with TLS", done.stderr) and "over tcp" in done.stderr
    check_equal(expected, out)
    assert not [*tmp_path.rglob("*.key"), *tmp_path.rglob("*.crt")]  # thrown away


class Running:
    """A job of one worker and one ps that trains until it is let go."""

    def __init__(self, start: Start, folder: Path, *flags: object) -> None:
        self._until = folder / "until"
        self.job = start(1, 1, "train_until.py", "--until", self._until, flags=[str(flag) for flag in flags])
        self.job.wait_for(lambda: "Cluster is ready: 1 workers" in self.job.stderr, "the cluster")
        self.chief = self._address(r"chief:0 listening on ([^\s,]+)")
        self.ps = self._address(r"ps:0: Listening on ([^\s,]+)")

    def _address(self, pattern: str) -> str:
        found = re.search(pattern, self.job.stderr)
        assert found is not None
        return found.group(1)

    def step(self, security: Security) -> int:
        """Steps of the worker so far."""
        return next(task.step for task in fetch_status(self.chief, 60, security).tasks if task.task == "worker:0")

    def finish(self, security: Security) -> Any:
        """Lets it go; it must have gone on meanwhile, and end well."""
        before = self.step(security)
        self.job.wait_for(lambda: self.step(security) > before, "further steps")
        self._until.touch()
        done = self.job.succeed()
        assert done.summary["restarts"] == 0
        return done


def status(address: str, *flags: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stratagem.cli", "status", "--chief", address, "--json", *map(str, flags)]
    return forks.run(command, timeout=60)


def test_strangers_and_stolen_certificates_get_nothing_from_a_running_job(cluster: Start, tmp_path: Path) -> None:
    folder = make_certificates(tmp_path / "certificates", *TASKS)
    strangers = make_certificates(tmp_path / "strangers", *TASKS)
    me = with_tls(folder, "operator")
    running = Running(cluster, tmp_path, "--tls", folder)

    # A plain client, and one with certificates of its own making.
    with pytest.raises(IdentityError, match="speaks TLS: give --tls DIR"):
        fetch_status(running.chief, 60, OPEN)
    with pytest.raises(IdentityError, match="another certificate authority"):
        fetch_status(running.chief, 60, with_tls(strangers, "operator"))
    for address, peer in ((running.chief, "chief:0"), (running.ps, "ps:0")):
        with pytest.raises(PeerUnavailableError):
            fence(address, peer, OPEN)

    # The certificate of a worker, in wrong hands: no chief, no other worker, no operator.
    stolen = with_tls(folder, "worker:1")
    with pytest.raises(ForbiddenError, match="worker:1 may not call Fence: it is for chief"):
        fence(running.ps, "ps:0", stolen)
    channel = connect(running.chief, "chief:0", stolen)
    with pytest.raises(grpc.RpcError) as refused:
        request = chief_pb2.NextUnitsRequest(sender=common_pb2.Sender(task="worker:0", incarnation=1), dataset=1)
        chief_pb2_grpc.ChiefStub(channel).NextUnits(request, timeout=60)
    channel.close()
    error = error_from_rpc(refused.value, "chief:0")
    assert isinstance(error, IdentityError) and "in the name of worker:0" in str(error)
    session = SessionClient(running.chief, "worker:0", "", security=stolen)
    with pytest.raises(IdentityError, match="worker:1 may not call Session in the name of worker:0"):
        session.start(60)
    session.close()

    assert json.loads(status(running.chief, "--tls", folder, "--stacks").stdout)["stacks"]["worker:0"]
    assert "--tls DIR" in status(running.chief).stderr
    running.finish(me)


def fence(address: str, peer: str, security: Security) -> None:
    """Tries to have worker:0 declared dead."""
    channel = connect(address, peer, security)
    request = ps_pb2.FenceRequest(sender=common_pb2.Sender(task="chief:0"), task="worker:0", incarnation=1 << 40)
    try:
        ps_pb2_grpc.ParameterServerStub(channel).Fence(request, timeout=60)
    except grpc.RpcError as error:
        raise error_from_rpc(error, peer) from None
    finally:
        channel.close()


def test_a_token_keeps_others_out_and_is_printed_nowhere(cluster: Start, tmp_path: Path) -> None:
    secret = TOKEN.replace(" ", "-")
    (tmp_path / "token").write_text(secret)
    (tmp_path / "token").chmod(0o600)
    (tmp_path / "wrong").write_text(secret[::-1])
    running = Running(cluster, tmp_path, "--token-file", tmp_path / "token")
    for flags, reason in (
        ([], "needs a caller that identifies itself"),
        (["--token-file", tmp_path / "wrong"], "compare"),
    ):
        refused = status(running.chief, *flags)
        assert refused.returncode == 1 and reason in refused.stderr
    with pytest.raises(IdentityError, match="token is not that of this job"):
        fence(running.ps, "ps:0", with_token("chief:0"))
    assert json.loads(status(running.chief, "--token-file", tmp_path / "token").stdout)["ready"]
    done = running.finish(with_token("operator", secret))
    assert "with a token" in done.stderr
    written = [path for path in running.job.folder.rglob("*") if path.is_file()]
    assert len(written) > 3 and not [path for path in written if secret.encode() in path.read_bytes()]


@pytest.mark.thorough
def test_by_hand_and_without_a_chief_of_its_own(tasks: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    folder = make_certificates(tmp_path / "certificates", *TASKS)
    (tmp_path / "until").touch()
    addresses = free_addresses(2)
    for role in ("worker", "ps"):
        config = {"cluster": {"worker": addresses[:1], "ps": addresses[1:]}, "task": {"type": role, "index": 0}}
        environment = {
            **os.environ,
            "TF_CONFIG": json.dumps(config),
            "PYTHONPATH": str(SCRIPTS.parents[2]),
            "OMP_NUM_THREADS": "1",
            "STRATAGEM_TLS": str(folder),
        }
        command = [sys.executable, str(SCRIPTS / "train_until.py"), "--until", str(tmp_path / "until")]
        tasks.append(forks.Popen(command, env=environment, stderr=subprocess.PIPE))
    errors = [task.communicate(timeout=240)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], "\n".join(errors)
    assert "chief:0 listening on" in errors[0] and "with TLS" in errors[0] and "with TLS" in errors[1]


def test_a_task_without_its_certificate_ends_with_the_way_out(tmp_path: Path) -> None:
    folder = make_certificates(tmp_path / "certificates", "worker:1")
    command = [sys.executable, "-m", "stratagem.cli", "ps", "--task", "ps:0", "--chief", "127.0.0.1:9"]
    done = forks.run([*command, "--tls", str(folder)], timeout=60)
    assert done.returncode == 2
    assert "no TLS for ps:0" in done.stderr and "`stratagem certs issue ps:0`" in done.stderr
