"""The build context: what is left out, what is warned about, and the archive that is sent."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from stratagem.errors import ConfigurationError
from stratagem.launch.submit import build_context
from stratagem.launch.submit.build_context import IgnoreRules, read_context


@pytest.mark.parametrize(
    ("lines", "path", "ignored"),
    [
        ("data", "data", True),
        ("data", "data/a/b", True),
        ("data", "other/data", False),
        ("/data/", "data/x", True),
        ("./data", "data/x", True),
        ("*.log", "a.log", True),
        ("*.log", "sub/a.log", False),
        ("**/*.log", "a.log", True),
        ("**/*.log", "x/y/a.log", True),
        ("*/temp*", "sub/temporary.txt", True),
        ("*/temp*", "temporary.txt", False),
        ("temp?", "tempa", True),
        ("temp?", "temp/", False),
        ("a/**/z", "a/z", True),
        ("a/**/z", "a/b/c/z", True),
        ("a/**", "a/b", True),
        ("[ab].txt", "a.txt", True),
        ("[^ab].txt", "a.txt", False),
        ("[^ab].txt", "c.txt", True),
        (r"\*.txt", "*.txt", True),
        (r"\*.txt", "a.txt", False),
        ("*.md\n!README.md", "README.md", False),
        ("*.md\n!README.md", "other.md", True),
        ("!README.md\n*.md", "README.md", True),
        ("*\n!src", "src/a.py", False),
        ("*\n!src\nsrc/b.py", "src/b.py", True),
        ("# *.py\n\n", "a.py", False),
        (" # data", "# data", True),
        (".", "a.py", False),
    ],
)
def test_dockerignore_patterns(lines: str, path: str, ignored: bool) -> None:
    assert IgnoreRules(lines).ignores(path) is ignored


@pytest.mark.parametrize("line", ["!", "[a", "a\\", "[b-a]"])
def test_a_line_that_is_no_pattern_is_named(line: str) -> None:
    with pytest.raises(ConfigurationError, match=r"line 2 of \.dockerignore"):
        IgnoreRules(f"# first\n{line}")


def project(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def test_without_a_dockerignore_what_no_job_needs_stays_out(tmp_path: Path) -> None:
    project(tmp_path, "train.py", ".git/HEAD", "a/__pycache__/x.pyc", ".venv/bin/python", ".env", "a/b.py")
    assert read_context(tmp_path).files == ("a/b.py", "train.py")


def test_the_dockerignore_of_the_project_decides(tmp_path: Path) -> None:
    project(tmp_path, "train.py", "data/big.bin", "data/keep.txt", ".git/HEAD")
    (tmp_path / ".dockerignore").write_text("data\n!data/keep.txt\n")
    assert read_context(tmp_path).files == (".dockerignore", ".git/HEAD", "data/keep.txt", "train.py")


def test_links_go_as_links_and_pipes_stay_out(tmp_path: Path) -> None:
    project(tmp_path, "train.py")
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert read_context(tmp_path).files == ("loop", "train.py")


def test_a_large_context_is_warned_about_with_its_biggest_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project(tmp_path, "train.py")
    for size in range(1, 8):
        (tmp_path / f"{size}.bin").write_bytes(bytes(size << 10))
    assert read_context(tmp_path).warning() == ""
    monkeypatch.setattr(build_context, "LARGE_BYTES", 20 << 10)
    warning = read_context(tmp_path).warning()
    assert "28.0 KiB" in warning and ".dockerignore" in warning
    assert warning.index("7.bin (7.0 KiB)") < warning.index("6.bin") < warning.index("3.bin")
    assert "2.bin" not in warning


def test_the_archive_has_the_project_below_and_what_was_made_on_top(tmp_path: Path) -> None:
    project(tmp_path, "train.py", "a/b.py", "Dockerfile")
    out = io.BytesIO()
    read_context(tmp_path).write_tar(out, {"Dockerfile": "FROM x\n", "project/a/b.py": "made"})
    out.seek(0)
    with tarfile.open(fileobj=out) as tar:
        assert sorted(tar.getnames()) == [
            "Dockerfile",
            "project/Dockerfile",
            "project/a",
            "project/a/b.py",
            "project/train.py",
        ]
        assert {member.uid for member in tar} == {0}
        made = tar.extractfile("project/a/b.py")
        assert made is not None and made.read() == b"made"


def test_a_script_that_is_ignored_is_named(tmp_path: Path) -> None:
    project(tmp_path, "train.py")
    (tmp_path / ".dockerignore").write_text("*.py\n")
    with pytest.raises(ConfigurationError, match=r"add the line !train\.py"):
        read_context(tmp_path).check_holds("train.py")


@pytest.mark.parametrize("script", ["link.py", "folder/train.py", "absolute.py"])
def test_a_script_behind_a_link_is_refused_with_the_file_it_is(script: str, tmp_path: Path) -> None:
    elsewhere, root = project(tmp_path / "elsewhere", "train.py"), project(tmp_path / "project", "train.py")
    (root / "link.py").symlink_to(elsewhere / "train.py")
    (root / "folder").symlink_to(elsewhere)
    (tmp_path / "same").symlink_to(root)
    (root / "absolute.py").symlink_to(root / "train.py")
    (root / "relative.py").symlink_to("train.py")
    for works in ("train.py", "relative.py"):
        read_context(tmp_path / "same").check_holds(works)
    with pytest.raises(ConfigurationError, match=f"behind a link, to {tmp_path}/.*/train.py"):
        read_context(root).check_holds(script)
