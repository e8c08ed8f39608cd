"""Hosts on one machine: network namespaces behind a switch, each with a link of a known rate, or two at a distance.

Needs root, ``ip`` and ``tc`` (iproute2), and a kernel with network namespaces, veth, bridge and tbf. The switch is a
bridge in a namespace of its own, so the machine's own network is not touched, and removing the namespaces removes
everything. The hosts share /dev/shm and the file system: whoever measures links has to force a lane and to look at the
byte counters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.signals import exit_on_sigterm

INTERFACE = "eth0"
"""Of every host, towards the switch."""
QUEUE_MS = 20
"""What a link's queue holds at its rate."""
MIN_BURST_BYTES = 32 << 10
BURST_S = 0.001
"""A link may send so many seconds' worth at once; below what any measurement here takes."""

_networks = itertools.count()


class HostsUnavailableError(Exception):
    """This machine cannot have such hosts; the message says what is missing."""


@dataclasses.dataclass(frozen=True)
class Host:
    """One namespace."""

    namespace: str
    address: str
    """IPv4, reachable from the other hosts."""

    def command(self, *arguments: str) -> list[str]:
        """A command that runs ``arguments`` on this host."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def sent_bytes(self) -> int:
        """Bytes that have left this host over its link, headers included."""
        return int(self._counters()["tx"]["bytes"])

    def received_bytes(self) -> int:
        """Bytes that have come over its link, headers included."""
        return int(self._counters()["rx"]["bytes"])

    def _counters(self) -> Any:
        text = _run("ip", "-netns", self.namespace, "-json", "-statistics", "link", "show", INTERFACE)
        return json.loads(text)[0]["stats64"]


@contextlib.contextmanager
def shaped_hosts(count: int, rate_mbit: int) -> Iterator[list[Host]]:
    """``count`` hosts, each with a full-duplex link of ``rate_mbit`` to one switch; removed whatever happens.

    SIGTERM raises ``SystemExit`` inside. After a SIGKILL namespaces called ``stratagem-<pid>-…`` are left.

    Raises:
        HostsUnavailableError: this machine or this user cannot do it; says why.
    """
    if missing := why_unavailable():
        raise HostsUnavailableError(missing)
    switch, *names = _namespace_names(count)
    hosts = [Host(name, f"10.77.0.{index + 1}") for index, name in enumerate(names)]
    with exit_on_sigterm():
        try:
            _build(switch, hosts, rate_mbit)
            yield hosts
        finally:
            _remove([switch, *names])


@contextlib.contextmanager
def distant_hosts(rtt_s: float) -> Iterator[list[Host]]:
    """Two hosts between which a packet there and one back take ``rtt_s``, at whatever rate; else as
    :func:`shaped_hosts`."""
    if missing := why_unavailable():
        raise HostsUnavailableError(missing)
    hosts = [Host(name, f"10.78.0.{index + 1}") for index, name in enumerate(_namespace_names(2)[1:])]
    with exit_on_sigterm(), contextlib.ExitStack() as undo:
        undo.callback(_remove, [host.namespace for host in hosts])
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
            _run("ip", "-netns", host.namespace, "link", "set", "lo", "up")
        ends = [f"{host.namespace},{INTERFACE},{host.address}" for host in hosts]
        command = [sys.executable, "-m", "benchmarks.relay", str(rtt_s / 2), *ends]
        relay = undo.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1])
        )
        assert relay.stdout is not None
        if not relay.stdout.readline():
            raise HostsUnavailableError(f"{' '.join(command)} ended with {relay.wait()}")
        yield hosts


def why_unavailable() -> str | None:
    """Why this machine cannot have hosts, as far as can be told before trying; None: it can."""
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        return f"expected the commands ip and tc (package iproute2), there is no {' and no '.join(tools)}"
    if os.geteuid() != 0:
        return "network namespaces need root: run this benchmark as root"
    return None


def _namespace_names(count: int) -> list[str]:
    """The switch's, then the hosts'; no other network has them, in this process or another."""
    prefix = f"stratagem-{os.getpid()}-{next(_networks)}"
    return [f"{prefix}-switch", *(f"{prefix}-host{index}" for index in range(count))]


def _build(switch: str, hosts: Sequence[Host], rate_mbit: int) -> None:
    _run("ip", "netns", "add", switch)
    _run("ip", "-netns", switch, "link", "add", "switch", "type", "bridge")
    _run("ip", "-netns", switch, "link", "set", "switch", "up")
    for index, host in enumerate(hosts):
        _run("ip", "netns", "add", host.namespace)
        port = f"port{index}"
        _run(
            *("ip", "-netns", switch, "link", "add", port, "type", "veth"),
            *("peer", "name", INTERFACE, "netns", host.namespace),
        )
        _run("ip", "-netns", switch, "link", "set", port, "master", "switch", "up")
        _run("ip", "-netns", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
        _run("ip", "-netns", host.namespace, "link", "set", "lo", "up")
        _run("ip", "-netns", host.namespace, "link", "set", INTERFACE, "up")
        _shape(host.namespace, INTERFACE, rate_mbit)
        _shape(switch, port, rate_mbit)


def _shape(namespace: str, interface: str, rate_mbit: int) -> None:
    burst = max(MIN_BURST_BYTES, int(rate_mbit * 1e6 / 8 * BURST_S))
    _run(
        *("tc", "-netns", namespace, "qdisc", "add", "dev", interface, "root", "tbf"),
        *("rate", f"{rate_mbit}mbit", "burst", str(burst), "latency", f"{QUEUE_MS}ms"),
    )


def _remove(namespaces: Sequence[str]) -> None:
    """Removes those that are there; goes on when one cannot be removed, and raises at the end."""
    failures = []
    there = {line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line}
    for name in namespaces:
        if name in there:
            try:
                _run("ip", "netns", "delete", name)
            except HostsUnavailableError as error:
                failures.append(str(error))
    if failures:
        raise HostsUnavailableError("; ".join(failures))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HostsUnavailableError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout
