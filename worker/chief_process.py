"""A cluster without a chief: worker 0 spawns one beside itself, at worker 0's address (docs/protocol.md 13)."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

from stratagem.cluster.config import ChiefConfig
from stratagem.errors import ConfigurationError

logger = logging.getLogger(__name__)


class ChiefProcess:
    """The chief as a child of this process.

    It ends when the job is done, when :meth:`wait` loses patience, or when this process dies: its standard input is
    a pipe from here, and the end of that pipe is the end of the chief.
    """

    def __init__(self, config: ChiefConfig) -> None:
        command = [sys.executable, "-m", "stratagem.chief", "--config-json", config.model_dump_json(), "--until-eof"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
        logger.info("the cluster names no chief: started one at %s (pid %d)", config.bind, self._process.pid)

    def failure(self) -> ConfigurationError | None:
        """That it has ended, which it does not before the job; None: it runs."""
        if (code := self._process.poll()) is None:
            return None
        return ConfigurationError(f"the chief that this worker started ended with exit code {code}: see its words")

    def wait(self, timeout_s: float | None) -> None:
        """Waits for the chief to end by itself (None: for as long as the other workers need it), then ends it."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
        finally:
            if self._process.stdin is not None:
                self._process.stdin.close()
