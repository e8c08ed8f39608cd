"""Where a peer system is installed: its own environment, or ours."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec

TF_PYTHON_VARIABLE = "STRATAGEM_TF_PYTHON"
PROBE_TIMEOUT_S = 120.0


class PeerMissingError(Exception):
    """A peer was asked for and is not there; the message says how to install it."""


def find_tensorflow(python: str | None, environment: Mapping[str, str], *, required: bool) -> str | None:
    """The interpreter that has TensorFlow.

    Args:
        python: what the flag said; None or empty: not given.
        environment: where ``STRATAGEM_TF_PYTHON`` is looked up when the flag is not given.
        required: whether its absence is an error.

    Returns:
        Path of the interpreter; None when TensorFlow is nowhere and not required.

    Raises:
        PeerMissingError: the interpreter named has no TensorFlow, or none was found though it is required.
    """
    chosen = python or environment.get(TF_PYTHON_VARIABLE)
    if chosen:
        _probe(chosen)
        return chosen
    if find_spec("tensorflow") is not None:
        return sys.executable
    if required:
        raise PeerMissingError(
            "expected TensorFlow for --peer tf, found none. Install tensorflow-cpu in an environment of its own "
            f"and name its interpreter with --tf-python or {TF_PYTHON_VARIABLE}."
        )
    return None


def _probe(python: str) -> None:
    command = [python, "-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('tensorflow') is None)"]
    try:
        found = subprocess.run(command, capture_output=True, timeout=PROBE_TIMEOUT_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerMissingError(
            f"expected a Python interpreter with TensorFlow, could not run {python}: {error}"
        ) from None
    if not found:
        raise PeerMissingError(
            f"expected TensorFlow in {python}, found none. Install it there: {python} -m pip install tensorflow-cpu."
        )
