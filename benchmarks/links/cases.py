"""The ``links`` benchmark: our lanes between hosts beside gloo, as a share of what a plain socket gets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from benchmarks.collectives.loop import NUM_UNTIMED, RankResult
from benchmarks.collectives.result import bus_bytes, to_samples
from benchmarks.hosts import Host, shaped_hosts
from benchmarks.links import jobs
from benchmarks.runner import Case, Identity, Sample

LANES = ("tcp", "grpc")
WIRES = ("float32", "bfloat16")
WIRE_SHARE = {"float32": 1.0, "bfloat16": 0.5, "float16": 0.5}
"""Bytes on the wire for each byte of float32."""

Run = Callable[[Sequence[Host]], list[RankResult]]


class NotOverTheLinkError(Exception):
    """Less crossed the links than the all-reduces had to send: something went another way."""


def link_cases(
    rate_mbit: int, num_workers: int, sizes: Sequence[int], lanes: Sequence[str], wires: Sequence[str], *, gloo: bool
) -> list[Case]:
    """The systems that take turns on links of one rate. Each measurement has hosts of its own.

    Args:
        rate_mbit: of every host's link, both directions.
        num_workers: ranks, each on a host of its own.
        sizes: bytes of each tensor.
        lanes: lanes of ours; none of them through shared memory, which these hosts share.
        wires: element types between our ranks.
        gloo: whether the peer gloo takes part.
    """
    case = functools.partial(_case, rate_mbit, num_workers, sizes)
    cases = [
        case("stratagem", lane, wire, functools.partial(jobs.run_stratagem, sizes=sizes, lane=lane, wire=wire))
        for lane in lanes
        for wire in wires
    ]
    if gloo:
        cases.append(case("gloo", "tcp", "float32", functools.partial(jobs.run_gloo, sizes=sizes)))
    return cases


def _case(rate_mbit: int, num_workers: int, sizes: Sequence[int], system: str, lane: str, wire: str, run: Run) -> Case:
    fields: Identity = {"benchmark": "links", "system": system, "lane": lane, "wire": wire, "rate_mbit": rate_mbit}
    identities: list[Identity] = [{**fields, "n": num_workers, "bytes": num_bytes} for num_bytes in sizes]

    def measure() -> tuple[Sequence[Sample], Mapping[str, str]]:
        with shaped_hosts(num_workers, rate_mbit) as hosts:
            goodput = jobs.measure_goodput(hosts)
            before = [(host.sent_bytes(), host.received_bytes()) for host in hosts]
            ranks = run(hosts)
            after = [(host.sent_bytes(), host.received_bytes()) for host in hosts]
        for host, (sent, received), (sent_after, received_after) in zip(hosts, before, after, strict=True):
            check_crossed(host, min(sent_after - sent, received_after - received), bytes_to_send(ranks, wire))
        samples, versions = to_samples(ranks)
        pairs = zip(samples, sizes, strict=True)
        return [_of_link(sample, num_bytes, num_workers, wire, goodput) for sample, num_bytes in pairs], versions

    return Case(identities, measure)


def bytes_to_send(ranks: Sequence[RankResult], wire: str) -> float:
    """Payload bytes that each rank of the job had to send, and to receive."""
    tensors = sum(size.num_bytes * (size.num_iterations + NUM_UNTIMED) for size in ranks[0].sizes)
    return bus_bytes(len(ranks), tensors) * WIRE_SHARE[wire]


def check_crossed(host: Host, counted: int, expected: float) -> None:
    """Refuses a job whose payload did not go over the links.

    Raises:
        NotOverTheLinkError: the interface of ``host`` counted fewer bytes than expected, in one of the directions.
    """
    if counted < expected:
        raise NotOverTheLinkError(
            f"expected at least {expected:,.0f} bytes each way over the link of {host.namespace}, counted {counted:,}"
        )


def _of_link(sample: Sample, num_bytes: int, num_workers: int, wire: str, goodput: float) -> Sample:
    """The sample as a share of the link: payload bytes that each rank sends in the median time, over the goodput."""
    median_s = sample["median_s"]
    assert median_s is not None
    rate = bus_bytes(num_workers, num_bytes) * WIRE_SHARE[wire] / median_s
    return {
        "median_s": median_s,
        "busbw_gbs": sample["busbw_gbs"],
        "of_goodput": rate / goodput,
        "goodput_gbs": goodput / 1e9,
    }
