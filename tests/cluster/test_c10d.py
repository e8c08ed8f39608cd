"""torch's own tests of its backends, run on ours. What they show, what does not apply: docs/design/distributed.md."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "c10d.py"
JOB_S = 1500.0

pytestmark = pytest.mark.skipif(importlib.util.find_spec("expecttest") is None, reason="torch's tests need expecttest")


def outcomes(*arguments: str) -> dict[str, str]:
    """Names of tests to passed, failed or skipped."""
    command = [sys.executable, str(SCRIPT), *arguments]
    job = subprocess.run(command, capture_output=True, text=True, timeout=JOB_S, check=False)
    assert job.returncode == 0, job.stderr[-5000:]
    lines = [line.split() for line in job.stdout.splitlines()]
    return {line[1]: line[0] for line in lines if line and line[0] in ("passed", "failed", "skipped")}


@pytest.mark.thorough
@pytest.mark.timeout(2 * JOB_S)
def test_all_by_four_ranks() -> None:
    found = outcomes("--ranks", "4")
    assert [name for name, outcome in found.items() if outcome == "failed"] == []
    assert sum(outcome == "passed" for outcome in found.values()) >= 110


GPU_ALONE = {
    "test_average_parameters",  # a second group, of NCCL
    "test_broadcast_cuda",
    "test_ddp_hook_parity_allreduce_process_group",  # ranks of a group are numbers of GPUs
    "test_ddp_inference",  # SyncBatchNorm
    "test_ddp_logging_data_gpu",
    "test_ddp_profiling_torch_profiler",  # wants collectives to end in another thread, which they do or not
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd",  # even numbers of ranks
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view",
    "test_sync_bn_logged",
}
FOR_GPU_ALONE = (
    "test_DistributedDataParallel_SyncBatchNorm",
    "test_ddp_native_mixed_precision_",  # events of a stream
    "test_monitored_barrier_allreduce_hang",  # a second group, of NCCL
)


@pytest.mark.thorough
@pytest.mark.timeout(2 * JOB_S)
def test_all_by_three_ranks_and_those_for_gpus_on_the_cpu() -> None:
    found = outcomes("--ranks", "3", "--gpu-tests-on", "cpu")
    failed = {name for name, outcome in found.items() if outcome == "failed" and not name.startswith(FOR_GPU_ALONE)}
    assert failed <= GPU_ALONE
    assert sum(outcome == "passed" for outcome in found.values()) >= 170


@pytest.mark.thorough
def test_all_to_all_which_torch_tries_with_mpi_alone() -> None:
    names = [
        "test_all_to_all",
        "test_all_to_all_complex",
        "test_all_to_all_full_group",
        "test_all_to_all_group",
        "test_all_to_all_single_equal_split",
        "test_all_to_all_single_equal_split_complex",
        "test_all_to_all_single_equal_split_full_group",
        "test_all_to_all_single_equal_split_group",
        "test_all_to_all_single_unequal_split",
        "test_all_to_all_single_unequal_split_complex",
        "test_all_to_all_single_unequal_split_full_group",
        "test_all_to_all_single_unequal_split_group",
    ]
    assert outcomes("--like", "mpi", *names) == dict.fromkeys(names, "passed")
