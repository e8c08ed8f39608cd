"""Sizes as people write them: "256KB". Standard library only."""

from __future__ import annotations

import re

UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
"""Powers of two, as in the tables of other all-reduce benchmarks."""
ELEMENT_BYTES = 4
"""float32."""
DEFAULT_SIZES = "4KB,256KB,1MB,16MB,64MB,256MB"


def parse_sizes(text: str) -> list[int]:
    """Bytes of each size of a list like "4KB,1MB".

    Raises:
        ValueError: a size is not a whole number of float32 elements above 0, or the unit is unknown.
    """
    return [parse_size(part.strip()) for part in text.split(",")]


def parse_size(text: str) -> int:
    """Bytes of a size like "256KB"; see :func:`parse_sizes`."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?B)", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"expected a size like 4KB, 1MB or 4096B, got {text!r}")
    num_bytes = int(match[1]) * UNITS[match[2].upper()]
    if num_bytes == 0 or num_bytes % ELEMENT_BYTES:
        raise ValueError(f"expected a whole number of float32 elements ({ELEMENT_BYTES} bytes each), got {text}")
    return num_bytes
