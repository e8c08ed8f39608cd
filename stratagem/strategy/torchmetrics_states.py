"""States of a metric of torchmetrics, taken out of it and merged by its own reductions.

Wherever they are: wrappers and compositions have metrics inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torchmetrics

from stratagem.data.nested import map_values
from stratagem.errors import ConfigurationError
from stratagem.strategy.metric_states import States


def empty_copy(metric: torchmetrics.Metric, device: torch.device) -> torchmetrics.Metric:
    """A copy on a device that has counted nothing."""
    twin = metric.clone().to(device)
    for part in _parts(twin).values():
        part.sync_on_compute = False  # torch.distributed, if somebody uses it, has nothing to do with it
    twin.reset()
    return twin


def states_of(metric: torchmetrics.Metric) -> States:
    found: States = {}
    for path, part in _parts(metric).items():
        for name in part._defaults:
            value = getattr(part, name)
            found[f"{path}/{name}"] = value if isinstance(value, torch.Tensor) else [*value]
        found[f"{path}/updates"] = torch.tensor(part._update_count)
    return found


def merged(metric: torchmetrics.Metric, parts: Sequence[States]) -> torchmetrics.Metric:
    """A copy of ``metric`` on the CPU that has counted what several have, whose states may be on any devices."""
    twin = metric.clone().cpu()
    if not parts:
        twin.reset()
        return twin
    for path, part in _parts(twin).items():
        for name, reduction in part._reductions.items():
            values = [map_values(states[f"{path}/{name}"], torch.Tensor.cpu) for states in parts]
            setattr(part, name, _reduced(values, reduction))
        part._update_count = sum(int(cast(torch.Tensor, states[f"{path}/updates"])) for states in parts)
        part._computed = None
    return twin


def num_updates(metric: torchmetrics.Metric) -> int:
    """How often a metric, or one inside it, was updated since it was reset."""
    return max(part._update_count for part in _parts(metric).values())


def check_counts_all(metric: torchmetrics.Metric) -> None:
    """Refuses a metric of the last few updates where all are counted, in whatever order they come.

    Raises:
        ConfigurationError: it is one.
    """
    for part in _parts(metric).values():
        if isinstance(part, torchmetrics.wrappers.Running):
            raise ConfigurationError(
                f"{type(part).__name__} is of the last {part.window} updates, and `fit`, `evaluate` and parameter "
                f"servers count all batches, in no order: give {type(part.base_metric).__name__} itself, or update "
                "yours in a loop without `prepare`, for the batches of this worker alone"
            )


def _parts(metric: torchmetrics.Metric) -> dict[str, torchmetrics.Metric]:
    """The metric and those inside it, by their paths."""
    return {path: part for path, part in metric.named_modules() if isinstance(part, torchmetrics.Metric)}


def _reduced(values: Sequence[torch.Tensor | list[torch.Tensor]], reduction: Any) -> Any:
    """One state of several replicas, as torchmetrics would have gathered it."""
    if any(isinstance(value, list) for value in values):
        rows = [row for value in values for row in (value if isinstance(value, list) else [value])]
        if reduction is None or not rows:
            return rows
        joined = reduction(rows)
        return joined if isinstance(joined, list) else [joined]
    # R2Score and others begin with one zero and find their number of outputs in the first batch, which some had not.
    stacked = torch.stack(torch.broadcast_tensors(*cast(Sequence[torch.Tensor], values)))
    return stacked if reduction is None else reduction(stacked)
