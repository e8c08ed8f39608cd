"""`stratagem run --web`: where the page will be, and what is refused with the way out."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from stratagem.cli.__main__ import stratagem
from stratagem.cluster.task import TaskId
from stratagem.errors import ConfigurationError
from stratagem.launch.plan import LocalJob, RunFolders, plan_launch


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("")
    return tmp_path / "train.py"


def test_the_chief_alone_is_told(script: Path, tmp_path: Path) -> None:
    job = LocalJob(script, num_workers=2, num_ps=1, web="127.0.0.1:8080")
    flags = {
        str(task): [
            word
            for word in plan_launch(job, task, RunFolders(tmp_path), {}, 2, "127.0.0.1:9").command
            if "--web" in word
        ]
        for task in (TaskId("chief", 0), TaskId("ps", 0), TaskId("worker", 0))
    }
    assert flags == {"chief:0": ["--web=127.0.0.1:8080"], "ps:0": [], "worker:0": []}


def test_one_process_has_no_chief_that_could_serve_it(script: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"the chief of a cluster serves the page.*: add --workers 2 or --ps"):
        LocalJob(script, web="127.0.0.1:8080")


@pytest.mark.parametrize("words", [["--web", "train.py"], ["--web=8080", "train.py"]])
def test_what_is_no_address_is_most_likely_the_script(words: list[str]) -> None:
    done = CliRunner().invoke(stratagem, ["run", "--workers", "2", *words])
    assert done.exit_code == 2
    assert "expected an address like 'host:2222'" in done.output
    assert "before the script, write --web=127.0.0.1:0" in done.output


def test_the_script_s_flags_are_no_flags_of_ours_where_it_was_taken_for_the_address() -> None:
    done = CliRunner().invoke(stratagem, ["run", "--web", "train.py", "--epochs", "3"])
    assert done.exit_code == 2
    assert "train.py follows --web: before the script, write --web=127.0.0.1:0" in done.output
