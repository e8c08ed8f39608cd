"""The built wheel, installed outside the tree: complete, and it works where no checkout can help it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(300)


def _run(command: list[str], folder: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The wheel, built from a copy of what git would ship."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = _run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], ROOT).split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file() and name.startswith(
            ("stratagem/", "chief/", "ps/", "worker/", "pyproject", "LICENSE")
        ):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    (source / "README.md").write_text("Stratagem")
    _run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)], source)
    (built,) = out.glob("*.whl")
    yield built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter of its own with the wheel, and the dependencies of this environment but not its checkout."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    installed = _run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip()
    # A path in a .pth file is not itself searched for .pth files: the editable checkout stays out.
    (Path(installed) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    _run([*pip, "--ignore-installed", str(wheel)], folder)
    return python


def test_the_wheel_holds_every_package(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in project["tool"]["setuptools"]["packages"]:
        folder = ROOT / package.replace(".", "/")
        for file in folder.glob("*.py"):
            assert f"{package.replace('.', '/')}/{file.name}" in names
    assert "stratagem/py.typed" in names
    assert "stratagem/rpc/generated/chief_pb2.pyi" in names
    static = {f"stratagem/chief/web/static/{name}" for name in ("index.html", "page.js", "vendor/uplot/LICENSE")}
    assert static <= names


@pytest.mark.thorough
def test_every_module_imports_from_the_wheel(python: Path, tmp_path: Path) -> None:
    program = (
        "import importlib, pkgutil, stratagem\n"
        "for module in pkgutil.walk_packages(stratagem.__path__, 'stratagem.'):\n"
        "    print(importlib.import_module(module.name).__file__)\n"
    )
    files = _run([str(python), "-c", program], tmp_path).splitlines()
    home = str(python.parents[1])
    assert len(files) > 40
    assert [file for file in files if not file.startswith(home)] == []


@pytest.mark.thorough
def test_the_command_works(python: Path, tmp_path: Path) -> None:
    stratagem = str(python.with_name("stratagem"))
    assert _run([stratagem, "version"], tmp_path).strip().count(".") == 2
    (tmp_path / "train.py").write_text("import stratagem, sys\nprint(sys.argv[1], stratagem.__file__)\n")
    out = _run([stratagem, "run", "--strategy", "one", "train.py", "hello"], tmp_path)
    assert out.startswith(f"hello {python.parents[1]}")
