"""The lint rules against what runs code that it reads: each bites, in the project's own configuration."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNSAFE = {
    "import pickle\nx = pickle.loads(b'')\n": {"S301", "TID251"},
    "import marshal\nx = marshal.loads(b'')\n": {"S302", "TID251"},
    "import shelve\n": {"TID251"},
    "import cloudpickle\n": {"TID251"},
    "import torch\nx = torch.load('f', weights_only=True)\n": {"TID251"},
    "import torch\nx = torch.jit.load('f')\n": {"TID251"},
    "from torch.distributed import all_gather_object\n": {"TID251"},
    "import yaml\nx = yaml.load('a', yaml.Loader)\n": {"S506", "TID251"},
    "x = eval('1')\n": {"S307"},
    "exec('x = 1')\n": {"S102"},
}
RULES = {rule for rules in UNSAFE.values() for rule in rules}


def findings(source: str, name: str) -> set[str]:
    """Rules that ``make lint`` finds broken in a file of this name."""
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "json", "--stdin-filename", name]
    done = subprocess.run([*command, "-"], input=source, capture_output=True, text=True, cwd=ROOT, timeout=60)
    return {finding["code"] for finding in json.loads(done.stdout)} & RULES


@pytest.mark.parametrize("source", UNSAFE, ids=lambda source: source.splitlines()[-1])
def test_each_unsafe_call_is_found(source: str) -> None:
    for folder in ("stratagem/rpc", "ps", "chief", "worker", "benchmarks", "examples"):
        assert findings(source, f"{folder}/somewhere.py") == UNSAFE[source]


def test_what_is_safe_is_not_found() -> None:
    safe = "import json\nimport yaml\n\nx = json.loads('1'), yaml.safe_load('a')\n"
    assert findings(safe, "stratagem/rpc/somewhere.py") == set()


def test_the_rules_are_part_of_make_lint() -> None:
    lint = (ROOT / "Makefile").read_text().split("\nlint:")[1].split("\n\n")[0]
    assert "ruff check ." in lint
