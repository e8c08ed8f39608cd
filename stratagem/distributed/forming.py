"""How the ranks of a process group find each other and open their lanes: a store instead of a chief."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import logging
import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from types import NoneType
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from stratagem.arguments import check_kind
from stratagem.cluster.communication import CommunicationImplementation, CommunicationOptions
from stratagem.cluster.config import WorkerConfig
from stratagem.cluster.sources import Layer, environment_layer, flag_of, resolve, variable_of
from stratagem.cluster.spec import join_address, split_address
from stratagem.distributed.messages import Messages
from stratagem.distributed.nccl import Nccl
from stratagem.distributed.open_groups import elsewhere, refuse_forked
from stratagem.distributed.process_group import LaneProcessGroup
from stratagem.distributed.store_members import Rendezvous, StoreMembers
from stratagem.errors import ClusterSpecError, ConfigurationError
from stratagem.rpc.binding import is_loopback
from stratagem.rpc.host_id import own_host_id
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.security import Security, Token, security_of
from stratagem.rpc.server import add_servicer, serve
from stratagem.worker.ring.lane_plan import PairLane, wants_nccl
from stratagem.worker.ring.ring_member import RingMember
from stratagem.worker.ring.ring_service import RingService
from stratagem.worker.servicer import SERVICE, WorkerServicer

logger = logging.getLogger(__name__)

_IDLE = {
    "bucket_bytes": "DDP has bucket_cap_mb=",
    "collective_timeout_s": "init_process_group has timeout=",
}
"""Of a worker's configuration, with what torch has instead."""


def make_process_group(given: Any, options: CommunicationOptions | None = None) -> LaneProcessGroup:
    """What ``init_process_group`` and ``new_group`` call. ``given``: torch's ``_DistributedBackendOptions``;
    ``options``: the script's ``pg_options``, else as the variables ``STRATAGEM_…`` of a worker say.

    Raises:
        ConfigurationError: ranks want different things, or cannot reach each other; ``options`` are another backend's;
            compression is asked for; this process was forked from one that had a group.
        ClusterTimeoutError: a rank does not come.
    """
    check_kind(options, CommunicationOptions, NoneType)
    ranks = given.global_ranks_in_group or list(range(given.group_size))
    return form(given.store, given.group_rank, ranks, given.timeout.total_seconds(), options)


def form(
    store: Store, rank: int, ranks: list[int], timeout_s: float, options: CommunicationOptions | None = None
) -> LaneProcessGroup:
    """A process group of ``ranks`` (of the default group), of which this is the ``rank``-th."""
    refuse_forked()
    if not 0 <= rank < len(ranks):
        raise ConfigurationError(f"there is no rank {rank} among {len(ranks)}: RANK goes from 0 to WORLD_SIZE - 1")
    if timeout_s <= 0:
        raise ConfigurationError(
            f"expected a timeout= above 0, got timedelta(seconds={timeout_s:g}), in which no rank can come: give "
            "init_process_group or new_group for example timeout=timedelta(minutes=5), or none for torch's default"
        )
    tasks = [f"worker:{each}" for each in ranks]
    # Its rank is who it is: processes that a task's script has spawned have that task in their environment.
    layers = [Layer("rank", {"task": tasks[rank]}), environment_layer(WorkerConfig, os.environ)]
    config = resolve(WorkerConfig, layers).config
    if options is None and config.compression:
        raise ConfigurationError(
            f"compression {config.compression!r} (--compression, STRATAGEM_COMPRESSION) is for the ring of a strategy: "
            "leave it out, and give DDP a communication hook, or this group pg_options=sg.CommunicationOptions()"
        )
    if options is None:
        _warn_of_idle(config)
    options = options or config.communication_options()
    patience_s = options.timeout_seconds or timeout_s
    options = dataclasses.replace(options, timeout_seconds=patience_s)
    of_lanes = dataclasses.replace(options, transport="auto") if options.transport == "nccl" else options
    if wants_nccl(of_lanes):
        of_lanes = dataclasses.replace(of_lanes, implementation=CommunicationImplementation.AUTO)
    meeting = Rendezvous(store, rank, tasks, timeout_s)
    token = Token(meeting.exchange("its ranks", secrets.token_hex(32) if rank == 0 else "")[0])
    security = _security(config, token)
    host = own_host(config, os.environ)
    members, meter = StoreMembers(rank, tasks, security), BytesMeter()
    with ExitStack() as undo:
        ring_service = RingService(
            host,
            lambda: members.membership,
            meter,
            security,
            max_lanes_per_peer=config.max_lanes_per_peer,
            max_inbox_bytes=config.max_inbox_bytes,
        )
        undo.callback(ring_service.close)
        server = serve(
            config.model_copy(update={"bind": join_address(host, 0), "insecure": True}),
            lambda server: add_servicer(SERVICE, WorkerServicer(ring_service), server),
            services=[SERVICE.full_name],
            security=security,
        )
        undo.callback(server.stop, 0.2)
        words = meeting.exchange("the address", f"{server.address} {own_host_id()}")
        addresses = [word.partition(" ")[0] for word in words]
        places = [word.partition(" ")[2] for word in words]
        _check_reachable(tasks, addresses, places)
        members.met(addresses)
        meeting.exchange("that it knows the others", "")  # who calls one that does not is refused, with a warning
        member = RingMember(ring_service, members, meter)
        undo.callback(member.close, "the process group did not form")
        communicator = member.form(of_lanes, torch.device("cpu"), timeout_s)
        meeting.forget()
        diagnosis = ring_service.diagnosis
        assert diagnosis is not None  # it has formed
        ring_service.elsewhere = functools.partial(elsewhere, tasks[rank], communicator)
        undo.pop_all()
    messages = Messages(
        rank,
        len(ranks),
        member.opener,
        lambda other: _lane_between(of_lanes, places[rank] == places[other]),
        diagnosis,
        patience_s,
    )

    def close(reason: str, has_failed: bool) -> None:
        diagnosis.end(reason, has_failed)
        messages.close(reason)
        member.close(reason)  # ends what waits for a lane that never came
        messages.join()
        server.stop(0.2)

    def split(at: Store, chosen: list[int], timeout: datetime.timedelta | None) -> LaneProcessGroup:
        seconds = timeout_s if timeout is None else timeout.total_seconds()
        wanted = options if timeout is None else dataclasses.replace(options, timeout_seconds=None)
        return form(at, chosen.index(rank), [ranks[each] for each in chosen], seconds, wanted)

    nccl = Nccl(communicator, store, tasks, options, security.allows_clear_text)
    return LaneProcessGroup(tasks, communicator, messages, nccl, store, split, close)


def _lane_between(options: CommunicationOptions, is_same_place: bool) -> PairLane:
    if options.transport in ("grpc", "tcp"):
        return options.transport
    return "shm" if is_same_place else "tcp"


def own_host(config: WorkerConfig, environ: Mapping[str, str]) -> str:
    """The address at which the other ranks reach this process: that of ``bind`` if it was given, else the one from
    which this host reaches MASTER_ADDR."""
    host, _ = split_address(config.bind)
    master = environ.get("MASTER_ADDR", "")
    if not master or not is_loopback(host):
        return host
    try:
        family, kind, _, _, address = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return host


@functools.cache
def _warn_of_idle(config: WorkerConfig) -> None:
    """Says once what was set for the ring of a strategy, and does nothing here."""
    for name, instead in _IDLE.items():
        if getattr(config, name) != WorkerConfig.model_fields[name].default and config.task.endswith(":0"):
            words = "%s (%s) is for the ring of a strategy, and has no effect in a process group: %s"
            logger.warning(words, flag_of(name), variable_of(name), instead)


def _security(config: WorkerConfig, token: Token) -> Security:
    """As the variables of a worker say; without certificates whoever could read the store is let in."""
    if config.tls:
        return security_of(config)
    return Security(config.task, token=token, insecure=True)


def _check_reachable(tasks: list[str], addresses: list[str], places: list[str]) -> None:
    for task, address, place in zip(tasks, addresses, places, strict=True):
        try:
            host = split_address(address)[0]
        except ClusterSpecError as error:
            raise ClusterSpecError(f"{task} has put no address into the store: {error}") from None
        if is_loopback(host) and any(place != other for other in places):
            raise ConfigurationError(
                f"{task} listens on {host}, where ranks on other hosts cannot reach it. Give it STRATAGEM_BIND="
                "ADDRESS:0, or as MASTER_ADDR a name that is not of loopback on its own host either"
            )
