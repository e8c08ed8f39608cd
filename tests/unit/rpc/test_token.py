"""The token is read strictly, compared in constant time, and printed nowhere."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

import pytest

from stratagem.errors import ConfigurationError
from stratagem.rpc.security import MIN_CHARACTERS, Token

SECRET = "0123456789abcdef"


def write(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text, errors="surrogateescape")
    path.chmod(mode)
    return str(path)


def test_space_around_it_does_not_count(tmp_path: Path) -> None:
    token = Token.read(write(tmp_path / "token", f"\n {SECRET}\n"))
    assert token.matches(f"Bearer {SECRET}") and token.matches(f"Bearer {SECRET}".encode())


@pytest.mark.parametrize("shown", ["", SECRET, f"bearer {SECRET}", f"Bearer {SECRET} ", "Bearer 0123456789abcdeF", "é"])
def test_nothing_else_matches(shown: str) -> None:
    assert not Token(SECRET).matches(shown)


def test_the_comparison_takes_the_same_time_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    real = hmac.compare_digest

    def compare(shown: bytes, expected: bytes) -> bool:
        compared.append(shown)
        return real(shown, expected)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert not Token(SECRET).matches("Bearer x")
    assert compared == [b"Bearer x"]


@pytest.mark.parametrize(
    "text",
    ["", "short", SECRET[: MIN_CHARACTERS - 1], f"{SECRET} {SECRET}", f"{SECRET}\n{SECRET}", "é" * 20, "\udcff" * 20],
)
def test_a_file_without_one_good_word_is_refused_and_not_quoted(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"openssl rand -hex 32 > '.*/a file'") as refused:
        Token.read(write(tmp_path / "a file", text))
    assert SECRET not in str(refused.value) and "short" not in str(refused.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        Token.read(str(tmp_path / "nowhere"))


def test_a_file_that_others_can_read_is_worth_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Token.read(write(tmp_path / "private", SECRET))
    assert not caplog.records
    Token.read(write(tmp_path / "shared by all", SECRET, 0o644))
    assert f"chmod 600 '{tmp_path}/shared by all'" in caplog.text and SECRET not in caplog.text


def test_a_secret_of_kubernetes_is_root_s_and_read_through_its_group(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "token", SECRET, 0o440)
    Token.read(path)
    assert "chmod 600" in caplog.text
    caplog.clear()
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(path).st_uid + 1)
    Token.read(path)
    assert not caplog.records


def test_it_is_in_no_text() -> None:
    token = Token(SECRET)
    assert SECRET not in f"{token} {token!r}"
