"""A server listens beyond loopback only with TLS or --insecure."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stratagem.errors import ConfigurationError
from stratagem.rpc.binding import (
    advertised_address,
    check_binding,
    connected,
    free_port,
    is_loopback,
    listening,
    warn_of_loopback,
)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.1", "example.org", "127.0.0.1.example.org"])
def test_beyond_loopback_needs_tls_or_insecure(host: str) -> None:
    with pytest.raises(ConfigurationError, match="--tls DIR") as refused:
        check_binding(f"{host}:2222", insecure=False)
    assert "--insecure" in str(refused.value) and "127.0.0.1" in str(refused.value)
    check_binding(f"{host}:2222", insecure=True)
    check_binding(f"{host}:2222", insecure=False, tls=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "[::1]", "localhost"])
def test_loopback_needs_nothing(host: str) -> None:
    check_binding(f"{host}:0", insecure=False)
    assert is_loopback(host)


@pytest.mark.parametrize("port", ["", ":", ":x", ":70000", ":-1", ":" + "9" * 5000])
def test_what_is_no_address_is_refused_whatever_was_allowed(port: str) -> None:
    with pytest.raises(ConfigurationError, match="expected an address"):
        check_binding(f"127.0.0.1{port}", insecure=True, tls=True)


@pytest.mark.parametrize(
    ("advertise", "bound", "told"),
    [
        ("", "127.0.0.1:4000", "127.0.0.1:4000"),
        ("pod:2222", "0.0.0.0:2222", "pod:2222"),
        ("node7:0", "0.0.0.0:4123", "node7:4123"),
        ("[fd00::1]:0", "[::]:4123", "[fd00::1]:4123"),
        ("gate:80", "10.0.0.1:2222", "gate:80"),
    ],
)
def test_what_others_are_told(advertise: str, bound: str, told: str) -> None:
    assert advertised_address(advertise, bound) == told


@pytest.mark.parametrize(("advertise", "bound"), [("", "0.0.0.0:1"), ("", "[::]:1"), ("0.0.0.0:1", "127.0.0.1:1")])
def test_an_address_that_nobody_can_call_is_refused(advertise: str, bound: str) -> None:
    with pytest.raises(ConfigurationError, match="--advertise host:port, or in TF_CONFIG"):
        advertised_address(advertise, bound)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_free_port_is_for_the_server_that_is_to_have_it(host: str) -> None:
    port = free_port(host)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as other, pytest.raises(OSError):
        other.bind((host, port))  # as the kernel binds who asks for any port
    with listening(host, port) as server:
        assert server.getsockname()[1] == port


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="a network of its own wants root")
@pytest.mark.parametrize("loopback", ["true", "ip link set lo up; ip addr del 127.0.0.1/8 dev lo"])
def test_a_machine_without_loopback_is_told_how_to_get_it(loopback: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    words = f'{loopback}; exec "$@"'
    command = ["unshare", "--net", "sh", "-c", words, "sh", sys.executable, "-m", "stratagem.cli", "run", "train.py"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "stratagem: this machine cannot use the address 127.0.0.1" in done.stderr
    assert "ip addr add" in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    with pytest.raises(ConfigurationError, match="STRATAGEM_BIND=ADDRESS:0"):
        free_port("192.0.2.1")


def test_a_name_of_this_machine_that_is_loopback_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Debian writes "127.0.1.1 host-a" into the /etc/hosts of host-a: the others waited in vain for its chief."""
    for bind in ("localhost:0", "127.0.0.1:0", "[::1]:0", "0.0.0.0:0"):
        warn_of_loopback(bind)
    assert not caplog.text
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
    warn_of_loopback("host-a:0")
    assert "host-a resolves to 127.0.1.1 on this machine" in caplog.text


def test_an_address_of_a_name_at_which_nothing_answers_does_not_take_the_time_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lane has seconds to open, and a name in /etc/hosts may have the address of a machine that is gone."""
    with contextlib.ExitStack() as undo:
        there = undo.enter_context(listening("127.0.0.1"))
        port = there.getsockname()[1]
        hole = undo.enter_context(socket.create_server(("127.0.0.2", port), backlog=0))
        for _ in range(2):  # a full queue: the kernel drops who comes next
            waiting = undo.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(hole.getsockname())
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("127.0.0.2", "127.0.0.1")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
        deadline = time.monotonic() + 20.0
        sock = undo.enter_context(connected("two-addresses", port, 20.0))
        assert sock.getpeername() == ("127.0.0.1", port) and sock.gettimeout() == 20.0
        assert time.monotonic() < deadline
