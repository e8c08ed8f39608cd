"""Layouts: every element of every variable lies in exactly one place, in one chunk."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.strategy.partitioners import FixedShardsPartitioner, place
from stratagem.worker.push.layout import Layout, VariableSpec


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 6), max_size=3), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(4, 64),
)
def test_every_element_is_in_exactly_one_chunk(
    shapes: list[list[int]], num_ps: int, shards: int, chunk_bytes: int
) -> None:
    specs = [VariableSpec(f"v{i}", tuple(shape), torch.float32, 0) for i, shape in enumerate(shapes)]
    rows = place([(spec.shape, spec.dtype) for spec in specs], FixedShardsPartitioner(shards), [0] * num_ps)
    layout = Layout(specs, rows, chunk_bytes)
    seen: dict[tuple[int, int], int] = {}
    for chunk in layout.chunks:
        assert chunk.num_elements == sum(span.num_elements for span in chunk.spans) <= max(1, chunk_bytes // 4)
        for span in chunk.spans:
            for element in range(span.start, span.start + span.num_elements):
                key = (span.variable, element)
                seen[key] = seen.get(key, 0) + 1
    expected = {(i, element): 1 for i, spec in enumerate(specs) for element in range(math.prod(spec.shape))}
    assert seen == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_spans_between_agrees_with_the_flat_tensor(lengths: list[int], data: st.DataObject) -> None:
    specs = [VariableSpec(f"v{i}", (length,), torch.float32, 0) for i, length in enumerate(lengths)]
    layout = Layout(specs, [[(0, 0, length)] for length in lengths], 16)
    flat = [(i, e) for i in reversed(range(len(lengths))) for e in range(lengths[i])]
    start = data.draw(st.integers(0, len(flat)))
    count = data.draw(st.integers(0, len(flat) - start))
    spans = layout.spans_between(0, 0, start, count)
    found = [(span.variable, span.start + step) for span in spans for step in range(span.num_elements)]
    assert found == flat[start : start + count]


def test_reverse_registration_order() -> None:
    specs = [VariableSpec(name, (2,), torch.float32, 0) for name in "abc"]
    layout = Layout(specs, [[(0, 0, 2)]] * 3, 1024)
    assert [shard.variable for shard in layout.shards[0, 0]] == [2, 1, 0]
    assert [shard.offset for shard in layout.shards[0, 0]] == [0, 2, 4]
