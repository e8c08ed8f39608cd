"""Which strategy a name and a cluster ask for. Pure, no I/O."""

from __future__ import annotations

from typing import Literal, cast, get_args

from stratagem.cluster.spec import ClusterSpec, refuse_unknown
from stratagem.errors import ClusterSpecError

StrategyName = Literal["one", "mirrored", "central", "ring", "ps"]
StrategyOrAuto = Literal["auto", StrategyName]
STRATEGIES: tuple[str, ...] = get_args(StrategyOrAuto)
ONE_PROCESS = {"one": "OneDeviceStrategy", "mirrored": "MirroredStrategy", "central": "CentralStorageStrategy"}
"""Strategies that need no cluster, and their classes."""


def choose_strategy(name: str, num_workers: int, num_ps: int, num_devices: int = 1) -> StrategyName:
    """The strategy to use for ``name`` (``"auto"``: what the cluster, or this host, asks for).

    Args:
        name: ``"auto"``, ``"one"`` (OneDeviceStrategy), ``"mirrored"`` (MirroredStrategy), ``"central"``
            (CentralStorageStrategy), ``"ring"`` (MultiWorkerMirroredStrategy) or ``"ps"`` (ParameterServerStrategy).
        num_workers: workers in the cluster; 1 without a cluster.
        num_devices: accelerators of this host, or devices that were asked for.

    Raises:
        ConfigurationError: unknown name.
        ClusterSpecError: the strategy cannot run on this cluster.
    """
    refuse_unknown("strategy", [name], STRATEGIES)
    if name == "auto":
        name = "ps" if num_ps else "ring" if num_workers > 1 else "mirrored" if num_devices > 1 else "one"
    if name == "ps":
        if num_ps < 1 or num_workers < 1:
            raise ClusterSpecError(
                f"ParameterServerStrategy needs at least one ps and one worker, got {num_ps} ps and "
                f"{num_workers} workers; add them to the cluster (`stratagem run --workers 2 --ps 1`)"
            )
        return "ps"
    if num_ps:
        how = "MultiWorkerMirroredStrategy trains without parameter servers"
        how = how if name == "ring" else f"{ONE_PROCESS[name]} trains in one process"
        raise ClusterSpecError(f"{how}, but the cluster has {num_ps} ps; choose the strategy 'ps' or leave the ps out")
    if num_workers > 1 and name != "ring":
        raise ClusterSpecError(
            f"{ONE_PROCESS[name]} trains in one process, but the cluster has {num_workers} workers; "
            "choose the strategy 'ring', add parameter servers (`--ps 1`) or use one worker"
        )
    return cast(StrategyName, name)


def strategy_in(cluster: ClusterSpec | None, name: str, num_devices: int = 1) -> StrategyName:
    """As :func:`choose_strategy`, for a process of a cluster; None: of none. With a chief ``"auto"`` is a ring of one
    worker, too: the chief has somebody to serve, and does not train beside it."""
    if cluster is None:
        return choose_strategy(name, 1, 0, num_devices)
    if name == "auto" and cluster.chief and not cluster.num_ps:
        name = "ring"
    return choose_strategy(name, cluster.num_workers, cluster.num_ps, num_devices)
