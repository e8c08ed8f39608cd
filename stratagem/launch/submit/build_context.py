"""The content of an image: the files of the project folder, without those that ``.dockerignore`` names."""

from __future__ import annotations

import dataclasses
import io
import os
import posixpath
import re
import stat
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from stratagem.errors import ConfigurationError

LARGE_BYTES = 100 << 20
"""A context above this size is warned about: it is copied for every job."""
NUM_BIGGEST = 5
IGNORE_FILE = ".dockerignore"
DEFAULT_IGNORES = """\
.git
**/__pycache__
**/*.pyc
**/.venv
**/venv
**/node_modules
**/.ipynb_checkpoints
**/.mypy_cache
**/.pytest_cache
**/.ruff_cache
**/.env
"""
"""Taken where the project has no ``.dockerignore`` of its own."""
_TOKEN = re.compile(r"\*\*/?|[*?]|\[(?P<members>.[^]]*)\]|\\(?P<escaped>.)|.", re.DOTALL)
_WILD = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


class IgnoreRules:
    """The lines of a ``.dockerignore``; a ConfigurationError for one that is no pattern. A pattern that matches a
    folder matches everything in it; of several lines that match, the last one decides. ``*`` and ``?`` stop at "/",
    ``**`` does not. We send the context ourselves, so the rules are applied here; tests/deploy compares them with
    Docker's own."""

    def __init__(self, text: str) -> None:
        self._rules = tuple(_rules(text))
        self.takes_back = not all(excludes for _, excludes in self._rules)
        """Whether something in an ignored folder may be wanted all the same."""

    def ignores(self, path: str) -> bool:
        """Whether a file or folder stays out; ``path`` is relative to the context, with "/"."""
        parts = path.split("/")
        lineage = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        verdict = False
        for regex, excludes in self._rules:
            if excludes != verdict and any(map(regex.fullmatch, lineage)):
                verdict = excludes
        return verdict


def _rules(text: str) -> Iterator[tuple[re.Pattern[str], bool]]:
    """Each with whether it excludes; else, after a "!", it takes files back in."""
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        if line.startswith("#") or not line.strip():
            continue
        pattern = line.strip()
        excludes = not pattern.startswith("!")
        pattern = pattern if excludes else pattern[1:].strip()
        if not pattern:
            raise ConfigurationError(f"line {number} of .dockerignore re-includes nothing: write a pattern after '!'")
        cleaned = posixpath.normpath(pattern).lstrip("/")
        if cleaned in ("", "."):
            continue  # the context itself cannot be left out, nor taken back in
        try:
            yield re.compile(_translate(cleaned), re.DOTALL), excludes
        except re.error as error:
            raise ConfigurationError(f"line {number} of .dockerignore is invalid: {line!r} ({error.msg})") from None


def _translate(pattern: str) -> str:
    """The regular expression of a pattern, for the whole path."""
    out = ""
    for token in _TOKEN.finditer(pattern):
        if token[0] == "[":
            raise re.error("no ']' ends the '['")
        if token[0] == "\\":
            raise re.error("nothing follows the last '\\'")
        if members := token["members"]:
            out += "(?![/])[" + members.replace("[", "\\[") + "]"
        else:
            out += _WILD.get(token[0]) or re.escape(token["escaped"] or token[0])
    return out


@dataclasses.dataclass(frozen=True)
class BuildContext:
    """The files of a project, and a few made for the job."""

    root: Path
    files: tuple[str, ...]
    """Regular files and links, relative to ``root`` with "/", sorted."""
    folders: tuple[str, ...]
    num_bytes: int
    biggest: tuple[tuple[str, int], ...]
    """The largest files and their sizes in bytes, largest first."""

    def warning(self) -> str:
        """What to say about a large context; empty for one that is not."""
        if self.num_bytes <= LARGE_BYTES:
            return ""
        named = ", ".join(f"{name} ({_size(size)})" for name, size in self.biggest)
        return (
            f"{self.root} has {_size(self.num_bytes)} for the image; list what the job does not need in {IGNORE_FILE}. "
            f"The largest: {named}"
        )

    def words(self) -> str:
        return f"{len(self.files)} files, {_size(self.num_bytes)}, from {self.root}"

    def check_holds(self, script: str) -> None:
        """Refuses (ConfigurationError) a context that leaves the script out."""
        file, root = self.root / script, os.path.realpath(self.root)
        real = os.path.realpath(file)
        stays = script in self.files and os.path.relpath(real, root) in self.files
        if real != os.path.join(root, script) and not (stays and not os.path.isabs(os.readlink(file))):
            raise ConfigurationError(
                f"the script {script} would not be in the image: it is behind a link, to {real}, and links are "
                "copied as links. Name the file itself, inside the project's folder, or copy it there"
            )
        if script not in self.files:
            raise ConfigurationError(
                f"the script {script} would not be in the image, because {IGNORE_FILE} of {self.root} excludes it; "
                f"add the line !{script} there"
            )

    def write_tar(self, out: IO[bytes], made: Mapping[str, str]) -> None:
        """Writes the context as a tar archive, the project in its folder ``project``; files ``made`` for the job (texts
        by path in the archive) win over the project's."""
        # GNU: Docker takes an archive that begins with a PAX header for a Dockerfile.
        with tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT) as tar:
            for name in (*self.folders, *self.files):
                if f"project/{name}" not in made:
                    tar.add(self.root / name, f"project/{name}", recursive=False, filter=_anonymous)
            for name, text in made.items():
                data = text.encode()
                info = tarfile.TarInfo(name)
                info.size, info.mode = len(data), 0o644
                tar.addfile(info, io.BytesIO(data))


def read_context(root: Path) -> BuildContext:
    """Lists what of ``root`` goes into an image. ConfigurationError: ``.dockerignore`` holds no patterns."""
    ignore_file = root / IGNORE_FILE
    rules = IgnoreRules(ignore_file.read_text() if ignore_file.is_file() else DEFAULT_IGNORES)
    files: dict[str, int] = {}
    folders: list[str] = []
    for name, status in _walk(root, "", rules):
        if stat.S_ISDIR(status.st_mode):
            folders.append(name)
        elif stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            files[name] = status.st_size if stat.S_ISREG(status.st_mode) else 0
    biggest = sorted(files.items(), key=lambda item: (-item[1], item[0]))[:NUM_BIGGEST]
    return BuildContext(root, tuple(sorted(files)), tuple(sorted(folders)), sum(files.values()), tuple(biggest))


def _walk(root: Path, below: str, rules: IgnoreRules) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(root / below) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            name = f"{below}/{entry.name}" if below else entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            ignored = rules.ignores(name)
            if not ignored:
                yield name, entry.stat(follow_symlinks=False)
            if is_folder and (not ignored or rules.takes_back):
                yield from _walk(root, name, rules)


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without the owner, which is nobody inside the image."""
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def _size(num_bytes: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} B"
