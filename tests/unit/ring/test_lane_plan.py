"""Which lanes a ring takes."""

from __future__ import annotations

import dataclasses

import pytest

import stratagem
from stratagem.cluster.communication import CommunicationImplementation, CommunicationOptions, Transport
from stratagem.errors import ConfigurationError
from stratagem.worker.ring.building import check_agreement
from stratagem.worker.ring.lane_plan import LanePlan, RankInfo, alike, plan_lanes

AUTO = CommunicationOptions()


def members(*places: str, gpus: str = "") -> list[RankInfo]:
    """``gpus`` has a letter for each rank's, or a space."""
    return [RankInfo(f"worker:{rank}", place, gpus[rank : rank + 1].strip()) for rank, place in enumerate(places)]


def forced(transport: Transport) -> CommunicationOptions:
    return dataclasses.replace(AUTO, transport=transport)


@pytest.mark.parametrize(
    ("who", "options", "hosts", "ring"),
    [
        (members("a"), AUTO, ((0,),), None),
        (members("a", "a", "a"), AUTO, ((0, 1, 2),), None),
        (members("a", "b"), AUTO, ((0,), (1,)), "tcp"),
        (members("a", "b", "a", "b"), AUTO, ((0, 2), (1, 3)), "tcp"),
        (members("a", "a"), forced("tcp"), ((0,), (1,)), "tcp"),
        (members("a", "a"), forced("grpc"), ((0,), (1,)), "grpc"),
        (members("a", "a"), forced("shm"), ((0, 1),), None),
        (members("a", "a", gpus="x"), AUTO, ((0, 1),), None),
        (members("a", "a", "b", gpus="xyx"), AUTO, ((0, 1), (2,)), "tcp"),
    ],
)
def test_lanes(
    who: list[RankInfo], options: CommunicationOptions, hosts: tuple[tuple[int, ...], ...], ring: str | None
) -> None:
    plan = plan_lanes(who, options)
    assert (plan.hosts, plan.ring, plan.nccl) == (hosts, ring, False)
    assert plan.reason


def test_ranks_of_two_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [RankInfo("worker:0", options=alike(AUTO))]
    monkeypatch.setattr(stratagem, "__version__", "0.0.9")
    said.append(RankInfo("worker:1", options=alike(AUTO)))
    words = r"version of stratagem is \d.* on worker:0 and 0\.0\.9 on worker:1; it has to be the same"
    with pytest.raises(ConfigurationError, match=words):
        check_agreement(said)
    unknown = RankInfo("worker:1", options={name: value for name, value in said[0].options.items() if " " not in name})
    for both in (said[0], unknown), (unknown, said[0]):
        with pytest.raises(ConfigurationError, match=r"version of stratagem is .*not known on worker:1"):
            check_agreement(both)


def test_leaders_and_hosts() -> None:
    plan = plan_lanes(members("a", "b", "a"), AUTO)
    assert plan.leaders == (0, 1)
    assert plan.host_of(2) == (0, 2)
    assert not plan.flat
    assert plan_lanes(members("a", "b"), AUTO).flat


def test_auto_does_without_what_failed() -> None:
    who = members("a", "a", "b")
    without_memory = plan_lanes(who, AUTO, {"shm": "worker:1: no memory"})
    assert (without_memory.flat, without_memory.ring) == (True, "tcp")
    assert "worker:1: no memory" in without_memory.reason
    without_both = plan_lanes(who, AUTO, {"shm": "x", "tcp": "a firewall"})
    assert (without_both.flat, without_both.ring) == (True, "grpc")
    assert plan_lanes(who, AUTO, {"tcp": "a firewall"}) == LanePlan(
        ((0, 1), (2,)), "grpc", False, "2 hosts; no tcp: a firewall"
    )


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_lane_asked_for_that_failed_is_an_error(transport: Transport) -> None:
    with pytest.raises(ConfigurationError, match="is not available: because"):
        plan_lanes(members("a", "a"), forced(transport), {transport: "because"})


def test_shared_memory_between_hosts_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="worker:0, worker:1"):
        plan_lanes(members("a", "b", "a"), forced("shm"))


def test_nccl() -> None:
    all_cuda = members("a", "a", gpus="xy")
    assert plan_lanes(all_cuda, AUTO).nccl
    assert plan_lanes(all_cuda, forced("nccl")).nccl
    ring = dataclasses.replace(AUTO, implementation=CommunicationImplementation.RING)
    assert not plan_lanes(all_cuda, ring).nccl
    assert not plan_lanes(all_cuda, forced("tcp")).nccl
    nccl = dataclasses.replace(AUTO, implementation=CommunicationImplementation.NCCL)
    for options in (forced("nccl"), nccl):
        with pytest.raises(ConfigurationError, match="worker:1 computes on no CUDA device"):
            plan_lanes(members("a", "a", gpus="x"), options)
        with pytest.raises(ConfigurationError, match="but worker:0, worker:2 compute on one GPU; take RING"):
            plan_lanes(members("a", "a", "a", gpus="xyx"), options)
        with pytest.raises(ConfigurationError, match="but it is not available: worker:1: no NCCL; take RING"):
            plan_lanes(all_cuda, options, {"nccl": "worker:1: no NCCL"})
    assert plan_lanes(all_cuda, AUTO, {"nccl": "worker:1: no NCCL"}).hosts == ((0, 1),)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bytes_per_pack", -1),
        ("chunk_bytes", -1),
        ("stripes", 0),
        ("timeout_seconds", 0.0),
        ("transport", "udp"),
        ("wire_dtype", "int8"),
    ],
)
def test_options_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match="expected"):
        dataclasses.replace(AUTO, **{name: value})  # type: ignore[arg-type]
