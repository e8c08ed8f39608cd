"""A server listens beyond loopback only with TLS or --insecure."""

from __future__ import annotations

import pytest

from stratagem.errors import ConfigurationError
from stratagem.rpc.binding import check_binding, is_loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.1", "example.org", "127.0.0.1.example.org", ""])
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


@pytest.mark.parametrize("bind", ["127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:70000", "127.0.0.1:-1"])
def test_what_is_no_address_is_refused_whatever_was_allowed(bind: str) -> None:
    with pytest.raises(ConfigurationError, match="expected host:port"):
        check_binding(bind, insecure=True, tls=True)
