"""Where a server may listen, and where a secret may be sent: only on this machine, unless configured otherwise."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
from typing import Any

from stratagem.cluster.spec import split_address
from stratagem.errors import ConfigurationError

logger = logging.getLogger(__name__)

ANY_HOST = ("0.0.0.0", "::")
"""To listen on, not to be called at."""
ADDRESS_S = 1.0
"""For the first attempt at each address of a name."""


def check_binding(bind: str, insecure: bool, tls: bool = False) -> None:
    """Refuses to listen beyond loopback in the clear. With TLS, or if the user says that it is all right
    (``insecure``), it may be. ConfigurationError: with the ways out."""
    host, _ = split_address(bind)
    if insecure or tls or is_loopback(host):
        return
    raise ConfigurationError(
        f"refusing to listen on {bind}: anybody who reaches that address could read and change the model. "
        "Give --tls DIR (`stratagem certs init` and `stratagem certs issue` make the certificates), or --insecure "
        "(STRATAGEM_INSECURE=1) if the network is yours alone; on one machine, bind to 127.0.0.1."
    )


def advertised_address(advertise: str, bound: str) -> str:
    """As :func:`told_address`. ConfigurationError: nobody could call it there."""
    host, _ = split_address(advertise or bound)
    if host in ANY_HOST:
        raise ConfigurationError(
            f"this task listens on {bound}, but others cannot connect to {host}: give an address with "
            "--advertise host:port, or in TF_CONFIG"
        )
    return told_address(advertise, bound)


def told_address(advertise: str, bound: str) -> str:
    """The host:port that a server tells others. Port 0 of ``advertise`` is the one bound, an empty ``advertise`` all of
    ``bound``."""
    has_port = split_address(advertise or bound)[1] != 0
    return (advertise or bound) if has_port else f"{advertise.rpartition(':')[0]}:{split_address(bound)[1]}"


def listening(host: str, port: int = 0) -> socket.socket:
    """A TCP socket that listens at ``host``: an IPv4 address, an IPv6 one ("::" is both), or a name, IPv4 first. IPv6
    without brackets; port 0 takes a free one. OSError: the host is not of this machine, or the port is taken."""
    family, *_, address = _found(host, port, socket.AI_PASSIVE)[0]
    is_dual = address[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=128, dualstack_ipv6=is_dual)


def connected(host: str, port: int, timeout_s: float) -> socket.socket:
    """A TCP socket to what :func:`listening` has opened at ``host``: a name's IPv4 addresses are tried first here too.
    Of several addresses each gets a second before any gets ``timeout_s``, since one may be a hole: of a machine that
    is gone, or behind a firewall. OSError: nobody is there."""
    found = _found(host, port)
    failure = OSError(f"{host} has no address")
    for patience_s in [min(ADDRESS_S, timeout_s)] * (len(found) > 1) + [timeout_s]:
        for family, kind, protocol, _, address in found:
            sock = socket.socket(family, kind, protocol)
            sock.settimeout(patience_s)
            try:
                sock.connect(address)
            except OSError as error:
                sock.close()
                failure = error
            else:
                sock.settimeout(timeout_s)
                return sock
    raise failure


def _found(host: str, port: int, flags: int = 0) -> list[Any]:
    """What `getaddrinfo` knows, IPv4 first."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return sorted(found, key=lambda each: each[0] != socket.AF_INET)


def free_port(host: str = "127.0.0.1") -> int:
    """A port for a server that starts later: for a minute nobody who asks for any port gets it.

    A connection to it was closed at this end (TIME_WAIT). That keeps no server from it which sets SO_REUSEADDR, as
    ours, gRPC's and torch's do. ConfigurationError: no server can be reached at ``host``, with the way out.
    """
    try:
        with listening(host) as server:
            address = server.getsockname()
            with socket.create_connection(address[:2]):
                server.accept()[0].close()
            return int(address[1])
    except OSError as error:
        words = "`ip link set lo up` and `ip addr add 127.0.0.1/8 dev lo` make it"
        way = words if is_loopback(host) else "STRATAGEM_BIND=ADDRESS:0 names another address"
        raise ConfigurationError(f"this machine cannot use the address {host} ({error.strerror}); {way}") from None


def check_token_path(address: str, insecure: bool) -> None:
    """Raises ``ConfigurationError``, with the ways out, where the token would be sent beyond loopback in the clear."""
    if not insecure and not is_loopback(address.rpartition(":")[0]):
        raise ConfigurationError(
            f"refusing to send the token to {address} unencrypted: anybody on the way could read it. "
            "Give --tls DIR, or --insecure if the network is yours alone."
        )


def warn_of_loopback(bind: str) -> None:
    """Says so if ``bind`` names this machine by a name that is 127.0.1.1 here, as installers write it."""
    host, port = split_address(bind)
    with contextlib.suppress(OSError):
        addresses = [each[4][0] for each in _found(host, port)]
        if not is_loopback(host) and all(map(is_loopback, addresses)):
            logger.warning(
                "%s resolves to %s on this machine (/etc/hosts?), where no other machine can reach this task: if any "
                "task of the job is elsewhere, correct that, or give the address of this machine",
                *(host, addresses[0]),
            )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
