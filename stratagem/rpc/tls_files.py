"""The certificates of one identity in a folder: read, tried before use, and reread when renewed."""

from __future__ import annotations

import dataclasses
import logging
import os
import shlex
import ssl
import stat
import time
from pathlib import Path
from typing import Any

from stratagem.cluster.identity import file_stem, identity_from_uris, server_name
from stratagem.errors import ConfigurationError

logger = logging.getLogger(__name__)

AUTHORITY_FILE = "ca.crt"
SHORT_S = 7 * 86_400
"""A certificate that ends sooner is worth a warning."""
Stamp = tuple[tuple[int, int, int], ...]

# What OpenSSL means, in words for the person at the terminal; refusals by number of its X509_V_ERR_*.
_REFUSALS = {
    9: "the certificate is not valid yet; compare the clocks",
    10: "the certificate has expired",
    62: "it is the certificate of another task",
    **dict.fromkeys((2, 18, 19, 20, 21, 7, 30), "the certificate was issued by another certificate authority"),
}
_REASONS = {
    "KEY_VALUES_MISMATCH": "key and certificate do not belong together",
    "NO_START_LINE": "it is not PEM",
    "PEM_LIB": "it is not PEM",
    "NO_CERTIFICATE_OR_CRL_FOUND": "the authority's file holds no certificate",
    "BAD_PASSWORD_READ": "the key is encrypted; Stratagem takes keys without a password",
}
_ALERTS = {
    "UNKNOWN_CA": "it was issued by another certificate authority",
    "CERTIFICATE_EXPIRED": "it has expired",
    "CERTIFICATE_REQUIRED": "there was none",
    "BAD_CERTIFICATE": "it is not valid",
    "CERTIFICATE_UNKNOWN": "it is not valid",
    "UNSUPPORTED_CERTIFICATE": "it is not valid",
    "DECRYPT_ERROR": "it was issued by another certificate authority of the same name",
}


@dataclasses.dataclass(frozen=True)
class Pems:
    """The content of the files, as gRPC takes it."""

    authority: bytes
    certificate: bytes
    key: bytes = dataclasses.field(repr=False)


class TlsFiles:
    """``ca.crt``, ``<task>.crt`` and ``<task>.key`` in a folder; ``identity`` is their owner, for example
    "worker:1"."""

    def __init__(self, folder: str | Path, identity: str) -> None:
        self.identity = identity
        self._folder = Path(folder)
        self._authority = self._folder / AUTHORITY_FILE
        self._certificate = self._folder / f"{file_stem(identity)}.crt"
        self._key = self._folder / f"{file_stem(identity)}.key"
        self._last: Pems | None = None

    def stamp(self) -> Stamp:
        """Changes when a file is replaced; ``ConfigurationError`` where one is missing."""
        try:
            facts = [path.stat() for path in (self._authority, self._certificate, self._key)]
        except OSError as error:
            raise self._missing(error) from None
        return tuple((fact.st_ino, fact.st_mtime_ns, fact.st_size) for fact in facts)

    def read(self) -> Pems:
        """The files, after :meth:`check`. ConfigurationError: as :meth:`check`, or somebody is replacing them right
        now."""
        before = self.stamp()
        self.check()
        try:
            pems = Pems(self._authority.read_bytes(), self._certificate.read_bytes(), self._key.read_bytes())
        except OSError as error:
            raise self._missing(error) from None
        if self.stamp() != before:
            raise ConfigurationError(f"the certificates in {self._folder} are being replaced; try again")
        self._last = pems
        return pems

    def read_or_keep(self) -> Pems:
        """The files; while they cannot be used, what they held when they last could. ConfigurationError: they never
        could."""
        try:
            return self.read()
        except ConfigurationError as error:
            if self._last is None:
                raise
            logger.warning("The old certificate stays in use: %s", error)
            return self._last

    def check(self) -> None:
        """Tries the certificate against itself, as peers will: a TLS handshake in memory. ConfigurationError: it is
        missing, expired, of another authority or of another task; says which."""
        self.stamp()
        try:
            shown = _handshake(self.server_context(), self.client_context(), server_name(self.identity))
        except ssl.SSLError as error:
            check_authority(self._authority)
            raise ConfigurationError(
                f"{self._certificate} cannot be used by {self.identity}: {reason_of(error)}. {self._advice()}"
            ) from None
        if (owner := identity_of(shown)) != self.identity:
            raise ConfigurationError(
                f"{self._certificate} cannot be used by {self.identity}: it is the certificate of "
                f"{owner or 'no task'}. {self._advice()}"
            )
        left_s = ssl.cert_time_to_seconds(shown["notAfter"]) - time.time()
        if left_s < SHORT_S:
            logger.warning("The certificate of %s ends in %.1f days: renew it", self.identity, left_s / 86_400)
        warn_if_open(self._key, "key")

    def server_context(self) -> ssl.SSLContext:
        """For the server's side of a socket; asks for a certificate of the same authority. ``ConfigurationError``: the
        files cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return self._load(context)

    def client_context(self) -> ssl.SSLContext:
        """For the client's side of a socket; ``server_hostname`` is :func:`stratagem.cluster.identity.server_name`.
        Errors as :meth:`server_context`."""
        return self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_verify_locations(self._authority)
            context.load_cert_chain(self._certificate, self._key, password="")  # else OpenSSL asks at the terminal
        except ssl.SSLError as error:
            raise ConfigurationError(
                f"cannot use {self._certificate} with {self._key.name} and {AUTHORITY_FILE}: {reason_of(error)}. "
                f"{self._advice()}"
            ) from None
        except OSError as error:
            raise self._missing(error) from None
        return context

    def _missing(self, error: OSError) -> ConfigurationError:
        return ConfigurationError(
            f"no TLS for {self.identity}: {error.filename or self._folder}: {error.strerror}. {self._advice()}"
        )

    def _advice(self) -> str:
        renew = "--renew " if self._certificate.exists() else ""
        return f"`stratagem certs issue {renew}{self.identity}` makes its certificate; it belongs in {self._folder}"


def check_authority(file: Path) -> None:
    """Raises ``ConfigurationError`` where the authority in a file has expired, which takes its certificates along."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(file)
    ends = [authority["notAfter"] for authority in context.get_ca_certs()]
    if ends and all(ssl.cert_time_to_seconds(str(end)) < time.time() for end in ends):
        raise ConfigurationError(
            f"the certificate authority {file} has expired ({', '.join(map(str, ends))}): `stratagem certs init` makes "
            "a new one in a new folder, and all tasks need certificates from it"
        )


def identity_of(certificate: dict[str, Any] | None) -> str:
    """The identity in a certificate as ``SSLSocket.getpeercert`` gives it; empty: none."""
    names = (certificate or {}).get("subjectAltName", ())
    return identity_from_uris([value for kind, value in names if kind == "URI"])


def _handshake(server_context: ssl.SSLContext, client_context: ssl.SSLContext, name: str) -> dict[str, Any]:
    """Both sides in memory; returns what the server sees of the client's certificate."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context.wrap_bio(up, down, server_side=True)
    client = client_context.wrap_bio(down, up, server_hostname=name)
    waiting = [client, server]
    while waiting:
        for side in tuple(waiting):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(side)
    shown: dict[str, Any] = server.getpeercert() or {}
    return shown


def reason_of(error: ssl.SSLError) -> str:
    """Why a certificate or a file was refused here."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _REFUSALS.get(error.verify_code, error.verify_message)
    return _REASONS.get(error.reason or "", (error.reason or str(error)).replace("_", " ").lower())


def refusal_of(error: ssl.SSLError) -> str:
    """Why the other side refused our certificate; empty when the error is no such refusal."""
    reason = error.reason or ""
    return next((words for alert, words in _ALERTS.items() if reason.endswith(f"ALERT_{alert}")), "")


def is_no_tls(error: ssl.SSLError) -> bool:
    """Whether the other side answered, but not in TLS."""
    return error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")


def warn_if_open(path: Path, what: str) -> None:
    """Warns when others can read a file. One of another owner may be open to its group: that is how it can be read here
    (a Secret of Kubernetes is root's), and only its owner can change that."""
    status = path.stat()
    if status.st_mode & (stat.S_IROTH | (stat.S_IRGRP if status.st_uid == os.geteuid() else 0)):
        logger.warning("The %s %s can be read by others: chmod 600 %s", what, path, shlex.quote(str(path)))
