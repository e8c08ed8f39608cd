"""On which host a process runs, as far as sharing memory is concerned."""

from __future__ import annotations

import os
from pathlib import Path


def own_host_id() -> str:
    """Processes that have the same run under one kernel and in one network namespace: Unix sockets reach them."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    network = Path("/proc/self/ns/net")
    if not boot.exists() or not network.exists():
        return f"process {os.getpid()}"
    return f"{boot.read_text().strip()} {os.readlink(network)}"
