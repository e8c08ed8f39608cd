"""Tells glibc to reuse the memory of frames. Fresh pages cost more than copying into them."""

from __future__ import annotations

import ctypes
import logging

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_BYTES = 4 << 20
_TRIM_BYTES = 512 << 20


def keep_frames_in_heap() -> bool:
    """Sets malloc's thresholds so that buffers of about 1 MiB come from the heap and stay. False without glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))
