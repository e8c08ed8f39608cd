"""torch's own tests of its backends (``torch.testing._internal.distributed.distributed_test``) on ours, all on the same
processes: a group for each test. Prints one line a test: outcome, name, and why.

python tests/cluster/scripts/c10d.py [--ranks 3] [--backend stratagem] [--gpu-tests-on cuda:0] [NAME …]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import faulthandler
import importlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import unittest
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, PrefixStore, TCPStore, set_debug_level
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal import common_utils
from torch.testing._internal.common_distributed import TEST_SKIPS

TEST_S = 60
"""Seconds a test may take."""
CRASHING = {"test_ddp_has_finalized"}
"""Ends its own process."""
NO_ACCELERATOR = (
    "_cuda_setDevice",
    "not compiled with CUDA",
    "accelerator device when none",
    "list index out of range",
)
"""What torch without one says; the last is a rank that looks up its device."""


class TooLongError(Exception):
    """A test did not end."""


def _too_long(*_: object) -> None:
    raise TooLongError(f"not done after {TEST_S} s")


def put_all_on(device: str) -> None:
    """Loads torch's tests with this device in the place of each rank's GPU."""
    is_gpu, rank = device != "cpu", r"(?:self\.)?rank"
    others = {
        r"torch\.cuda\.device_count\(\)": "8",
        r"torch\.cuda\.is_available\(\)|TEST_CUDA(?= or | and |:)": "True",
        rf"\.cuda\([^()]*\)|\.to\({rank}\)": f".to({device!r})",
        rf"torch\.device\((?:{rank}|f?\"cuda:[^()]*(?:\(.\))?)\)": f"torch.device({device!r})",
        rf"\b(device|device_id)( ?= ?){rank}\b": rf"\1\2{device!r}",
        rf"torch\.cuda\.set_device\({rank}\)": "None",
        rf"device_ids=(?:\[[^]]*\]|gpu_subset)|device_ids={rank}": "device_ids=" + ("[0]" if is_gpu else "None"),
        rf"output_device={rank}\b": "output_device=" + ("0" if is_gpu else "None"),
        rf"gpus = \[{rank}\]": "gpus = [0]",
        rf"device\.index, {rank}\b": "device.index, " + ("0" if is_gpu else "None"),
    }
    for name in ("common_distributed", "distributed.distributed_test"):
        spec = importlib.util.find_spec(f"torch.testing._internal.{name}")
        assert spec is not None
        assert spec.origin is not None
        with open(spec.origin) as file:
            text = file.read()
        for theirs, ours in others.items():
            text = re.sub(theirs, ours, text)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        exec(compile(text, spec.origin, "exec", dont_inherit=True), module.__dict__)
        vars(module)["init_multigpu_helper"] = lambda size, _: {rank: [0 if is_gpu else device] for rank in range(size)}


def load(backend: str) -> Any:
    """The test class. Which tests are left out is decided when it is defined, by what BACKEND says."""
    if backend == "stratagem":
        importlib.import_module("stratagem.distributed")
    module = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    os.environ["BACKEND"] = "mpi"  # read when a test of groups runs, which with others wants eight ranks

    names: dict[str, Any] = {
        "test_get_backend": mock.patch.object(module, "BACKEND", backend),  # what it compares with
        # torch's function asks for the name, then calls the group's method, whatever group that is
        "test_monitored_barrier": mock.patch.object(c10d, "get_backend", lambda group=None: "gloo"),
    }

    class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        under_name = names

    return Suite


def run_one(suite: Any, name: str, rank: int) -> tuple[str, str]:
    """Outcome of a test on this rank, and why."""
    case = suite(name)
    case.rank = rank
    test = getattr(suite, name)
    if getattr(test, "__unittest_skip__", False):
        return "skipped", str(test.__unittest_skip_why__)
    common_utils.set_rng_seed(1)
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(TEST_S)
    under_name = [patch for start, patch in suite.under_name.items() if name.startswith(start)]
    try:
        set_debug_level(DebugLevel.OFF)  # some tests leave another
        with mock.patch.dict(os.environ), under_name[0] if under_name else contextlib.nullcontext():
            test(case)  # not the instance's, around which MultiProcessTestCase has put what starts processes
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as ended:
        return "skipped", next(
            (skip.message for skip in TEST_SKIPS.values() if skip.exit_code == ended.code), str(ended)
        )
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        if any(words in text for words in NO_ACCELERATOR) and not torch.accelerator.is_available():
            return "skipped", "needs an accelerator"
        return "failed", text
    finally:
        signal.alarm(0)
    return "passed", ""


def rank_main(rank: int, ranks: int, backend: str, port: int, names: list[str]) -> None:
    """Runs the tests as one rank; rank 0 prints."""
    faulthandler.enable()
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, ranks, rank == 0, timeout=datetime.timedelta(seconds=300))
    suite = load(backend)
    for name in names or sorted(each for each in dir(suite) if each.startswith("test_")):
        if name in CRASHING:
            continue
        here = PrefixStore(f"{name}/", store)
        timeout = datetime.timedelta(seconds=TEST_S / 2)
        group = PrefixStore("group/", here)
        dist.init_process_group(backend, store=group, rank=rank, world_size=ranks, timeout=timeout)
        suite._barrier = lambda self, *_, **__: dist.barrier()
        here.set(f"outcome/{rank}", json.dumps(run_one(suite, name, rank)))
        outcomes = [json.loads(here.get(f"outcome/{each}")) for each in range(ranks)]
        worst = next((each for each in outcomes if each[0] == "failed"), None)
        worst = worst or next((each for each in outcomes if each[0] == "skipped"), outcomes[0])
        if rank == 0:
            print(f"{worst[0]} {name} {worst[1]}".rstrip(), flush=True)
        try:
            dist.destroy_process_group()
        except Exception as error:  # what is broken is let go
            print(f"destroying after {name}: {error}", file=sys.stderr)
    store.set(f"done/{rank}", "")
    if rank == 0:  # whose process is the store
        store.wait([f"done/{each}" for each in range(ranks)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--backend", default="stratagem")
    parser.add_argument("--like", default="gloo", help="run what is for this backend: gloo, or mpi for CPU all_to_all")
    parser.add_argument(
        "--gpu-tests-on", metavar="DEVICE", help="run those for GPUs too, all ranks on cuda:0, or on cpu"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        if arguments.gpu_tests_on:
            put_all_on(arguments.gpu_tests_on)
        rank_main(int(os.environ["RANK"]), arguments.ranks, arguments.backend, int(os.environ["PORT"]), arguments.names)
        return 0
    with socket.create_server(("127.0.0.1", 0)) as free, tempfile.TemporaryDirectory() as folder:
        port = free.getsockname()[1]
        os.mkdir(os.path.join(folder, "barrier"))
        os.mkdir(os.path.join(folder, "test_dir"))
        common = {**os.environ, "WORLD_SIZE": str(arguments.ranks), "TEMP_DIR": folder, "PORT": str(port)}
        common |= {
            "OMP_NUM_THREADS": "1",
            "BACKEND": arguments.like,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        free.close()
        processes = [
            subprocess.Popen([sys.executable, *sys.argv], env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(arguments.ranks)
        ]
        return max(process.wait() for process in processes)


if __name__ == "__main__":
    sys.exit(main())
