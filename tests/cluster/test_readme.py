"""Every command and every Python block of README and docs works: what trains is run here, `make` by `.ci/run`."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from stratagem.cluster.sources import gather
from stratagem.cluster.tf_config import parse_tf_config
from tests import forks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))


def blocks(language: str) -> list[tuple[Path, str]]:
    """The blocks of code in a language, and the page of each."""
    found = [(page, re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)) for page in PAGES]
    return [(page, block) for page, several in found for block in several]


COMMANDS = list(
    dict.fromkeys(
        line.split("   #")[0].strip()
        for page, block in blocks("bash")
        if page.name not in ("SECURITY.md",)  # tests/cluster/test_tls.py goes through it
        for line in block.splitlines()
        if line.strip()
    )
)
TRAINING = [command for command in COMMANDS if command.startswith(("stratagem run", "python examples"))]
# Of the others `make demo`, a step of `.ci/run`, is like.
BRIEF = ["python examples/digits.py --epochs 3 --strategy mirrored --devices cpu:0,cpu:1"]
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
    program, *arguments = shlex.split(command)
    program = sys.executable if program == "python" else program
    return forks.run([program, *arguments], cwd=ROOT, env=environment, timeout=240)


@pytest.mark.parametrize(
    "command", [c if c in BRIEF else pytest.param(c, marks=pytest.mark.thorough) for c in TRAINING]
)
def test_training_commands(command: str) -> None:
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert done.stdout


# A reader has the DataLoader of the README's loop, and the model that FSDP shards; sg.run() returns at once in a job.
BLOCKS_OF_PYTHON = """
import json, sys, torch

data = torch.utils.data.TensorDataset(torch.randn(64, 20), torch.randint(2, (64,)))
for page, block in json.load(sys.stdin):
    of_reader = {"loader": torch.utils.data.DataLoader(data, batch_size=16), "model": torch.nn.Linear(20, 2)}
    exec(compile(block, page, "exec"), {"__name__": page, **of_reader})
    print(page)
"""


def test_blocks_of_python(tmp_path: Path) -> None:
    found = [(str(page.relative_to(ROOT)), block) for page, block in blocks("python")]
    assert {page for page, _ in found} > {"README.md", "docs/start/first_job.md", "docs/guides/checkpoints.md"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "STRATAGEM_JOB_ID": "here", "STRATAGEM_JOB_TARGET": "local"}
    command = [sys.executable, "-c", BLOCKS_OF_PYTHON]
    done = forks.run(command, input=json.dumps(found), cwd=tmp_path, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) >= {page for page, _ in found}


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("from_ddp.md", ["--workers", "2"]),
        *[
            pytest.param(name, flags, marks=pytest.mark.thorough)
            for name in ("from_ddp.md", "checkpoints.md")
            for flags in (["--workers", "2", "--ps", "2"], ["--workers", "2", "--ps", "1", "--staleness", "0"])
        ],
        pytest.param("checkpoints.md", ["--workers", "2"], marks=pytest.mark.thorough),
    ],
)
def test_whole_scripts(name: str, flags: list[str], tmp_path: Path) -> None:
    """They are for jobs, and go on when they are started again."""
    (block,) = [block for page, block in blocks("python") if page.name == name and "restore_or_initialize" in block]
    (tmp_path / "train.py").write_text(block)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for is_first in (True, False):
        command = [sys.executable, "-m", "stratagem.cli", "run", *flags, "train.py"]
        done = forks.run(command, cwd=tmp_path, env=environment, timeout=240)
        assert done.returncode == 0, done.stderr
        if name == "from_ddp.md" and "--ps" not in flags:
            assert ("epoch 3: loss" in done.stdout) is is_first  # all epochs are done, none is trained again


def test_cluster_files() -> None:
    """A task finds its place in each, and every address is told to somebody."""
    files = [yaml.safe_load(block) for page, block in blocks("yaml") if block.startswith("cluster:")]
    assert files
    for file in files:
        for role, addresses in file["cluster"].items():
            for index, address in enumerate(addresses):
                resolved, placement = gather(role, {}, {"task": f"{role}:{index}"}, file)
                assert placement is not None and resolved.config.bind == address
                assert resolved.config.checkpoint_dir == file["defaults"]["checkpoint_dir"]


def test_brief_commands_are_in_the_pages() -> None:
    assert set(BRIEF) <= set(TRAINING)


@pytest.mark.thorough
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
    elif program == ".ci/run":
        assert os.access(ROOT / command, os.X_OK)
    elif program == "docker":
        check_compose(shlex.split(command))
    else:
        pytest.fail(f"no test runs {command!r}")


def check_compose(words: list[str]) -> None:
    """tests/deploy runs `docker compose` on an engine; here: the files and services that a command names are there."""
    assert words[:2] == ["docker", "compose"]
    files = [words[i + 1] for i, word in enumerate(words) if word == "-f"] or ["docker-compose.yml"]
    services = {name for file in files for name in yaml.safe_load((ROOT / file).read_text())["services"]}
    verb = next(word for word in words if word in ("up", "run", "exec", "cp", "down"))
    named = [word for word in words[words.index(verb) + 1 :] if not word.startswith("-")]
    if verb in ("run", "exec", "cp"):
        assert named[0].partition(":")[0] in services
    for profile in (words[i + 1] for i, word in enumerate(words) if word == "--profile"):
        assert profile == "*" or profile in services


def headings(page: Path) -> set[str]:
    """The names by which a link reaches the headings of a page."""
    words = (re.sub(r"[^\w\- ]", "", line.lower()) for line in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE))
    return {each.strip().replace(" ", "-") for each in words}


def test_every_link_leads_somewhere() -> None:
    found = [(page, re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", page.read_text())) for page in PAGES]
    links = [(page.parent / path if path else page, part) for page, several in found for path, part in several]
    assert len(links) > 40 and sum(bool(part) for _, part in links) > 4
    assert [path for path, _ in links if not path.exists()] == []
    assert [(path, part) for path, part in links if part and part not in headings(path)] == []


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 900
    assert len(text.splitlines()) <= 120


def test_what_code_cites_is_there() -> None:
    listed = subprocess.run(["git", "grep", "-IhoE", r"\b[A-Z]{4,}\.md"], cwd=ROOT, capture_output=True, text=True)
    assert sorted(name for name in set(listed.stdout.split()) if not (ROOT / name).exists()) == []
