"""TLS of a local job: certificates that the user has, or throw-away ones made for this run alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path

from stratagem.cluster.identity import OPERATOR
from stratagem.errors import ConfigurationError

AUTO = "auto"
"""Asks for throw-away certificates."""
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
THROW_AWAY_DAYS = 30


def need_cryptography() -> None:
    """Refuses to go on without the package that makes certificates.

    Raises:
        ConfigurationError: says how to install it.
    """
    if importlib.util.find_spec("cryptography") is None:
        raise ConfigurationError(
            "making certificates needs the package cryptography: pip install 'stratagem[tls]'. "
            "Certificates made elsewhere are used without it"
        )


def make_throw_away(folder: Path, tasks: Iterable[str]) -> Callable[[str], None]:
    """Certificates for one job on this machine. The authority's key is never written, so nobody can issue more.

    Args:
        folder: where to; made.
        tasks: ids of the tasks; the launcher gets one too.

    Returns:
        What makes one for a further task.

    Raises:
        ConfigurationError: the package ``cryptography`` is missing.
    """
    need_cryptography()
    from stratagem.launch.certificates import Authority

    authority = Authority.create(THROW_AWAY_DAYS)
    authority.save(folder, with_key=False)

    def issue(identity: str) -> None:
        authority.issue(identity, LOCAL_HOSTS, folder, days=THROW_AWAY_DAYS)

    for identity in (*tasks, OPERATOR):
        issue(identity)
    return issue
