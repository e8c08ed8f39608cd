"""What a task reports when it joins: the versions that its numbers and messages depend on."""

from __future__ import annotations

import importlib
import sys


def own_version() -> str:
    """Of this package."""
    return str(importlib.import_module("stratagem").__version__)


def torch_version() -> str:
    """Of torch; empty where this process has not loaded it."""
    return str(getattr(sys.modules.get("torch"), "__version__", ""))
