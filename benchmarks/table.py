"""Rows for people: one aligned table of text."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.runner import Row


def format_table(rows: Sequence[Row]) -> str:
    """The rows as a table; each number is ``median (lowest to highest)``, a number that is not known is ``-``."""
    if not rows:
        return ""
    names, metrics = list(rows[0].identity), list(rows[0].medians)
    cells = [[*names, *metrics]]
    for row in rows:
        values = ["-" if row.identity[name] is None else str(row.identity[name]) for name in names]
        cells.append(values + [_format_metric(row, metric) for metric in metrics])
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def format_number(value: float) -> str:
    """Three significant digits, thousands grouped, no exponent in the ranges that benchmarks have."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}"


def _format_metric(row: Row, metric: str) -> str:
    median, spread = row.medians[metric], row.spreads[metric]
    if median is None or spread is None:
        return "-"
    return f"{format_number(median)} ({format_number(spread[0])} to {format_number(spread[1])})"
