"""Where the chief serves, as configured: after a restart it may be elsewhere."""

from __future__ import annotations

import pathlib

from stratagem.cluster.spec import split_address

FILE_PREFIX = "file:"
FILE_NAME = "chief.address"
"""In the chief's state_dir: where the one that serves does."""
NOWHERE = "127.0.0.1:0"
"""Nobody ever answers there."""
MAX_CHARACTERS = 1024
"""Of such a file: any other, which may be long, is none."""


class ChiefAddress:
    """The address at which to try next. ``said``: "host:port" (a name is resolved anew at every attempt),
    "host:port,host:port" (the chief and those that stand by, in any order), or "file:PATH" (``chief.address`` in the
    chief's state_dir, read at every attempt). ClusterSpecError: it is none of these."""

    def __init__(self, said: str) -> None:
        self._file = pathlib.Path(said.removeprefix(FILE_PREFIX)) if said.startswith(FILE_PREFIX) else None
        self._addresses = [each.strip() for each in said.split(",")] if self._file is None else []
        for address in self._addresses:
            split_address(address)
        self._next = 0

    @property
    def candidates(self) -> list[str]:
        """Each host:port where it may be; one where nobody answers while the file is not there."""
        if self._file is None:
            return self._addresses
        try:
            with self._file.open() as file:
                address = file.read(MAX_CHARACTERS).strip()
            split_address(address)
        except (OSError, ValueError):
            address = NOWHERE
        return [address]

    @property
    def current(self) -> str:
        candidates = self.candidates
        return candidates[self._next % len(candidates)]

    def turn(self) -> None:
        """After an attempt in vain: the next one."""
        self._next += 1
