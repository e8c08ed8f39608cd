"""The machine and the versions that a measurement belongs to."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

LIBRARIES = ("torch", "grpcio", "numpy")


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that our own side computes and talks with."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in LIBRARIES}}


def describe_machine() -> dict[str, str | int | float]:
    """Processor, cores this process may use, and how busy the machine was."""
    return {
        "processor": processor_name(Path("/proc/cpuinfo")),
        "num_cores": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
    }


def processor_name(cpuinfo: Path) -> str:
    """The processor's model name, or its architecture where the kernel does not tell."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
