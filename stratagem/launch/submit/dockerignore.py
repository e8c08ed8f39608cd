"""Which files of a folder Docker would leave out of a build, by its ``.dockerignore``. Pure, no I/O.

We send the build context ourselves, so the rules are applied here; tests/deploy compares them with Docker's own.
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
from collections.abc import Iterator

from stratagem.errors import ConfigurationError


@dataclasses.dataclass(frozen=True)
class _Rule:
    regex: re.Pattern[str]
    excludes: bool
    """False for a line that begins with "!": it takes files back in."""


class IgnoreRules:
    """The lines of a ``.dockerignore``; a ConfigurationError for one that is no pattern. A pattern that matches a
    folder matches everything in it; of several lines that match, the last one decides. ``*`` and ``?`` stop at "/",
    ``**`` does not."""

    def __init__(self, text: str) -> None:
        self._rules = tuple(_rules(text))
        self.takes_back = any(not rule.excludes for rule in self._rules)
        """Whether something in an ignored folder may be wanted all the same."""

    def ignores(self, path: str) -> bool:
        """Whether a file or folder stays out; ``path`` is relative to the context, with "/"."""
        parts = path.split("/")
        lineage = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        verdict = False
        for rule in self._rules:
            if rule.excludes != verdict and any(rule.regex.fullmatch(place) for place in lineage):
                verdict = rule.excludes
        return verdict


def _rules(text: str) -> Iterator[_Rule]:
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
            yield _Rule(re.compile(_translate(cleaned), re.DOTALL), excludes)
        except re.error as error:
            raise ConfigurationError(f"line {number} of .dockerignore is invalid: {line!r} ({error.msg})") from None


def _translate(pattern: str) -> str:
    """The regular expression of a pattern, for the whole path."""
    out, at = "", 0
    while at < len(pattern):
        char = pattern[at]
        if pattern.startswith("**", at):
            at += 2
            if pattern.startswith("/", at):
                at += 1
                out += "(?:.*/)?"
            else:
                out += ".*"
            continue
        if char == "*":
            out += "[^/]*"
        elif char == "?":
            out += "[^/]"
        elif char == "[":
            end = pattern.find("]", at + 2)
            if end < 0:
                raise re.error("no ']' ends the '['")
            out += "(?![/])[" + pattern[at + 1 : end].replace("[", "\\[") + "]"
            at = end
        elif char == "\\":
            at += 1
            if at == len(pattern):
                raise re.error("nothing follows the last '\\'")
            out += re.escape(pattern[at])
        else:
            out += re.escape(char)
        at += 1
    return out
