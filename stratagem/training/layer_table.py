"""The layers of a module as lines of a table."""

from __future__ import annotations

from torch import nn


def layer_table(module: nn.Module) -> list[str]:
    """A line for each layer with parameters of its own, or no layers inside; a shared parameter counts once."""
    rows = [("Layer", "Type", "Parameters")]
    counted: set[int] = set()
    for name, layer in module.named_modules():
        parameters = list(layer.parameters(recurse=False))
        if not parameters and next(layer.children(), None) is not None:
            continue
        own = [parameter for parameter in parameters if id(parameter) not in counted]
        counted.update(map(id, own))
        rows.append((name or "(the module)", type(layer).__name__, f"{sum(p.numel() for p in own):,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}" for row in rows]
    rule = "-" * len(lines[0])
    total = sum(parameter.numel() for parameter in module.parameters())
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    sums = f"Parameters: {total:,} ({num_bytes / 2**20:.2f} MiB), {trained:,} of them trained"
    return [lines[0], rule, *lines[1:], rule, sums]
