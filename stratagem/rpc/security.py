"""How this process proves who it is and knows who calls: certificates, a token, or neither."""

from __future__ import annotations

import dataclasses
import hmac
import logging
import shlex
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc

from stratagem.cluster.config import RoleConfig
from stratagem.cluster.identity import OPERATOR, check_identity, identity_from_uris
from stratagem.errors import ClusterSpecError, ConfigurationError, IdentityError
from stratagem.rpc.tls_files import Pems, Stamp, TlsFiles, warn_if_open

logger = logging.getLogger(__name__)

TOKEN_KEY = "authorization"
CALLER_KEY = "stratagem-caller"
"""Metadata of a caller without TLS: the token, and who it says it is."""
Declaration = tuple[tuple[str, str], ...]
MIN_CHARACTERS = 16
"""Of a token."""


class Token:
    """Proves that a caller belongs to the job; which task it is, the caller can only declare. A secret that can be sent
    and compared, and is in no log line, ``repr`` or error."""

    def __init__(self, value: str) -> None:
        self._value = value

    @classmethod
    def read(cls, path: str) -> Token:
        """The token in a file; space around it does not count. ConfigurationError: the file cannot be read, or holds no
        token."""
        try:
            text = Path(path).read_text(errors="replace").strip()
        except OSError as error:
            raise ConfigurationError(f"cannot read the token file {path}: {error.strerror}") from None
        if len(text) < MIN_CHARACTERS or not text.isprintable() or not text.isascii() or " " in text:
            raise ConfigurationError(
                f"expected one ASCII word of at least {MIN_CHARACTERS} characters in the token file {path}, got "
                f"{len(text)} characters; make one with: (umask 077; openssl rand -hex 32 > {shlex.quote(path)})"
            )
        warn_if_open(Path(path), "token file")
        return cls(text)

    @property
    def header(self) -> str:
        """What a caller sends as ``authorization``."""
        return f"Bearer {self._value}"

    def matches(self, header: str | bytes) -> bool:
        """Whether ``authorization`` shows this token; takes the same time wherever they differ."""
        shown = header.encode(errors="surrogateescape") if isinstance(header, str) else header
        return hmac.compare_digest(shown, self.header.encode())


@dataclasses.dataclass(frozen=True)
class Security:
    """How a process proves its identity, and what it requires of others."""

    identity: str = ""
    """Its own name: a task id, or "operator"."""
    tls: TlsFiles | None = None
    token: Token | None = None
    insecure: bool = False
    """The user said that the network may be trusted."""

    @property
    def asks_who_calls(self) -> bool:
        """Whether callers have to prove who they are; without, everybody may do everything."""
        return self.tls is not None or self.token is not None

    @property
    def words(self) -> str:
        """What a server says behind its address; empty when it asks nothing."""
        asked = [word for word, has in (("TLS", self.tls), ("a token", self.token)) if has is not None]
        return f", with {' and '.join(asked)}" if asked else ""

    @property
    def allows_clear_text(self) -> bool:
        """Whether payload may travel by ways that know no TLS."""
        return self.tls is None or self.insecure

    @property
    def declaration(self) -> Declaration:
        """The metadata that says who calls, and shows the token; empty without one."""
        return () if self.token is None else ((TOKEN_KEY, self.token.header), (CALLER_KEY, self.identity))

    def certificates(self) -> Stamp:
        """Changes when this process's certificate is renewed; while the files are not complete it does not."""
        try:
            return self.tls.stamp() if self.tls is not None else ()
        except ConfigurationError:
            return ()

    def server_context(self) -> ssl.SSLContext | None:
        """For sockets that come in; None: in the clear."""
        return self.tls.server_context() if self.tls is not None else None

    def client_context(self) -> ssl.SSLContext | None:
        """For sockets that go out; None: in the clear."""
        return self.tls.client_context() if self.tls is not None else None

    def who_calls(self, proven: Mapping[str, Any], metadata: Mapping[str, str | bytes]) -> str:
        """The caller's identity; empty when it has none. ``proven``: ``auth_context()`` of the call, what TLS knows.
        IdentityError: a wrong token, or a name that nobody has."""
        if self.token is not None:
            shown = metadata.get(TOKEN_KEY, "")
            if not shown:
                return ""
            if not self.token.matches(shown):
                raise IdentityError("the token is not that of this job; compare the files given as --token-file")
        if self.tls is not None:
            return identity_from_uris([uri.decode(errors="replace") for uri in proven.get("peer_uri", ())])
        try:
            return check_identity(str(metadata.get(CALLER_KEY, "")))
        except ClusterSpecError as error:
            raise IdentityError(str(error)) from None


OPEN = Security()
"""Neither certificates nor a token: whoever reaches the port may do everything."""


def security_of(config: RoleConfig) -> Security:
    """What a role's configuration says. Errors as :func:`make_security`."""
    return make_security(config.task, config.tls, config.token_file, config.insecure)


def make_security(identity: str, tls: str, token_file: str, insecure: bool = False) -> Security:
    """What these words say. ``tls``: folder of the certificates, ``token_file``: file with the token; empty: none.
    ``insecure``: the network may be trusted. ConfigurationError: certificates or token cannot be used; says why."""
    files = TlsFiles(tls, identity) if tls else None
    if files is not None:
        files.check()
    return Security(identity, files, Token.read(token_file) if token_file else None, insecure)


def operator_security(tls: str, token_file: str, insecure: bool = False) -> Security:
    """As :func:`make_security` for the person at the terminal."""
    return make_security(OPERATOR, tls, token_file, insecure)


def server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """Server's side of gRPC; a renewed certificate is used from the next connection on. ConfigurationError: the files
    cannot be used."""
    used = [tls.stamp()]
    pems = tls.read()

    def renewed() -> Any:
        try:
            if (stamp := tls.stamp()) == used[0]:
                return None
            found = tls.read()
        except ConfigurationError as error:
            _log_elsewhere(logging.WARNING, f"The old certificate stays in use: {error}")
            return None
        used[0] = stamp
        _log_elsewhere(logging.INFO, f"The certificate of {tls.identity} was renewed")
        return _server_configuration(found)

    return grpc.dynamic_ssl_server_credentials(_server_configuration(pems), renewed, require_client_authentication=True)


def _log_elsewhere(level: int, message: str) -> None:
    """Logs from a thread of ours: ``threading`` would remember each of gRPC's threads that logs, for ever."""
    threading.Thread(target=logger.log, args=(level, "%s", message), name="certificate-news", daemon=True).start()


def _server_configuration(pems: Pems) -> Any:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.certificate)], pems.authority)
