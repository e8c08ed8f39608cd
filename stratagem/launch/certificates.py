"""Makes the certificate authority of a cluster, and the certificates of its tasks.

Needs the package ``cryptography``; without it the import raises a ``ConfigurationError`` that says how to install it.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import ipaddress
import os
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from stratagem.cluster.identity import DNS_SUFFIX, OPERATOR, file_stem, identity_uri, server_name
from stratagem.errors import ConfigurationError
from stratagem.rpc.tls_files import AUTHORITY_FILE, check_authority

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError:
    raise ConfigurationError(
        "making certificates needs the package cryptography: pip install 'stratagem[tls]'. "
        "Certificates made elsewhere are used without it"
    ) from None

AUTHORITY_KEY_FILE = "ca.key"
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
THROW_AWAY_DAYS = 30
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}")
_EARLY = datetime.timedelta(minutes=5)  # clocks of hosts differ


class Authority:
    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, days: int) -> Authority:
        """A new one, in memory."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"Stratagem cluster {secrets.token_hex(4)}")
        return cls(_builder(name, name, key, days, is_authority=True).sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, folder: Path) -> Authority:
        """The authority in a folder. ConfigurationError: there is none, or its key is not there."""
        try:
            certificate = x509.load_pem_x509_certificate((folder / AUTHORITY_FILE).read_bytes())
            key = serialization.load_pem_private_key((folder / AUTHORITY_KEY_FILE).read_bytes(), None)
        except OSError as error:
            raise ConfigurationError(
                f"no certificate authority in {folder}: {error.strerror}: {error.filename}. "
                "`stratagem certs init` makes one"
            ) from None
        except (ValueError, TypeError) as error:
            raise ConfigurationError(f"the certificate authority in {folder} cannot be read: {error}") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise ConfigurationError(f"{AUTHORITY_KEY_FILE} in {folder} is not the key of {AUTHORITY_FILE}")
        check_authority(folder / AUTHORITY_FILE)
        return cls(certificate, key)

    def save(self, folder: Path, *, with_key: bool) -> None:
        """Writes certificate and, if wanted, key; overwrites nothing (ConfigurationError)."""
        _refuse_existing([folder / AUTHORITY_FILE, *([folder / AUTHORITY_KEY_FILE] if with_key else [])])
        if with_key:
            _write(folder / AUTHORITY_KEY_FILE, _key_pem(self._key), 0o600)
        _write(folder / AUTHORITY_FILE, self._certificate.public_bytes(serialization.Encoding.PEM), 0o644)

    def issue(self, identity: str, hosts: Iterable[str], folder: Path, *, days: int, renew: bool = False) -> None:
        """Writes key and certificate of a task, by its id, or of "operator". ``hosts``: names and addresses under which
        tools other than ours will reach it; ``renew``: replace what is there, each file at once. ConfigurationError: a
        file is there already, or a host name that belongs to a task."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [
            x509.UniformResourceIdentifier(identity_uri(identity)),
            x509.DNSName(server_name(identity)),
            *_host_names(hosts),
        ]
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        authority_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            _builder(_name(identity), self._certificate.subject, key, days, is_authority=False)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(authority_key, critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pairs = [
            (folder / f"{file_stem(identity)}.key", _key_pem(key), 0o600),
            (folder / f"{file_stem(identity)}.crt", certificate.public_bytes(serialization.Encoding.PEM), 0o644),
        ]
        if not renew:
            _refuse_existing([path for path, _, _ in pairs])
        for path, content, mode in pairs:
            _write(path, content, mode)


def make_throw_away(folder: Path, tasks: Iterable[str]) -> Callable[[str], None]:
    """Certificates for the ``tasks`` of one job on this machine, by their ids, and for the launcher. The authority's
    key is never written, so nobody can issue more. Returns what makes one for a further task."""
    authority = Authority.create(THROW_AWAY_DAYS)
    authority.save(folder, with_key=False)
    issue = functools.partial(authority.issue, hosts=LOCAL_HOSTS, folder=folder, days=THROW_AWAY_DAYS)
    for identity in (*tasks, OPERATOR):
        issue(identity)
    return issue


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int, *, is_authority: bool
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    usage = x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.BasicConstraints(is_authority, 0 if is_authority else None), critical=True)
        .add_extension(usage, critical=True)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host_names(hosts: Iterable[str]) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys(hosts):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            if host.rstrip(".").lower().endswith(DNS_SUFFIX) or not _HOST.fullmatch(host):
                raise ConfigurationError(
                    f"{host!r} cannot be a host name of a certificate: it takes letters, digits, '-' and '.', no port; "
                    f"names under {DNS_SUFFIX} say which task it is, and patterns could match them"
                ) from None
            names.append(x509.DNSName(host))
    return names


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _refuse_existing(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.exists():
            raise ConfigurationError(
                f"{path} is there already, and nothing is overwritten; `certs issue --renew` replaces what tasks have"
            )


def _write(path: Path, content: bytes, mode: int) -> None:
    """Makes the file, with its mode from the start, and its folder: whoever reads sees the old file or the new one."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(new, "xb", opener=functools.partial(os.open, mode=mode)) as file:
            file.write(content)
        new.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from None
