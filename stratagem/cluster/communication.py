"""How workers talk while they reduce: the vocabulary and the choices of collective communication. Pure, no I/O."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from stratagem.arguments import above_zero, known_arguments, whole_number, whole_numbers
from stratagem.cluster.named_enum import NamedEnum
from stratagem.errors import ConfigurationError


class ReduceOp(NamedEnum):
    """How values of replicas are reduced. TensorFlow has SUM and MEAN."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


class CommunicationImplementation(NamedEnum):
    """Which implementation carries collectives, by TensorFlow's names."""

    AUTO = "auto"
    """NCCL where every worker has a GPU of its own, else RING."""
    RING = "ring"
    """Our own lanes: shared memory inside a host, a ring between hosts."""
    NCCL = "nccl"
    """NCCL through ``torch.distributed``."""


CollectiveCommunication = CommunicationImplementation
"""The name that TensorFlow had for it before."""

Transport = Literal["auto", "grpc", "tcp", "shm", "nccl"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
WireDType = Literal["float32", "bfloat16", "float16"]
WIRE_DTYPES: tuple[WireDType, ...] = get_args(WireDType)

Compression = Literal["bf16", "fp16", "int8", "powersgd", "topk"]


@known_arguments
@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """Options of collectives; ``tf.distribute.experimental.CommunicationOptions`` has the first three.

    Raises:
        ConfigurationError: a value is out of range.
    """

    implementation: CommunicationImplementation = CommunicationImplementation.AUTO
    bytes_per_pack: int = 0
    """Size of a gradient bucket in bytes; 0: the default of 25 MiB."""
    timeout_seconds: float | None = None
    """Seconds a collective may stall before the peer that holds it up is named; None: 300."""
    transport: Transport = "auto"
    """Lane between peers. auto: NCCL as ``implementation`` says, else shm inside a host, tcp between hosts."""
    wire_dtype: WireDType = "float32"
    """Element type of float32 tensors between hosts; sums are always float32."""
    chunk_bytes: int = 0
    """Size of a chunk on a tcp or grpc lane in bytes; 0: chosen by a short trial at the start."""
    stripes: int = 1
    """Parallel connections to the next worker of a ring (tcp and grpc lanes)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "implementation", CommunicationImplementation(self.implementation))
        whole_numbers(0, bytes_per_pack=self.bytes_per_pack, chunk_bytes=self.chunk_bytes)
        whole_number("stripes", self.stripes)
        above_zero(timeout_seconds=self.timeout_seconds)
        if self.transport not in TRANSPORTS:
            raise ConfigurationError(f"expected a transport of {', '.join(TRANSPORTS)}, got {self.transport!r}")
        if self.wire_dtype not in WIRE_DTYPES:
            raise ConfigurationError(f"expected a wire dtype of {', '.join(WIRE_DTYPES)}, got {self.wire_dtype!r}")
