"""Whether the workers hold the same data, as far as that can be seen without reading an example."""

from __future__ import annotations

from typing import Any

import torch

from stratagem.data.loaders import is_dataset, length_of
from stratagem.data.nested import fingerprint, is_rows, values_in

_MOST_PARTS = 64
"""Longer lists that hold no examples are not looked into."""


def contents_of(dataset: Any) -> int:
    """A number of the length of a map-style dataset and of the first, middle and last example in the arrays, lists and
    datasets that it keeps: other data have another one, but for a few that look alike. 0: there is no telling.

    ``__getitem__`` is not called: it may draw random numbers. Texts with a slash, which may be paths of one machine,
    do not count.
    """
    try:
        return fingerprint([value for value in values_in(_ends(dataset, 4)) if _counts(value)]) + 1
    except Exception:  # whatever it is: this only looks, and its reading says what is wrong
        return 0


def _ends(dataset: Any, depth: int) -> list[Any]:
    size = length_of(dataset)
    if not size or not depth:
        return []

    def of(held: Any) -> Any:
        if (is_rows(held) or type(held) in (list, tuple, range)) and len(held) == size:
            return [held[index] for index in (0, size // 2, size - 1)]
        if type(held) in (list, tuple, dict) and len(held) <= _MOST_PARTS:
            return [of(part) for part in (held.values() if isinstance(held, dict) else held)]
        return _ends(held, depth - 1) if is_dataset(held) else []

    if callable(getattr(dataset, "with_format", None)):  # datasets.Dataset of Hugging Face, without its transforms
        plain = dataset.with_format(None)
        return [size, *(plain[index] for index in (0, size // 2, size - 1))]
    return [size, of(dataset if is_rows(dataset) or type(dataset) in (list, tuple) else list(vars(dataset).values()))]


def _counts(value: Any) -> bool:
    return is_rows(value) or isinstance(value, torch.Tensor | int | float) or (type(value) is str and "/" not in value)
