"""Certificates at work: a task joins with its own, and every wrong one is refused with the reason in words."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import queue
import shutil
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from stratagem.chief.servers.servers import Server
from stratagem.cluster.config import ServerConfig
from stratagem.cluster.task import Incarnation
from stratagem.errors import (
    ConfigurationError,
    ForbiddenError,
    IdentityError,
    JobStoppedError,
    PeerUnavailableError,
    StratagemError,
)
from stratagem.launch.status import StatusPoller, fetch_stack, fetch_status
from stratagem.rpc import channels
from stratagem.rpc import session as rpc_session
from stratagem.rpc.errors import error_from_rpc
from stratagem.rpc.generated import chief_pb2, chief_pb2_grpc, ps_pb2
from stratagem.rpc.handshake import explain_refusal
from stratagem.rpc.security import OPEN, Security, make_security
from stratagem.rpc.server import RunningServer, serve
from stratagem.rpc.session import SessionClient
from stratagem.rpc.tls_files import Pems, TlsFiles
from stratagem.worker import chief_client
from stratagem.worker.chief_client import ChiefClient
from tests.contract.rpc.securities import expire, make_certificates, renew, with_tls, with_token
from tests.polling import until

# The poller thread of grpc.aio lives as long as the process; started here, before the first test looks for leaks.
grpc.aio.init_grpc_aio()  # type: ignore[attr-defined]  # the stubs lack it

TASKS = ("chief:0", "ps:0", "worker:0", "worker:1", "operator")


class Welcoming(chief_pb2_grpc.ChiefServicer):
    """Welcomes whoever joins, until it says goodbye or the test sends it away."""

    def __init__(self) -> None:
        self.joined: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.told: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.send_away = threading.Event()
        self.save_s, self.has_saved = 0.6, threading.Event()  # a slow disk

    def Session(self, request_iterator: Any, context: Any) -> Iterator[chief_pb2.SessionEvent]:
        join = next(request_iterator).join
        welcome = chief_pb2.Welcome(incarnation=join.resume_incarnation or 3, heartbeat_interval_s=0.05)
        yield chief_pb2.SessionEvent(welcome=welcome)
        self.joined.put(join.task)
        for request in request_iterator:
            if request.HasField("goodbye"):
                self.told.put(request.goodbye.message)
                break
            if self.send_away.is_set():
                self.send_away.clear()
                break

    def Agree(self, request: Any, context: Any) -> chief_pb2.AgreeReply:
        threading.Event().wait(0.5)  # for somebody who does not come
        context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "")
        raise AssertionError

    def SaveCheckpoint(self, request: Any, context: Any) -> chief_pb2.SaveCheckpointReply:
        self.told.put("save")
        self.has_saved.wait(self.save_s)
        return chief_pb2.SaveCheckpointReply(path="step-1")

    def NextUnits(self, request: Any, context: Any) -> chief_pb2.NextUnitsReply:
        self.told.put("next")
        threading.Event().wait(0.6 if self.told.qsize() < 3 else 0)  # for the first checkpoint
        return chief_pb2.NextUnitsReply(end=True)

    def GetStatus(self, request: Any, context: Any) -> chief_pb2.GetStatusReply:
        return chief_pb2.GetStatusReply(chief_epoch=7)


@contextlib.contextmanager
def chief(security: Security, bind: str = "127.0.0.1:0") -> Iterator[tuple[Welcoming, str]]:
    servicer = Welcoming()  # type: ignore[abstract]  # the others are not called
    running = serve(
        ServerConfig(task="ps:0", bind=bind, max_message_bytes=1 << 20),
        lambda server: chief_pb2_grpc.add_ChiefServicer_to_server(servicer, server),
        services=["stratagem.Chief"],
        security=security,
    )
    yield servicer, running.address
    running.stop(0)


def why_not(address: str, task: str, security: Security) -> StratagemError:
    """With what error a task that wants to join ends."""
    session = SessionClient(address, task, "", security=security)
    try:
        with pytest.raises(StratagemError) as refused:
            session.start(20.0)
        return refused.value
    finally:
        session.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_certificates(tmp_path / "ours", *TASKS)


def test_a_task_joins_with_its_certificate(folder: Path) -> None:
    with chief(with_tls(folder, "chief:0")) as (servicer, address):
        session = SessionClient(address, "worker:1", "", security=with_tls(folder, "worker:1"))
        assert session.start(30.0) == 3 and servicer.joined.get(timeout=30) == "worker:1"
        assert explain_refusal(address, "chief:0", with_tls(folder, "worker:1")) == ""
        session.goodbye(0)


@pytest.mark.parametrize("waits_for_units", [False, True])
def test_who_waits_for_others_looks_after_what_they_may_wait_for(
    monkeypatch: pytest.MonkeyPatch, waits_for_units: bool
) -> None:
    """The lead waited in an agreement, or for units of one who had died, for what waited for it: only the lead could
    give a ps its values, or say what those hold that came since."""
    monkeypatch.setattr(chief_client, "PATIENCE_S", 0.05)
    with chief(OPEN) as (_, address):
        session = SessionClient(address, "worker:1", "")
        session.start(30.0)
        client, looked = ChiefClient(session, 30.0), []

        def look() -> None:
            looked.append(1)
            if len(looked) == 2:
                raise InterruptedError

        client.meanwhile = look
        with pytest.raises(InterruptedError):
            if waits_for_units:
                client.next_units(chief_pb2.NextUnitsRequest(wait=True))
            else:
                client.agree("load 1", 0, 0)
        session.goodbye(0)


def test_a_chief_that_takes_long_is_no_chief_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that took longer than peer_timeout_s, the first one too, ended every worker."""
    monkeypatch.setattr(chief_client, "PATIENCE_S", 0.2)
    with chief(OPEN) as (servicer, address):
        session = SessionClient(address, "worker:1", "")
        session.start(30.0)
        client = ChiefClient(session, 0.1)
        assert client.save_checkpoint("x") == "step-1"
        assert servicer.told.get() == "save" and servicer.told.empty(), "one call: another begins another checkpoint"
        assert client.next_units(chief_pb2.NextUnitsRequest()).end
        servicer.save_s = 60.0  # the end of the job comes first, however late that is
        threading.Timer(0.1, session.end, ["over"]).start()
        with pytest.raises(JobStoppedError):
            client.save_checkpoint("x")
        servicer.has_saved.set()
        session.goodbye(0)


def test_a_folder_of_odd_bytes_is_refused() -> None:
    """A bare UnicodeEncodeError of the message ended the worker."""
    with chief(OPEN) as (_, address):
        session = SessionClient(address, "worker:1", "")
        session.start(30.0)
        session.goodbye(0)
        client = ChiefClient(session, 30.0)  # which gets no further than to its message
        for verb in (client.save_checkpoint, client.check_folder):
            with pytest.raises(ConfigurationError, match="no UTF-8"):
                verb("/a\udce4")


def test_who_saves_when_the_script_has_ended_hears_the_way_out() -> None:
    """A checkpoint by an atexit handler was not written: "worker:1 has left the cluster", and no more."""
    with chief(OPEN) as (_, address):
        session = SessionClient(address, "worker:1", "")
        session.start(30.0)
        client = ChiefClient(session, 30.0)
        session.goodbye(0)
        session.close()
        with pytest.raises(PeerUnavailableError, match="before the script ends, not in an atexit handler"):
            client.save_checkpoint("")


def test_an_error_that_names_a_file_by_odd_bytes_is_told() -> None:
    """The worker ended by an error of ours instead, and its chief took it for lost."""
    with chief(OPEN) as (servicer, address):
        session = SessionClient(address, "worker:1", "")
        session.start(30.0)
        session.goodbye(3, "no such file: " + os.fsdecode(b"caf\xe9.csv"))
        assert servicer.told.get(timeout=30) == "no such file: caf\\udce9.csv"


def test_a_task_joins_with_the_token() -> None:
    with chief(with_token("chief:0")) as (servicer, address):
        session = SessionClient(address, "worker:1", "", security=with_token("worker:1"))
        assert session.start(30.0) == 3 and servicer.joined.get(timeout=30) == "worker:1"
        session.goodbye(0)


def test_who_has_finished_waits_for_ever_for_a_chief_that_is_away_where_it_is_told_to(tmp_path: Path) -> None:
    """An infinite peer_timeout_s was an OverflowError of the thread that was waited for."""
    where = tmp_path / "chief.address"
    with chief(OPEN) as (_, address):
        where.write_text(address)
        session = SessionClient(f"file:{where}", "worker:1", "", chief_timeout_s=math.inf)
        session.start(30.0)
    with ThreadPoolExecutor() as pool:
        said = pool.submit(session.goodbye, 0, timeout_s=0.1)
        with chief(OPEN) as (_, address):
            where.write_text(address)
            said.result(30.0)


def test_a_task_whose_chief_is_away_says_so_once_and_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was silent until it gave up."""
    monkeypatch.setattr(rpc_session, "SILENCE_S", 0.1)
    monkeypatch.setattr(rpc_session, "RECONNECT_PAUSE_S", 0.02)
    caplog.set_level(logging.WARNING, rpc_session.logger.name)
    where = tmp_path / "chief.address"
    with chief(OPEN) as (_, address):
        where.write_text(address)
        session = SessionClient(f"file:{where}", "ps:0", "", chief_timeout_s=60.0)
        session.start(30.0)
    attempts: list[StratagemError] = []
    handle_loss = session._handle_loss

    def counted(error: StratagemError) -> None:
        handle_loss(error)
        attempts.append(error)

    monkeypatch.setattr(session, "_handle_loss", counted)
    until(lambda: caplog.messages)
    until(lambda: len(attempts) > 5)
    with chief(OPEN) as (servicer, address):
        where.write_text(address)
        assert servicer.joined.get(timeout=30) == "ps:0"
        until(lambda: len(caplog.messages) > 1)
        session.goodbye(0)
    waits, back = caplog.messages
    assert waits.startswith(f"Waiting for the chief at file:{where}, ") and " s more: chief cannot be reached" in waits
    assert back == f"The chief is back, at {address}"


def test_who_has_finished_says_that_its_chief_has_not_heard_it(caplog: pytest.LogCaptureFixture) -> None:
    with chief(OPEN) as (_, address):
        session = SessionClient(address, "worker:1", "", chief_timeout_s=0.5)
        session.start(30.0)
    session.goodbye(0, timeout_s=0.0)
    assert "worker:1 will count as lost" in caplog.text


def test_a_chief_at_an_address_to_which_no_token_is_sent_ends_the_wait_for_it(tmp_path: Path) -> None:
    """The thread of the session ended without a word: a task waited for its start_timeout_s, one that had joined for
    ever."""
    said = "127.0.0.1:1,192.0.2.7:4444"
    assert isinstance(why_not(said, "worker:1", with_token("worker:1")), ConfigurationError)
    where = tmp_path / "chief.address"
    with chief(with_token("chief:0")) as (_, address):
        where.write_text(address)
        session = SessionClient(f"file:{where}", "worker:1", "", chief_timeout_s=0.5, security=with_token("worker:1"))
        session.start(30.0)
        where.write_text("192.0.2.7:4444")
    stopped = session.wait_stopped(30.0)
    session.close()
    assert "refusing to send the token to 192.0.2.7:4444" in str(stopped)


def test_certificate_and_token_together_are_both_asked_for(folder: Path) -> None:
    token = with_token("").token
    with chief(Security("chief:0", TlsFiles(folder, "chief:0"), token)) as (_, address):
        assert fetch_status(address, 10, Security("operator", TlsFiles(folder, "operator"), token)).chief_epoch == 7
        with pytest.raises(IdentityError, match="identifies itself"):
            fetch_status(address, 10, with_tls(folder, "operator"))
        with pytest.raises(IdentityError, match="in the name of worker:1"):
            raise why_not(address, "worker:1", Security("worker:0", TlsFiles(folder, "worker:0"), token))


def test_a_wrong_token_says_so() -> None:
    with chief(with_token("chief:0")) as (_, address):
        error = why_not(address, "worker:1", with_token("worker:1", "another token of tests"))
        assert isinstance(error, IdentityError) and "compare the files given as --token-file" in str(error)
        error = why_not(address, "worker:1", OPEN)
        assert isinstance(error, IdentityError) and "this one did not: give --token-file" in str(error)


def test_another_tasks_certificate_cannot_join_in_its_name(folder: Path) -> None:
    with chief(with_tls(folder, "chief:0")) as (_, address):
        error = why_not(address, "worker:1", with_tls(folder, "worker:0"))
    assert isinstance(error, IdentityError)
    assert "worker:0 may not call Session in the name of worker:1" in str(error)


def test_a_workers_certificate_is_no_operators(folder: Path) -> None:
    with chief(with_tls(folder, "chief:0")) as (_, address):
        assert fetch_status(address, 10, with_tls(folder, "operator")).chief_epoch == 7
        with pytest.raises(ForbiddenError, match="ps:0 may not call GetStatus: it is for evaluator, operator, worker"):
            fetch_status(address, 10, with_tls(folder, "ps:0"))
        with pytest.raises(IdentityError, match="is chief:0 according to its certificate, but worker:1 was expected"):
            raise_explained(address, "worker:1", with_tls(folder, "operator"))
        with pytest.raises(IdentityError, match="is chief:0 according to its certificate, but worker:1 was expected"):
            fetch_stack(address, "worker:1", 10, with_tls(folder, "operator"))


def raise_explained(address: str, peer: str, security: Security) -> None:
    raise IdentityError(explain_refusal(address, peer, security))


def test_an_expired_certificate_on_either_side(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = shutil.copytree(folder, folder.parent / "old")
    for task in ("chief:0", "worker:1"):
        expire(old, task, monkeypatch)
    with pytest.raises(ConfigurationError, match=r"worker-1\.crt cannot be used by worker:1: .* has expired.*--renew"):
        make_security("worker:1", str(old), "")
    with chief(with_tls(folder, "chief:0")) as (_, address), unchecked(monkeypatch):
        error = why_not(address, "worker:1", with_tls(old, "worker:1"))
        assert isinstance(error, IdentityError)
        assert "chief:0 at 127.0.0.1" in str(error) and "refused this task's certificate" in str(error)
        assert "has expired" in str(error)
    with unchecked(monkeypatch), chief(with_tls(old, "chief:0")) as (_, address):
        error = why_not(address, "worker:1", with_tls(folder, "worker:1"))
        assert isinstance(error, IdentityError)
        assert "the certificate of chief:0 at" in str(error) and "has expired" in str(error)


@contextlib.contextmanager
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that got by its own check, as one does whose certificate ends while it runs."""

    def read(files: TlsFiles) -> Pems:
        paths = (files._authority, files._certificate, files._key)
        return Pems(*(path.read_bytes() for path in paths))

    with monkeypatch.context() as patch:
        patch.setattr(TlsFiles, "read", read)
        yield


def test_another_authority_on_either_side(folder: Path, tmp_path: Path) -> None:
    strangers = make_certificates(tmp_path / "strangers", *TASKS)
    with chief(with_tls(folder, "chief:0")) as (_, address):
        error = why_not(address, "worker:1", with_tls(strangers, "worker:1"))
        assert isinstance(error, IdentityError) and "was issued by another certificate authority" in str(error)
        mixed = shutil.copytree(strangers, tmp_path / "mixed")
        (mixed / "ca.crt").write_bytes((folder / "ca.crt").read_bytes() + (mixed / "ca.crt").read_bytes())
        error = why_not(address, "worker:1", with_tls(mixed, "worker:1"))
        assert isinstance(error, IdentityError) and "refused this task's certificate" in str(error)


def test_an_authority_is_replaced_by_way_of_a_file_with_both(folder: Path, tmp_path: Path) -> None:
    new = make_certificates(tmp_path / "new", *TASKS)
    both = (folder / "ca.crt").read_bytes() + (new / "ca.crt").read_bytes()
    for path in (folder, new):
        (path / "ca.crt").write_bytes(both)
    for servers, clients in ((folder, new), (new, folder)):
        with chief(with_tls(servers, "chief:0")) as (_, address):
            assert fetch_status(address, 10, make_security("operator", str(clients), "")).chief_epoch == 7


def test_one_side_without_tls(folder: Path) -> None:
    with chief(with_tls(folder, "chief:0")) as (_, address):
        error = why_not(address, "worker:1", OPEN)
        assert isinstance(error, IdentityError) and "speaks TLS: give --tls" in str(error)
    with chief(OPEN) as (_, address):
        error = why_not(address, "worker:1", with_tls(folder, "worker:1"))
        assert isinstance(error, IdentityError) and "does not speak TLS: start it with --tls too" in str(error)


def test_a_server_of_another_role_is_not_taken_for_the_chief(folder: Path) -> None:
    with chief(with_tls(folder, "worker:0")) as (_, address):
        error = why_not(address, "worker:1", with_tls(folder, "worker:1"))
    assert isinstance(error, IdentityError)
    assert "is worker:0 according to its certificate, but chief:0 was expected there" in str(error)


def test_the_certificate_of_another_task_is_refused_before_anything_listens(folder: Path) -> None:
    for name in ("ps-0.crt", "ps-0.key"):
        shutil.copy(folder / name.replace("ps-0", "worker-1"), folder / name)
    with pytest.raises(ConfigurationError, match=r"ps-0\.crt cannot be used by ps:0: it is the certificate of another"):
        make_security("ps:0", str(folder), "")


def serial_of(address: str, security: Security) -> str:
    """Serial number of the certificate that a server shows to a new connection."""
    context = security.client_context()
    assert context is not None
    context.check_hostname = False
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as sock, context.wrap_socket(sock) as tls:
        return str((tls.getpeercert() or {})["serialNumber"])


def test_a_server_takes_up_a_renewed_certificate_and_keeps_its_connections(folder: Path) -> None:
    me = with_tls(folder, "operator")
    with chief(with_tls(folder, "chief:0")) as (_, address):
        channel = channels.connect(address, "chief:0", me)
        stub = chief_pb2_grpc.ChiefStub(channel)
        stub.GetStatus(chief_pb2.GetStatusRequest(), timeout=30)
        old = serial_of(address, me)
        assert serial_of(address, me) == old
        renew(folder, "chief:0")
        assert serial_of(address, me) != old
        stub.GetStatus(chief_pb2.GetStatusRequest(), timeout=30)
        channel.close()


def test_a_broken_renewal_leaves_the_old_certificate_in_use(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    me = with_tls(folder, "operator")
    with chief(with_tls(folder, "chief:0")) as (_, address):
        old = serial_of(address, me)
        shutil.copy(folder / "worker-0.crt", folder / "chief-0.crt")  # not the key's
        assert serial_of(address, me) == old
        until(lambda: "stays in use" in caplog.text)
        assert "key and certificate do not belong together" in caplog.text
        renew(folder, "chief:0")
        assert serial_of(address, me) != old


def test_a_session_comes_back_with_a_renewed_certificate(folder: Path, tmp_path: Path) -> None:
    """The authority is replaced as well: a channel made before could not come back."""
    with chief(with_tls(folder, "chief:0")) as (servicer, address):
        session = SessionClient(address, "worker:1", "", security=with_tls(folder, "worker:1"))
        assert session.start(30.0) == 3 and servicer.joined.get(timeout=30) == "worker:1"
        before, client = session.channel, ChiefClient(session, 10.0)
        assert client.status().chief_epoch == 7
        strangers = make_certificates(tmp_path / "strangers", *TASKS)
        for path in strangers.iterdir():
            path.replace(folder / path.name)
        servicer.send_away.set()
        assert servicer.joined.get(timeout=30) == "worker:1"
        assert session.channel is not before and session.incarnation == 3
        assert client.status().chief_epoch == 7
        session.goodbye(0)


def describing(security: Security, bind: str = "127.0.0.1:0") -> RunningServer:
    """A ps that describes its units and does nothing else."""
    describe = grpc.unary_unary_rpc_method_handler(
        lambda request, context: ps_pb2.DescribeUnitsReply(step=5),
        ps_pb2.DescribeUnitsRequest.FromString,
        ps_pb2.DescribeUnitsReply.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler("stratagem.ParameterServer", {"DescribeUnits": describe})
    return serve(
        ServerConfig(task="ps:0", bind=bind, max_message_bytes=1 << 20),
        lambda server: server.add_generic_rpc_handlers((handler,)),
        services=["stratagem.ParameterServer"],
        security=security,
    )


def test_the_chief_comes_back_to_a_ps_with_a_renewed_certificate(folder: Path, tmp_path: Path) -> None:
    async def check() -> None:
        server = describing(with_tls(folder, "ps:0"))
        life = Incarnation("ps:0", 1)
        client = Server(life, server.address, chief="chief:0", chief_epoch=1, security=with_tls(folder, "chief:0"))
        assert (await client.describe_units()).step == 5
        server.stop(0)
        for path in make_certificates(tmp_path / "strangers", *TASKS).iterdir():
            path.replace(folder / path.name)
        server = describing(with_tls(folder, "ps:0"), server.address)
        assert (await client.describe_units()).step == 5
        await client.close()
        server.stop(0)

    asyncio.run(check())


def test_a_poller_of_the_launcher_has_an_identity(folder: Path) -> None:
    with chief(with_tls(folder, "chief:0")) as (_, address):
        for security, answers in ((with_tls(folder, "operator"), True), (with_tls(folder, "ps:0"), False)):
            poller = StatusPoller(address, security=security)
            assert poller.ask(10) is answers
            poller.close()


def test_a_poller_comes_back_with_a_renewed_certificate(folder: Path, tmp_path: Path) -> None:
    with chief(with_tls(folder, "chief:0")) as (_, address):
        poller = StatusPoller(address, security=with_tls(folder, "operator"))
        assert poller.ask(10)
    for path in make_certificates(tmp_path / "strangers", *TASKS).iterdir():
        path.replace(folder / path.name)
    with chief(with_tls(folder, "chief:0"), address):
        until(lambda: poller.ask(1))
        poller.close()


def test_a_token_stays_on_this_machine_unless_told_otherwise(folder: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"refusing to send the token to 192\.0\.2\.1:9 unencrypted.*--insecure"
    ):
        channels.connect("192.0.2.1:9", "chief:0", with_token("worker:0"))
    with pytest.raises(ConfigurationError, match="refusing to send the token"):
        channels.connect_aio("192.0.2.1:9", "chief:0", with_token("worker:0"))
    token = with_token("").token
    channels.connect("192.0.2.1:9", "chief:0", Security("worker:0", token=token, insecure=True)).close()
    channels.connect("192.0.2.1:9", "chief:0", Security("worker:0", TlsFiles(folder, "worker:0"), token)).close()


def test_a_refusal_keeps_its_class_over_the_wire(folder: Path) -> None:
    with chief(with_tls(folder, "chief:0")) as (_, address):
        channel = channels.connect(address, "chief:0", with_tls(folder, "ps:0"))
        with pytest.raises(grpc.RpcError) as refused:
            chief_pb2_grpc.ChiefStub(channel).NextUnits(chief_pb2.NextUnitsRequest(), timeout=30)
        channel.close()
    error = error_from_rpc(refused.value, "chief:0")
    assert type(error) is ForbiddenError and "ps:0 may not call NextUnits: it is for worker" in str(error)
