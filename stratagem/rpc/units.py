"""Callers, units, updates and leases on the wire."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stratagem.cluster.task import Incarnation
from stratagem.cluster.units import Lease, Unit, UnitBitmap, Update
from stratagem.rpc.generated import chief_pb2, common_pb2


def incarnation_from_proto(sender: common_pb2.Sender) -> Incarnation:
    return Incarnation(sender.task, sender.incarnation)


def unit_to_proto(unit: Unit) -> common_pb2.Unit:
    return common_pb2.Unit(dataset=unit.dataset, epoch=unit.epoch, index=unit.index)


def unit_from_proto(unit: common_pb2.Unit) -> Unit:
    return Unit(unit.dataset, unit.epoch, unit.index)


def update_to_proto(update: Update) -> common_pb2.Update:
    return common_pb2.Update(units=[unit_to_proto(unit) for unit in update.units], ordinal=update.ordinal)


def update_from_proto(update: common_pb2.Update) -> Update:
    return Update(tuple([unit_from_proto(unit) for unit in update.units]), update.ordinal)


def unit_sets_to_proto(units: Mapping[tuple[int, int], UnitBitmap]) -> list[common_pb2.UnitSet]:
    """Sets of units by (dataset, epoch)."""
    return [common_pb2.UnitSet(dataset=d, epoch=e, bitmap=bits.to_bytes()) for (d, e), bits in sorted(units.items())]


def unit_sets_from_proto(sets: Iterable[common_pb2.UnitSet]) -> dict[tuple[int, int], UnitBitmap]:
    """Sets of units by (dataset, epoch)."""
    return {(each.dataset, each.epoch): UnitBitmap(each.bitmap) for each in sets}


def lease_to_proto(lease: Lease) -> chief_pb2.Lease:
    """A unit leased; its size follows from the plan, which both sides know."""
    unit = unit_to_proto(lease.unit)
    if not lease.step:
        return chief_pb2.Lease(unit=unit)
    return chief_pb2.Lease(unit=unit, step=lease.step, step_units=lease.step_units, refresh=lease.refresh)


def lease_from_proto(lease: chief_pb2.Lease, num_examples: int = 0) -> Lease:
    return Lease(unit_from_proto(lease.unit), num_examples, lease.step, tuple(lease.step_units), lease.refresh)
