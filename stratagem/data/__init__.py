"""Distributed datasets."""

from typing import Any

from stratagem.tensorflow_names import no_attribute


def __getattr__(name: str) -> Any:
    raise no_attribute(f"module {__name__!r}", name, __name__)
