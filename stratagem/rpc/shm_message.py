"""The messages on the Unix socket of a shm lane, in both directions."""

import struct

FRAME, SEGMENT, INLINE, BORROWED, WANT = b"SGFR", b"SGSG", b"SGIN", b"SGBR", b"SGWT"
"""A frame in the sender's memory, that memory, a frame behind its header, one in a slot that was borrowed, and the wish
to borrow one of so many bytes."""
MESSAGE = struct.Struct("<4sBB2xIQQQIQI4x")
"""Magic, kind, dtype, group, transfer, offset, elements, segment, at, slot."""
RELEASE = struct.Struct("<I")
"""The other way: the receiver has let go of this slot, or words of :mod:`stratagem.rpc.lent_slots` follow."""
INLINE_BYTES = 32 << 10
"""Frames up to this size go through the socket: taking a slot, showing it and getting it back costs more."""
