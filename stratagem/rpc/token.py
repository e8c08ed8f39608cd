"""The shared token: proves that a caller belongs to the job. Which task it is, it can only say itself."""

from __future__ import annotations

import hmac
from pathlib import Path

from stratagem.errors import ConfigurationError
from stratagem.rpc.private_files import warn_if_open

MIN_CHARACTERS = 16


class Token:
    """A secret that can be shown and compared, and is in no log line, ``repr`` or error."""

    def __init__(self, value: str) -> None:
        self._value = value

    @classmethod
    def read(cls, path: str) -> Token:
        """The token in a file; space around it does not count.

        Raises:
            ConfigurationError: the file cannot be read, or holds no token.
        """
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not ASCII"
            raise ConfigurationError(f"cannot read the token file {path}: {reason}") from None
        if len(text) < MIN_CHARACTERS or not text.isprintable() or " " in text:
            raise ConfigurationError(
                f"expected one word of at least {MIN_CHARACTERS} characters in the token file {path}, got {len(text)} "
                f"characters; make one with: (umask 077; openssl rand -hex 32 > {path})"
            )
        warn_if_open(Path(path), "token file")
        return cls(text)

    @property
    def header(self) -> str:
        """What a caller sends as ``authorization``."""
        return f"Bearer {self._value}"

    def matches(self, header: str | bytes) -> bool:
        """Whether ``authorization`` shows this token; takes the same time wherever they differ."""
        shown = header.encode(errors="surrogateescape") if isinstance(header, str) else header
        return hmac.compare_digest(shown, self.header.encode())
