"""Every command in the README works: what trains is run here; `make demo` and `make test` are steps of `.ci/run`."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from stratagem.cluster.tf_config import parse_tf_config

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
COMMANDS = [line.split("   #")[0].strip() for block in BLOCKS for line in block.splitlines() if line.strip()]
TRAINING = [command for command in COMMANDS if command.startswith(("stratagem run", "python examples"))]
# One for each way to start; `make demo`, a step of `.ci/run`, is a cluster.
BRIEF = [
    "stratagem run --workers 2 examples/digits.py",
    "python examples/digits.py --epochs 3 --strategy mirrored --devices cpu:0,cpu:1",
    "stratagem run --workers 2 --tls auto examples/mnist.py --no-download --epochs 2",
    "python examples/mnist_loop.py --no-download --epochs 1",
]
CLUSTER_TOOLS = ("kubectl", "helm", "srun")  # tests/deploy and tests/cluster/test_slurm.py look at these
JOBS = [command for command in COMMANDS if command.startswith(("stratagem submit", "stratagem jobs"))]
OTHER = [
    command
    for command in COMMANDS
    if command not in (*TRAINING, *JOBS) and not command.startswith(CLUSTER_TOOLS) and "| kubectl" not in command
]
BIN = Path(sys.executable).parent


def run(command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    arguments = shlex.split(command)
    return subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)


@pytest.mark.parametrize(
    "command", [c if c in BRIEF else pytest.param(c, marks=pytest.mark.thorough) for c in TRAINING]
)
def test_training_commands(command: str) -> None:
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_brief_commands_are_in_the_readme() -> None:
    assert set(BRIEF) <= set(TRAINING)


def test_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert len(JOBS) == 4
    for command in JOBS:
        done = run(command)
        assert done.returncode == 0, (command, done.stderr)
        assert done.stdout


@pytest.mark.parametrize("command", OTHER)
def test_other_commands(command: str) -> None:
    program = shlex.split(command)[0]
    if program == "make":
        assert run(command.replace("make", "make -n", 1)).returncode == 0
    elif program == "export":
        placement = parse_tf_config(shlex.split(command)[1].removeprefix("TF_CONFIG="))
        assert placement is not None and placement.task is not None
    elif program in ("pip", "python3"):
        # The set-up; `.ci/run` does the same steps in a fresh environment.
        assert command in (
            "python3 -m venv .venv && . .venv/bin/activate",
            "pip install -c constraints.txt -e '.[examples]'",
        )
    elif program == "stratagem":
        assert run(command).returncode == 0
    elif program == "docker":
        check_compose(shlex.split(command))
    else:
        pytest.fail(f"no test runs {command!r}")


def check_compose(words: list[str]) -> None:
    """tests/deploy runs `docker compose` on an engine; here: the files and services that a command names are there."""
    assert words[:2] == ["docker", "compose"]
    files = [words[i + 1] for i, word in enumerate(words) if word == "-f"] or ["docker-compose.yml"]
    services = {name for file in files for name in yaml.safe_load((ROOT / file).read_text())["services"]}
    verb = next(word for word in words if word in ("up", "run", "exec", "down"))
    named = [word for word in words[words.index(verb) + 1 :] if not word.startswith("-")]
    if verb in ("run", "exec"):
        assert named[0] in services
    for profile in (words[i + 1] for i, word in enumerate(words) if word == "--profile"):
        assert profile == "*" or profile in services


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []
