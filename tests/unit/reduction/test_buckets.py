from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from stratagem.worker.reduction.gradient_layout import ALIGNMENT, aligned, cut_buckets

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """As much of one as the cut looks at: there may be no GPU."""

    num_elements: int
    dtype: torch.dtype
    device: torch.device

    def numel(self) -> int:
        return self.num_elements


sizes: Any = st.builds(
    Parameter,
    num_elements=st.integers(0, 3000),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    device=st.sampled_from([CPU, torch.device("cuda:0")]),
)


def size(numel: int, dtype: torch.dtype = torch.float32) -> Any:
    return Parameter(numel, dtype, CPU)


def num_bytes(parameter: Any) -> int:
    return aligned(parameter.numel() * parameter.dtype.itemsize)


@given(st.lists(sizes, max_size=40), st.integers(1, 4096), st.integers(1, 16384))
def test_every_parameter_is_in_one_bucket_of_its_dtype_and_device(
    parameters: list[Any], first_bytes: int, bucket_bytes: int
) -> None:
    buckets = cut_buckets(parameters, first_bytes, bucket_bytes)
    assert sorted(index for bucket in buckets for index in bucket.parameters) == list(range(len(parameters)))
    for bucket in buckets:
        members = [parameters[index] for index in bucket.parameters]
        assert {(member.dtype, member.device) for member in members} == {(bucket.dtype, bucket.device)}
        assert list(bucket.parameters) == sorted(bucket.parameters, reverse=True)


@given(st.lists(sizes, max_size=40), st.integers(1, 4096), st.integers(1, 16384))
def test_gradients_are_aligned_and_disjoint_and_buckets_keep_their_limit(
    parameters: list[Any], first_bytes: int, bucket_bytes: int
) -> None:
    seen: set[tuple[torch.dtype, torch.device]] = set()
    for bucket in cut_buckets(parameters, first_bytes, bucket_bytes):
        end = 0
        for index, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            assert offset == end and offset % ALIGNMENT == 0
            end += num_bytes(parameters[index])
        assert bucket.num_bytes == end
        key = (bucket.dtype, bucket.device)
        limit = bucket_bytes if key in seen else min(first_bytes, bucket_bytes)
        seen.add(key)
        assert bucket.num_bytes <= limit or len(bucket.parameters) == 1


def test_the_first_bucket_is_small_and_holds_the_last_parameters() -> None:
    buckets = cut_buckets([size(64)] * 10, first_bytes=512, bucket_bytes=1024)
    assert [bucket.parameters for bucket in buckets] == [[9, 8], [7, 6, 5, 4], [3, 2, 1, 0]]


def test_a_huge_parameter_is_alone() -> None:
    buckets = cut_buckets([size(16), size(10_000), size(16)], first_bytes=1024, bucket_bytes=2048)
    assert [bucket.parameters for bucket in buckets] == [[2], [1], [0]]


def test_alternating_dtypes_do_not_cut_buckets_apart() -> None:
    parameters = [size(16, (torch.float32, torch.bfloat16)[index % 2]) for index in range(6)]
    assert [bucket.parameters for bucket in cut_buckets(parameters)] == [[5, 3, 1], [4, 2, 0]]


def test_buckets_come_in_the_order_in_which_backward_completes_them() -> None:
    # The bfloat16 bucket begins first, but its last member is the first layer.
    parameters = [size(16, torch.bfloat16), size(16), size(16), size(16, torch.bfloat16)]
    assert [bucket.parameters for bucket in cut_buckets(parameters)] == [[2, 1], [3, 0]]


def test_no_parameters_no_buckets() -> None:
    assert cut_buckets([]) == []
