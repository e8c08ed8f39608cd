"""Units and leases on the wire."""

from __future__ import annotations

from stratagem.cluster.units import Lease, Unit
from stratagem.rpc.generated import chief_pb2, common_pb2


def unit_to_proto(unit: Unit) -> common_pb2.Unit:
    """A unit."""
    return common_pb2.Unit(dataset=unit.dataset, epoch=unit.epoch, index=unit.index)


def unit_from_proto(unit: common_pb2.Unit) -> Unit:
    """A unit."""
    return Unit(unit.dataset, unit.epoch, unit.index)


def lease_to_proto(lease: Lease) -> chief_pb2.Lease:
    """A unit leased; its size follows from the plan, which both sides know."""
    unit = unit_to_proto(lease.unit)
    if not lease.step:
        return chief_pb2.Lease(unit=unit)
    return chief_pb2.Lease(unit=unit, step=lease.step, step_units=lease.step_units, refresh=lease.refresh)


def lease_from_proto(lease: chief_pb2.Lease, num_examples: int = 0) -> Lease:
    """A unit leased."""
    return Lease(unit_from_proto(lease.unit), num_examples, lease.step, tuple(lease.step_units), lease.refresh)
