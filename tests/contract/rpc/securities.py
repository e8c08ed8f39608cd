"""What processes of a cluster hold: certificates of one authority, or a token."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from stratagem.launch import certificates
from stratagem.launch.certificates import LOCAL_HOSTS, Authority
from stratagem.rpc.security import Security, Token
from stratagem.rpc.tls_files import TlsFiles

TOKEN = "a token of the tests"


def make_certificates(folder: Path, *identities: str, days: int = 30) -> Path:
    """A new authority in ``folder``, and certificates of these tasks."""
    authority = Authority.create(days=30)
    authority.save(folder, with_key=True)
    for identity in identities:
        authority.issue(identity, LOCAL_HOSTS, folder, days=days)
    return folder


def renew(folder: Path, identity: str) -> None:
    """Another certificate of the same authority in the place of the old one."""
    Authority.load(folder).issue(identity, LOCAL_HOSTS, folder, days=30, renew=True)


def expire(folder: Path, identity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate that ended yesterday in the place of the old one."""
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "_EARLY", datetime.timedelta(days=10))
        Authority.load(folder).issue(identity, LOCAL_HOSTS, folder, days=-1, renew=True)


def with_tls(folder: Path, identity: str) -> Security:
    """Of a task with a certificate; its files are not tried first."""
    return Security(identity, TlsFiles(folder, identity))


def with_token(identity: str, token: str = TOKEN) -> Security:
    """Of a task with a token."""
    return Security(identity, token=Token(token))
