"""Why a connection fails: gRPC reports a refused TLS handshake like an absent server."""

from __future__ import annotations

import contextlib
import socket
import ssl

from stratagem.cluster.identity import server_name
from stratagem.cluster.spec import split_address
from stratagem.errors import ConfigurationError, StratagemError
from stratagem.rpc.security import Security
from stratagem.rpc.tls_files import TlsFiles, identity_of, is_no_tls, reason_of, refusal_of

TIMEOUT_S = 1.0
"""For each answer."""


def explain_refusal(address: str, peer: str, security: Security) -> str:
    """Tries a handshake with ``peer`` at ``address``. Returns the reason in words; empty when TLS is not the reason."""
    with contextlib.suppress(OSError, StratagemError):
        if security.tls is None:
            return f"{peer} at {address} speaks TLS: give --tls DIR" if _speaks_tls(address) else ""
        return _try(address, peer, security.tls)
    return ""


def _try(address: str, peer: str, files: TlsFiles) -> str:
    context = files.client_context()
    context.set_alpn_protocols(["h2"])
    try:
        with _connect(address) as sock, context.wrap_socket(sock, server_hostname=server_name(peer)) as tls:
            # gRPC's first frame comes, unless our certificate was refused: that shows after the handshake only.
            refused = "by closing the connection" if tls.recv(1) == b"" else ""
    except ConnectionError:
        return ""
    except ssl.SSLCertVerificationError as error:
        owner = _owner(address, context)
        if owner and owner != peer:
            return f"the server at {address} is {owner} according to its certificate, but {peer} was expected there"
        return f"the certificate of {peer} at {address} was refused: {reason_of(error)}"
    except ssl.SSLError as error:
        if is_no_tls(error):
            return f"{peer} at {address} does not speak TLS: start it with --tls too"
        refused = refusal_of(error)
    if not refused:
        return ""
    try:
        files.check()
    except ConfigurationError as error:  # it was good when this task started
        return f"{peer} at {address} refused this task's certificate: {error}"
    return (
        f"{peer} at {address} refused this task's certificate ({refused}): it likely comes from another certificate "
        "authority than the one in its ca.crt"
    )


def _owner(address: str, context: ssl.SSLContext) -> str:
    """Whose certificate the server has, if it is of our authority and valid."""
    context.check_hostname = False
    with contextlib.suppress(OSError), _connect(address) as sock, context.wrap_socket(sock) as tls:
        return identity_of(tls.getpeercert())
    return ""


def _speaks_tls(address: str) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with _connect(address) as sock, context.wrap_socket(sock):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")


def _connect(address: str) -> socket.socket:
    return socket.create_connection(split_address(address), TIMEOUT_S)
