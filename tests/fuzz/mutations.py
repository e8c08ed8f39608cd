"""What an attacker makes of a real message: some bytes are changed, lost, doubled or put in."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

_EXTREMES = (b"\x00", b"\xff", b"\x7f", b"\x80", b"\xff" * 9 + b"\x01", b"\xff" * 4, b"\x00" * 8, b"\x80" * 10)
MAX_BYTES = 8192


def mutated(real: bytes, rng: random.Random) -> bytes:
    """A message that is most likely no valid one any more; at most 8 KiB longer."""
    data = bytearray(real)
    for _ in range(1 + int(rng.expovariate(0.7))):
        at = rng.randrange(len(data) + 1)
        choice = rng.randrange(7)
        if choice == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif choice == 1 and data:
            data[at % len(data)] = rng.randrange(256)
        elif choice == 2:
            del data[at:]
        elif choice == 3:
            del data[at : at + rng.randrange(1, 9)]
        elif choice == 4:
            data[at:at] = rng.choice(_EXTREMES)
        elif choice == 5:
            stop = min(len(data), at + rng.randrange(1, 65))
            data[at:at] = data[at:stop] * rng.randrange(1, 4)
        else:
            data[at:at] = rng.randbytes(rng.randrange(1, 33))
    return bytes(data[: len(real) + MAX_BYTES])


_NUMBERS = (0, 1, 2, 7, 255, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 63) - 1, (1 << 64) - 1, -1, -(1 << 31))
_REALS = (0.0, -1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))
_WORDS = (
    "",
    "w",
    "SGD",
    "Adam",
    "worker:6",
    "worker:-1",
    "chief:0",
    "/etc/passwd",
    "/../..",
    "a\0b",
    "\u202e" * 9,
    "x" * 5000,
)


def distorted(message: Any, rng: random.Random) -> bytes:
    """A message that can be parsed, with other values in some of its fields; leaves ``message`` changed."""
    for _ in range(1 + int(rng.expovariate(0.7))):
        _distort(message, rng)
    data: bytes = message.SerializeToString()
    return data


def _distort(message: Any, rng: random.Random) -> None:
    if not message.DESCRIPTOR.fields:
        return
    field = rng.choice(message.DESCRIPTOR.fields)
    value = getattr(message, field.name)
    if rng.randrange(8) == 0:
        message.ClearField(field.name)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        value.clear()
    elif field.is_repeated and field.message_type is not None:
        if len(value) and rng.randrange(3):
            _distort(rng.choice(value), rng)
        else:
            value.add()
    elif field.message_type is not None:
        if field.message_type.full_name != "google.protobuf.Struct":
            _distort(value, rng)
        else:
            value.update({rng.choice(_WORDS): rng.choice((None, True, 1e300, "x", {"x": [1]}))})
    elif field.is_repeated:
        value.extend([_value(field, rng)] * rng.choice((1, 1, 2, 100)))
    else:
        setattr(message, field.name, _value(field, rng))


def _value(field: FieldDescriptor, rng: random.Random) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(_WORDS).replace("\0", rng.choice("\0a"))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 32, 300)))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return rng.choice((True, False))
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return rng.choice(_REALS)
    if field.type == FieldDescriptor.TYPE_ENUM:
        return rng.randrange(-2, 20)
    low, high = _BOUNDS.get(field.type, (0, (1 << 64) - 1))
    return min(max(rng.choice(_NUMBERS), low), high)


_BOUNDS = {
    FieldDescriptor.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_SINT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_SINT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.TYPE_FIXED32: (0, (1 << 32) - 1),
}
