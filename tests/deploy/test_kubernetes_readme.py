"""The commands that the documentation gives for Kubernetes are ones that kubectl, helm and stratagem take."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from stratagem.cli.render import render_command
from tests.deploy.kubernetes_tools import REPOSITORY, Tools, unpacked, why_unavailable

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))

FILES = (REPOSITORY / "docs" / "guides" / "kubernetes.md", REPOSITORY / "deploy" / "kubernetes" / "README.md")


def commands(*programs: str) -> list[str]:
    """The lines of the documentation that start one of these programs."""
    blocks = [block for file in FILES for block in re.findall(r"```bash\n(.*?)```", file.read_text(), re.DOTALL)]
    lines = [line.split("   #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in dict.fromkeys(lines) if line.startswith(programs)]


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    with unpacked() as programs:
        yield programs


def jobs_in(objects: list[dict[str, Any]]) -> set[str]:
    return {each["metadata"]["name"] for each in objects if each["kind"] in ("Job", "JobSet", "TrainJob")}


def test_kustomize_folders_are_there_and_jobs_have_these_names(tools: Tools) -> None:
    jobs = jobs_in(tools.kustomize("base"))
    given = commands("kubectl")
    assert len(given) >= 4
    for command in given:
        words = shlex.split(command)
        for folder in (words[index + 1] for index, word in enumerate(words) if word == "-k"):
            assert jobs_in(tools.kustomize(str(Path(folder).relative_to("deploy/kubernetes")))) == jobs, command
        named = {word.removeprefix("job/") for word in words if word.startswith("job/")}
        assert named <= jobs, command


def test_helm_takes_these_values(tools: Tools) -> None:
    given = [shlex.split(command) for command in commands("helm")]
    assert len(given) >= 2
    kept: list[str] = []  # what --reuse-values remembers
    for _, _, release, chart, *flags in given:
        kept += [flag for flag in flags if flag != "--reuse-values"]
        text = tools.helm("template", release, str(REPOSITORY / chart), *kept)
        jobs = jobs_in([each for each in yaml.safe_load_all(text) if each])
        for role in ("worker", "ps"):
            count = [int(flag.removeprefix(f"{role}.count=")) for flag in kept if flag.startswith(f"{role}.count=")][-1]
            assert len([name for name in jobs if f"-{role}-" in name]) == count


@pytest.mark.parametrize("command", commands("stratagem render"))
def test_the_renderer_takes_these_options(command: str) -> None:
    rendering, _, applying = command.partition(" | ")
    assert applying == "kubectl apply -f -"
    result = CliRunner().invoke(render_command, shlex.split(rendering)[2:], catch_exceptions=False)
    assert result.exit_code == 0
    assert jobs_in(list(yaml.safe_load_all(result.output)))
