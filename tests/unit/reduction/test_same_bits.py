"""Ranks that have parted, or are about to, are told so in their next backward."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem.errors import ConfigurationError
from stratagem.strategy.synchronous import SynchronousStrategy
from stratagem.worker.reduction.same_bits import MAX_PIECES, NUM_WHOLE, WINDOW, SameBits, sum_of_bits
from stratagem.worker.ring.agreement import agree
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.step_meter import StepMeter
from tests.unit.reduction.reducing import batch, build, mean_loss, reducing, share_of, weight_of
from tests.unit.ring.thread_group import run_ranks

SHARES = [2, 1, 1]


class Wide(torch.nn.Module):
    """Its first parameter takes several backwards to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(5, WINDOW // 2))
        self.last = torch.nn.Linear(WINDOW // 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.last(x @ self.table)
        assert isinstance(out, torch.Tensor)
        return out


def train(communicator: Communicator, num_steps: int, spoil: Any, factory: Any = Wide) -> tuple[int, str]:
    """Steps that were made, and what the next one was refused with."""
    rank = communicator.rank
    model = build(factory)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    names = [name for name, _ in model.named_parameters()]
    looks = SameBits(list(model.parameters()), names, f"worker:{rank}", lambda: [optimizer])
    with reducing(model, communicator, weight_of(SHARES, rank), same_bits=looks):
        for step in range(num_steps):
            spoil(rank, step, model, optimizer)
            optimizer.zero_grad()
            try:
                mean_loss(model, *share_of(batch(step), SHARES, rank)).backward()
            except ConfigurationError as error:
                return step, str(error)
            optimizer.step()
    return num_steps, ""


def test_other_settings_are_refused_before_they_are_used() -> None:
    def spoil(rank: int, step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 2e-3 if (rank, step) == (1, 2) else 1e-3 * 0.9**step

    for step, text in run_ranks(3, lambda communicator: train(communicator, 4, spoil)):
        assert step == 2
        assert (
            "the settings of an optimizer differ, and the replicas would diverge: worker:0 has Adam(lr=0.00081" in text
        )
        assert "worker:1 has Adam(lr=0.002, betas=(0.9, 0.999)" in text


def test_a_group_that_one_rank_alone_has_is_named() -> None:
    def spoil(rank: int, step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
        if (rank, step) == (1, 2):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})

    for step, text in run_ranks(3, lambda communicator: train(communicator, 4, spoil)):
        assert step == 2 and "worker:0 has none, worker:1 has Adam(lr=0.001" in text


def test_workers_that_ask_otherwise_of_prepare_are_refused() -> None:
    def work(communicator: Communicator) -> None:
        strategy = SynchronousStrategy([torch.device("cpu")], StepMeter(), workers=communicator)
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        strategy.prepare(model, optimizer, gradients="sum" if communicator.rank else "mean")

    with pytest.raises(ConfigurationError, match=r"rank 0 has prepare\(gradients='mean', .*'sum'"):
        run_ranks(2, work)


def test_a_function_among_the_settings_is_the_same_wherever_it_lies() -> None:
    def spoil(rank: int, step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.defaults["decay"] = None
        optimizer.param_groups[0] |= {"decay": lambda: rank, "lr": 1.0 if (rank, step) == (1, 2) else 0.1}

    def work(communicator: Communicator) -> tuple[int, str]:
        model = build()
        optimizer = torch.optim.Adam([{"params": list(model.parameters()), "decay": lambda: None}])
        agree(communicator, [model], [optimizer])
        return train(communicator, 4, spoil)

    for step, text in run_ranks(3, work):
        assert step == 2 and "worker:1 has Adam(lr=1.0" in text


def test_a_state_that_one_rank_alone_loads_changes_no_setting() -> None:
    """As a newcomer to a ring does."""
    table = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.SparseAdam([table])
    looks = SameBits([table], ["table"], "worker:0", lambda: [optimizer])
    before, _ = looks.look()
    optimizer.load_state_dict(optimizer.state_dict())
    assert "differentiable" in optimizer.defaults, "torch adds it"
    assert looks.look()[0] == before


def flip(model: Any, position: int) -> None:
    """One bit of one weight."""
    with torch.no_grad():
        model.table.view(-1)[position : position + 1].view(torch.int32).bitwise_xor_(1)


@pytest.mark.parametrize("position", [0, 2 * WINDOW, 2 * WINDOW + WINDOW // 2 - 1])
def test_a_bit_that_differs_is_found_within_a_round(position: int) -> None:
    def spoil(rank: int, step: int, model: Any, optimizer: Any) -> None:
        if (rank, step) == (2, 3):
            flip(model, position)

    found = run_ranks(3, lambda communicator: train(communicator, 20, spoil))
    for step, text in found:
        assert 3 <= step < 3 + 6  # 65,539 elements in windows of 16,384, and one that it was in when it happened
        assert "the replicas have diverged: table of worker:2 has different bits from that of worker:0" in text
        assert "noise from a torch.Generator that each step seeds alike" in text and "ATEN_CPU_CAPABILITY=avx2" in text


def test_a_rank_that_leaves_out_a_step_is_found_in_the_next_backward() -> None:
    def spoil(rank: int, step: int, model: Any, optimizer: Any) -> None:
        if (rank, step) == (1, 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1e-3)

    found = run_ranks(3, lambda communicator: train(communicator, 4, spoil))
    assert [step for step, _ in found] == [1] * 3 and all("of worker:1" in text for _, text in found)


def test_equal_ranks_go_on() -> None:
    assert run_ranks(3, lambda communicator: train(communicator, 4, lambda *_: None)) == [(4, "")] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.complex128])
def test_every_dtype_and_layout_is_looked_at(dtype: torch.dtype) -> None:
    values = torch.randn(2, 3, 4, 5).to(dtype)
    kinds = [
        values,
        values.contiguous(memory_format=torch.channels_last),
        values[:, :, ::2],
        torch.zeros(0),
        values[0, 0, 0, 0],
    ]
    for kind in kinds:
        parameter = torch.nn.Parameter(kind.clone(memory_format=torch.preserve_format))
        first, again = (SameBits([parameter], ["p"], "").look()[1] for _ in range(2))
        assert first == again > 0
        if kind.numel():
            with torch.no_grad():
                parameter.view(-1)[-1:].add_(1) if parameter.is_contiguous() else parameter[..., -1].add_(1)
            assert SameBits([parameter], ["p"], "").look()[1] != first


def test_one_look_is_at_a_few_tensors_only() -> None:
    parameters = [torch.nn.Parameter(torch.randn(3)) for _ in range(2 * MAX_PIECES)]
    looks = SameBits(parameters, [""] * len(parameters), "")
    sums = [looks.look()[1] for _ in range(4)]
    assert sums[:2] == sums[2:] and sums[0] != sums[1]


def test_the_bits_of_a_large_tensor_take_no_copy_of_it() -> None:
    def high_water() -> int:
        found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
        assert found
        return int(found[1]) * 1024

    tensor = torch.arange(16 * NUM_WHOLE + 1, dtype=torch.int32)
    expected = int(tensor.sum(dtype=torch.int64))
    Path("/proc/self/clear_refs").write_text("5")  # the high water begins at what is in use
    before = high_water()
    assert sum_of_bits(tensor.view(torch.float32)) == expected
    assert high_water() - before < tensor.nbytes / 4


def test_sums_of_bits_wrap_whatever_the_size() -> None:
    for size in (3, NUM_WHOLE + 1):
        tensor = torch.full((size,), 2**62, dtype=torch.int64)
        assert sum_of_bits(tensor.view(torch.float64)) == int(tensor.sum())
