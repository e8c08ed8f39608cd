"""Which options of a job mean something together, however it is started. Pure, no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from stratagem.cluster.choice import StrategyName
from stratagem.cluster.sources import flag_of
from stratagem.errors import ConfigurationError

OF_RING = ("wire_dtype", "bucket_bytes", "chunk_bytes", "stripes", "collective_timeout_s", "compression")
"""Fields of a worker's configuration: how workers talk that reduce together."""

_OWN_ELEMENTS = ("bf16", "fp16", "int8", "topk")
"""Compressions that have no float32 to send; the factors of powersgd are."""


def check_staleness(staleness: float, num_ps: int) -> None:
    """Refuses (ConfigurationError) a bound that there cannot be, or without parameter servers whose it is."""
    if not (isinstance(staleness, int | float) and staleness >= 0):
        raise ConfigurationError(f"expected a staleness of at least 0 (math.inf: asynchronous), got {staleness}")
    if 0 < staleness < math.inf and not num_ps:
        raise ConfigurationError(
            f"a staleness of {staleness:g} needs parameter servers: add ps; without them, workers train in step"
        )


def without_effect(given: Iterable[str], strategy: StrategyName) -> list[str]:
    """Those of the options ``given`` that say how workers reduce together, where ps do; or how they talk, where one
    process has nobody to talk to."""
    idle = {"ring": (), "ps": OF_RING}.get(strategy, (*OF_RING, "transport"))
    return [name for name in given if name in idle]


def no_effect(option: str, strategy: StrategyName) -> str:
    """What is said of one of :func:`without_effect`."""
    if strategy == "ps":
        return f"{option} is for a ring of workers and has no effect with ps: leave it out"
    return f"{option} is for several workers and has no effect in one process: leave it out, or add workers"


def check_communication(given: Mapping[str, str], strategy: StrategyName) -> None:
    """Refuses (ConfigurationError) options ``given``, with their values, that mean nothing under a strategy."""
    for name in without_effect(given, strategy):
        raise ConfigurationError(no_effect(flag_of(name), strategy))
    compression = given.get("compression")
    if given.get("wire_dtype", "float32") != "float32" and compression in _OWN_ELEMENTS:
        raise ConfigurationError(
            f"--wire-dtype {given['wire_dtype']} has no effect on gradients that --compression {compression} makes "
            "smaller: leave one of them out"
        )
    if strategy == "ps" and given.get("transport") == "nccl":
        raise ConfigurationError("--transport nccl is for a ring of workers; a ps is reached by shm, tcp or grpc")
    if strategy in ("one", "ps") and "," in given.get("devices", ""):
        way_out = "give one device, and more --workers" if strategy == "ps" else "give one, or --strategy mirrored"
        raise ConfigurationError(
            f"--devices {given['devices']}: the strategy {strategy!r} has one replica per process: {way_out}"
        )


def check_checkpoint_every(seconds: float, num_ps: int) -> None:
    """Refuses (ConfigurationError) checkpoints by the chief without ps: it saves what those hold, and nothing else."""
    if seconds and not num_ps:
        raise ConfigurationError(
            "--checkpoint-every-s is for parameter servers, whose chief saves what they hold: add ps, or save in "
            "the script (sg.CheckpointManager, sg.callbacks.BackupAndRestore)"
        )


def check_healing(num_devices: int, compression: object, is_nccl: bool) -> None:
    """Refuses (ConfigurationError) what a ring cannot have that goes on without lost workers (``--min-workers``)."""
    has = [f"{num_devices} devices in a worker"] if num_devices > 1 else []
    has += [f"compression={compression!r}"] if compression else []
    has += ["NCCL"] if is_nccl else []
    if has:
        raise ConfigurationError(
            f"a ring that continues without lost workers (--min-workers) cannot have {has[0]}: leave out that or "
            "--min-workers; give each device a worker of its own, and use --transport auto, tcp or grpc between GPUs"
        )


def check_max_workers(most: int, num_workers: int, min_workers: int, num_ps: int) -> None:
    """Refuses (ConfigurationError) fewer than the workers that a job begins with, or of a job that takes no further
    ones."""
    if most and not (most >= num_workers and (num_ps or min_workers)):
        raise ConfigurationError(
            f"--max-workers {most} is the most workers that a running job admits: expected at least as many as it "
            f"starts with, and a ring with --min-workers, or ps; got {num_workers} workers, --min-workers "
            f"{min_workers}, {num_ps} ps"
        )
