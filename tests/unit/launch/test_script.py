"""What is not there is refused before a job starts, and what Python would find is not."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from stratagem.errors import ConfigurationError
from stratagem.launch.script import check_script


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one, with modules that must not be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one] + [str(tmp_path / "elsewhere")])
    for name in ("one.py", "pkg/__init__.py", "pkg/train.py", "elsewhere/far/__init__.py", "elsewhere/far/train.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise AssertionError('imported')\n")
    (tmp_path / "space" / "inner").mkdir(parents=True)
    (tmp_path / "space" / "train.py").touch()
    (tmp_path / "space" / "inner" / "train.py").touch()
    for name, content in (
        ("wide", "__path__.append('somewhere')"),
        ("shared", "__import__('pkg_resources').declare_namespace(__name__)"),
        ("renamed", "import sys; sys.modules[__name__ + '.other'] = pkg"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"{content}\n")
    return tmp_path


@pytest.mark.parametrize("name", ["nothing", "pkg.nothing", "pkg.train.nothing", "nothing.train", "far.nothing"])
def test_a_module_that_is_not_there_is_refused(folder: Path, name: str) -> None:
    """The whole job started, and each worker ended with the traceback of runpy."""
    with pytest.raises(ConfigurationError, match=rf"finds no {name}: the current folder is {folder}"):
        check_script(Path(name), True)


@pytest.mark.parametrize(
    "name",
    [
        *("one", "pkg", "pkg.train", "far.train", "space.train", "space.inner.train"),
        *("wide.train", "shared.train", "renamed.other.train", "timeit", "json.tool"),
    ],
)
def test_a_module_that_python_finds_or_may_find_is_not_refused(folder: Path, name: str) -> None:
    check_script(Path(name), True)


def test_a_finder_that_is_asked_for_top_modules_as_python_asks_it_is_heard(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of editable installs may be: they look away when they are given a path."""

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            return ModuleSpec(name, None) if path is None and name == "installed" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    check_script(Path("installed"), True)
