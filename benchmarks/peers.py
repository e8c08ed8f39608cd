"""Where a peer system is installed: its own environment, or ours."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec

PROBE_TIMEOUT_S = 120.0


class PeerMissingError(Exception):
    """A peer was asked for and is not there; the message says how to install it."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """A system that comes with a package for Python."""

    name: str
    """As ``--peer`` calls it; ``--NAME-python`` names an interpreter, and so does :attr:`variable`."""
    module: str
    package: str
    """What pip installs."""
    program: str | None = None
    """What has to be on the PATH beside it."""

    @property
    def variable(self) -> str:
        """Environment variable that names the interpreter."""
        return f"STRATAGEM_{self.name.upper()}_PYTHON"

    def find(self, python: str | None, environment: Mapping[str, str], *, required: bool) -> str | None:
        """The interpreter that has the module.

        Args:
            python: what the flag said; None or empty: not given.
            environment: where :attr:`variable` is looked up when the flag is not given.
            required: whether its absence is an error.

        Returns:
            Path of the interpreter; None when the peer is nowhere and not required.

        Raises:
            PeerMissingError: the interpreter named has no such module, or the peer is not there though it is required.
        """
        chosen = python or environment.get(self.variable)
        if self.program is not None and shutil.which(self.program) is None:
            if required or chosen:
                raise PeerMissingError(f"expected {self.program} for --peer {self.name} on the PATH, found none.")
            return None
        if chosen:
            self._probe(chosen)
            return os.path.abspath(chosen) if "/" in chosen else chosen  # jobs run in folders of their own
        if find_spec(self.module) is not None:
            return sys.executable
        if required:
            raise PeerMissingError(
                f"expected {self.module} for --peer {self.name}, found none. Install {self.package} in an environment "
                f"of its own and name its interpreter with --{self.name}-python or {self.variable}."
            )
        return None

    def _probe(self, python: str) -> None:
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({self.module!r}) is None)"
        command = [python, "-c", code]
        try:
            found = subprocess.run(command, capture_output=True, timeout=PROBE_TIMEOUT_S, check=False).returncode == 0
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerMissingError(
                f"expected a Python interpreter with {self.module}, could not run {python}: {error}"
            ) from None
        if not found:
            raise PeerMissingError(
                f"expected {self.module} in {python}, found none. Install it there: "
                f"{python} -m pip install {self.package}."
            )


TENSORFLOW = Peer("tf", "tensorflow", "tensorflow-cpu")
MPI = Peer("mpi", "mpi4py", "mpi4py numpy", "mpirun")
