"""Notebooks become scripts: commands run, what only IPython can do is refused by cell and line."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

import stratagem as sg
from stratagem.errors import ConfigurationError
from stratagem.launch.submit.entry_point import find_entry_point, notebook_file
from stratagem.launch.submit.notebook import read_cells, to_script
from tests.notebooks import EXECUTE, notebook_of


def run(script: str, folder: Path) -> str:
    """What the script prints."""
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_commands_run_as_subprocesses_and_python_stays(tmp_path: Path) -> None:
    cells = [
        "x = 2",
        "",
        "!echo 'two  words' three\nif x == 2:\n    !touch made.txt",
        'listed = !printf "a\\nb\\n"\nprint(listed, flush=True)',
        'text = """\n!not a command\n%not magic\n"""\nprint(text.count("!"), (x\n    % 2), flush=True)',
        "!printf one; \\\n  printf two | tr t T",
    ]
    out = run(to_script(cells, "n.ipynb"), tmp_path)
    assert out == "two  words three\n['a', 'b']\n1 0\noneTwo"
    assert (tmp_path / "made.txt").exists()


def test_values_of_python_code_go_into_commands_as_in_ipython(tmp_path: Path) -> None:
    cells = [
        "import os.path\nfolder, count = 'a b', 2",
        "!mkdir '{folder}' && printf %s $count-{count + 1}-$$count-\"'quoted'\"",
        "found = !ls {os.path.abspath('.')}\nprint(found)",
    ]
    out = run(to_script(cells, "n.ipynb"), tmp_path)
    assert out.startswith("2-3-") and out.endswith("count-'quoted'['a b']\n")  # $$ is the shell's own number


def test_magics_for_whoever_looks_on_are_left_out(tmp_path: Path) -> None:
    magics = [
        "%matplotlib inline",
        "%load_ext autoreload",
        "%autoreload 2",
        "%config InlineBackend.figure_format = 'x'",
    ]
    cells = ["\n".join(magics), "if True:\n    %matplotlib notebook\nprint('done')"]
    script = to_script(cells, "n.ipynb")
    assert run(script, tmp_path) == "done\n" and "pass  # %matplotlib inline" in script


def test_a_shell_is_used_only_where_the_line_needs_one() -> None:
    script = to_script(["!pip install 'torchmetrics' -q\n!ls | wc -l"], "n.ipynb")
    assert "_subprocess.run(['pip', 'install', 'torchmetrics', '-q'], check=True)" in script
    assert "_subprocess.run(['/bin/sh', '-c', 'ls | wc -l'], check=True)" in script


def test_a_command_that_fails_ends_the_script(tmp_path: Path) -> None:
    script = to_script(["!false\nprint('not reached')"], "n.ipynb")
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "CalledProcessError" in done.stderr and done.stdout == ""


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (
            ["x = 1", "y = 2\n%cd data"],
            "line 2 of the notebook cannot run in a job: '%cd data'",
        ),
        (["%%time\nx = 1"], "cell 1, line 1"),
        (["t = %timeit -o 1"], "cell 1, line 1"),
        (["x = 1\nx?"], "cell 1, line 2"),
        (["??len"], "cell 1, line 1"),
        (["a = 1\n!"], "a command is missing"),
        (["!echo {x + 1}"], "the value of {x + 1}"),
        (["name = 'a'", "!echo ${name}"], "Python variable name"),
        (["!awk '{print}' rows.csv"], "the value of {print}"),
        (["!echo 'open"], "cannot be read"),
        (["1", "\nget_ipython().system('ls')"], "cell 2, line 2"),
        (["x = 1", "y = (\n  1 +\n"], "cell 2, line"),
        (["x = 1\n\nwrong syntax here"], "cell 1, line 3 of n.ipynb is not Python"),
        (["import asyncio\nawait asyncio.sleep(0)"], "cell 1, line 2 of n.ipynb is not Python"),
    ],
)
def test_what_only_ipython_can_do_is_refused_by_cell_and_line(cells: list[str], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        to_script(cells, "n.ipynb")
    assert words in str(caught.value)


def test_environment_variables_are_left_to_the_shell() -> None:
    assert "['/bin/sh', '-c', 'echo $HOME ${USER}']" in to_script(["!echo $HOME ${USER}"], "n.ipynb")


def write_notebook(path: Path, *sources: str) -> Path:
    cells = [{"cell_type": "code", "source": source.splitlines(keepends=True)} for source in sources]
    cells.insert(1, {"cell_type": "markdown", "source": ["# Title\n", "!not a command"]})
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


def test_a_notebook_file_is_an_entry_point_with_a_name_of_its_own(tmp_path: Path) -> None:
    found = find_entry_point(write_notebook(tmp_path / "digits.ipynb", "print('first')", "print('second')"))
    assert found.path == tmp_path / "digits.ipynb.py" and not found.path.exists()
    assert found.source is not None and "# cell 3" in found.source
    assert run(found.source, tmp_path) == "first\nsecond\n"


def test_the_frontend_tells_which_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    file = write_notebook(tmp_path / "digits.ipynb", "1")
    in_vscode = types.SimpleNamespace(user_ns={"__vsc_ipynb_file__": str(file)})
    elsewhere = types.SimpleNamespace(user_ns={"__vsc_ipynb_file__": str(tmp_path / "unsaved.ipynb")})
    assert notebook_file(in_vscode) == file and notebook_file(elsewhere) is None
    monkeypatch.setenv("JPY_SESSION_NAME", str(file))  # JupyterLab
    assert notebook_file(elsewhere) == file
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "console-1"))
    assert notebook_file(elsewhere) is None


def test_of_the_cells_that_a_kernel_has_executed_those_that_raised_are_left_out(tmp_path: Path) -> None:
    ends = ["prinx(2)", "raise KeyboardInterrupt", "assert a == 1"]
    asks = "from stratagem.launch.submit.entry_point import find_entry_point as find\nfound = find(None)"
    notebook = json.loads(notebook_of("a = 1", *ends, asks, "print(found.source, found.note)"))
    for cell in notebook["cells"][1:3]:
        cell["metadata"]["tags"] = ["raises-exception"]
    (tmp_path / "n.ipynb").write_text(json.dumps(notebook))
    command = [sys.executable, "-c", EXECUTE, str(tmp_path / "n.ipynb"), "60"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "took all 5 cells that this kernel has executed so far but what raised an error (cell 2);" in told, told
    assert "prinx" not in told and "# cell 3\nraise KeyboardInterrupt" in told


def test_a_function_is_no_entry_point() -> None:
    with pytest.raises(ConfigurationError, match="got the function write_notebook: run"):
        sg.run(write_notebook, worker_count=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["not json", "[]", '{"worksheets": []}'])
def test_a_file_that_is_no_notebook_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.ipynb").write_text(text)
    with pytest.raises(ConfigurationError, match="notebook"):
        read_cells(tmp_path / "bad.ipynb")


def test_a_notebook_in_another_language_is_refused(tmp_path: Path) -> None:
    text = {"cells": [], "metadata": {"kernelspec": {"language": "julia"}}}
    (tmp_path / "j.ipynb").write_text(json.dumps(text))
    with pytest.raises(ConfigurationError, match="in Python"):
        read_cells(tmp_path / "j.ipynb")


def test_a_script_that_python_reads_from_a_pipe_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "<stdin>", raising=False)
    with pytest.raises(ConfigurationError, match=r"give entry_point='train\.py'"):
        find_entry_point(None)


@pytest.mark.parametrize(("name", "words"), [("nowhere.py", "no file nowhere.py"), ("pyproject.toml", "end in .py")])
def test_an_entry_point_must_be_a_script(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[4])
    with pytest.raises(ConfigurationError, match=words):
        find_entry_point(name)
