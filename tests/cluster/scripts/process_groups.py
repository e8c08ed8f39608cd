"""Four ranks: what trains over ``torch.distributed`` ends as in one process. Says "ok NAME" of each check.

Alone it is the four ranks itself, forked when all is imported; under torchrun it is one of them. The variable DEVICE
says where tensors are; on GPUs, which ranks may share, the checks of what is on the host anyway are left out.
"""

from __future__ import annotations

import datetime
import functools
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import stratagem.distributed  # noqa: F401
from stratagem.errors import CollectiveError
from stratagem.rpc.binding import free_port

STEPS, BATCH = 5, 8
DEVICE = torch.device(os.environ.get("DEVICE", "cpu"))
if DEVICE.type == "cuda":
    DEVICE = torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count())


def model() -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)).to(DEVICE)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = (torch.randn(BATCH, width, generator=generator) for width in (12, 4))
    return inputs.to(DEVICE), targets.to(DEVICE)


def own(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's part of it."""
    inputs, targets = batch(step)
    return inputs.chunk(size)[rank], targets.chunk(size)[rank]


def train(trained: nn.Module, examples: Callable[[int], tuple[torch.Tensor, torch.Tensor]], steps: int = STEPS) -> None:
    """A few steps of Adam."""
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01, foreach=False)  # which mixes tensors and DTensors
    for step in range(steps):
        inputs, targets = examples(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(trained(inputs), targets).backward()
        optimizer.step()


def reference() -> nn.Sequential:
    """What one process makes of the global batches."""
    alone = model()
    train(alone, batch)
    return alone


def same(trained: nn.Module, alone: nn.Module | None = None) -> None:
    """Compares with one process. Sums in another order differ in the last places, which Adam makes larger."""
    for (name, value), expected in zip(trained.named_parameters(), (alone or reference()).parameters(), strict=True):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5, msg=name)


def ddp() -> None:
    """Buckets of all sizes, parameters that get no gradient, buffers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for options in ({}, {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}, {"static_graph": True}):
        trained = DistributedDataParallel(model(), **options)
        train(trained, lambda step: own(step, rank, size))
        same(trained.module)


def uneven_inputs() -> None:
    """Rank r has r batches more than rank 0: gradients are means over the ranks that have one."""
    rank, trained = dist.get_rank(), DistributedDataParallel(model())
    with trained.join(divide_by_initial_world_size=False):
        train(trained, batch, 2 + rank)
    alone = model()
    train(alone, batch, 1 + dist.get_world_size())
    same(trained.module, alone)


def fsdp2() -> None:
    """Every layer sharded over all ranks; in torch's memory and in the group's."""
    for in_group in (False, True) if DEVICE.type == "cpu" else (False,):
        trained = model()
        for layer in trained:
            fully_shard(layer).set_allocate_memory_from_process_group_for_comm(in_group)
        fully_shard(trained)
        with patch("stratagem.distributed.comm_memory.MIN_BYTES", 1):
            train(trained, lambda step: own(step, dist.get_rank(), dist.get_world_size()))
        same(trained)


def hsdp() -> None:
    """Sharded over pairs, replicated between them."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    trained = model()
    for layer in trained:
        fully_shard(layer, mesh=mesh)
    fully_shard(trained, mesh=mesh)
    train(trained, lambda step: own(step, dist.get_rank(), dist.get_world_size()))
    same(trained)


def tensor_parallel() -> None:
    """The first layers cut over all ranks; every rank sees the whole batch."""
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    trained = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(trained, batch)
    same(trained)


def pipeline() -> None:
    """A layer a rank; activations forth and gradients back by send and recv."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layers = list(reference_layers())
    inputs, _ = batch(0)
    values = inputs
    if rank:
        values = torch.empty(BATCH, 32, device=DEVICE)
        dist.recv(values, rank - 1)
    values.requires_grad_()
    out = layers[rank](values)
    if rank < size - 1:
        dist.send(out.detach(), rank + 1)
        gradient = torch.empty_like(out)
        dist.recv(gradient, rank + 1)
        out.backward(gradient)
    else:
        out.square().sum().backward()
    if rank:
        assert values.grad is not None
        dist.send(values.grad, rank - 1)
    alone = nn.Sequential(*reference_layers())
    alone(inputs).square().sum().backward()
    expected = [value.grad for value in alone[rank].parameters()]
    for value, grad in zip(layers[rank].parameters(), expected, strict=True):
        torch.testing.assert_close(value.grad, grad)


def reference_layers() -> list[nn.Module]:
    """Four stages of one width."""
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(12 if stage == 0 else 32, 32), nn.Tanh()).to(DEVICE) for stage in range(4)]


def checkpoint() -> None:
    """Saved sharded, loaded into another model, also in the background."""
    folders: list[str | None] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    trained = model()
    fully_shard(trained)
    train(trained, lambda step: own(step, dist.get_rank(), dist.get_world_size()))
    save(trained.state_dict(), checkpoint_id=str(Path(str(folders[0]), "sync")))
    saving = async_save(trained.state_dict(), checkpoint_id=str(Path(str(folders[0]), "async")))
    assert isinstance(saving, Future)
    saving.result()
    for name in ("sync", "async"):
        loaded = model()
        fully_shard(loaded)
        state = loaded.state_dict()
        load(state, checkpoint_id=str(Path(str(folders[0]), name)))
        loaded.load_state_dict(state)
        same(loaded)


def objects_and_batches() -> None:
    """What is not one tensor: Python objects, lists of messages, coalesced collectives, subgroups."""
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": each} for each in range(size)]
    got = torch.zeros(3, device=DEVICE)
    operations = [
        dist.P2POp(dist.isend, torch.full((3,), float(rank), device=DEVICE), (rank + 1) % size),
        dist.P2POp(dist.irecv, got, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert got.tolist() == [(rank - 1) % size] * 3
    tensors = [torch.full((length,), float(rank), device=DEVICE) for length in (1, 4)]
    with _coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert all(float(tensor[0]) == sum(range(size)) for tensor in tensors)
    odd = dist.new_group([1, 3])
    if rank in (1, 3):
        total = torch.tensor(float(rank), device=DEVICE)
        dist.all_reduce(total, group=odd)
        assert float(total) == 4.0
        dist.destroy_process_group(odd)
    dist.barrier()


def compiled() -> None:
    """``torch.compile`` around DDP and inside it, and of collectives."""
    compiles: Any = functools.partial(torch.compile, backend="aot_eager")
    outside, inside = model(), model()
    for trained in (compiles(DistributedDataParallel(outside)), DistributedDataParallel(compiles(inside))):
        train(trained, lambda step: own(step, dist.get_rank(), dist.get_world_size()))
    same(outside)
    same(inside)

    def sums(values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values)
        work = dist.all_reduce(values, async_op=True)
        assert work is not None
        work.wait()
        return values + 1

    assert compiles(sums)(torch.ones(2, device=DEVICE)).tolist() == [dist.get_world_size() ** 2 + 1] * 2


class Forked(torch.utils.data.Dataset[str]):
    """What a DataLoader's worker is told when it uses the group of the process it was forked from."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> str:
        one, other = torch.ones(1), (dist.get_rank() + 1) % dist.get_world_size()
        try:
            (dist.barrier, lambda: dist.send(one, other), lambda: dist.recv(one, other))[index % 3]()
        except CollectiveError as error:
            return str(error)
        return "no error"


def loaders() -> None:
    """Workers of a DataLoader come and go, and the group goes on."""
    for _ in range(2):
        for (told,) in torch.utils.data.DataLoader(Forked(), num_workers=2):
            assert ": the process group belongs to the process that this one was forked from" in told
            dist.barrier()


def groups_by_other_names() -> None:
    """Backends by device, and ``split_group``, which torch lends to hosts with an accelerator alone: pretended here."""
    size = dist.get_world_size()
    for backend in ("cpu:stratagem", "cpu:stratagem,cuda:nccl"):
        group = dist.new_group(backend=backend)
        total = torch.ones(2)
        dist.all_reduce(total, group=group)
        dist.barrier(group, timeout=datetime.timedelta(seconds=60))
        DistributedDataParallel(model(), process_group=group)(torch.zeros(1, 12)).sum().backward()
        assert total.tolist() == [size] * 2 and dist.get_backend(group) == backend
        dist.destroy_process_group(group)
    world, cpu = dist.group.WORLD, torch.device("cpu", 0)
    assert world is not None
    world.bound_device_id = cpu
    with (
        patch("torch.accelerator.is_available", lambda: True),
        patch("torch.accelerator.current_accelerator", lambda: cpu),
    ):
        half = dist.split_group(split_ranks=[[0, 1], [2, 3]], timeout=datetime.timedelta(seconds=60))
    world.bound_device_id = None
    assert half is not None
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total, group=half)
    assert int(total) == (1 if dist.get_rank() < 2 else 5)


CHECKS: tuple[Callable[[], None], ...] = (
    ddp,
    uneven_inputs,
    fsdp2,
    hsdp,
    tensor_parallel,
    pipeline,
    checkpoint,
    compiled,
    objects_and_batches,
    loaders,
    groups_by_other_names,
)

ON_HOSTS = (loaders, groups_by_other_names)
SIZE = 4


def forked() -> int:
    """The number of this fork; the process they come from ends with the number of those that failed."""
    os.environ.update(WORLD_SIZE=str(SIZE), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    forks = []
    for rank in range(SIZE):
        if not (fork := os.fork()):
            return rank
        forks.append(fork)
    sys.exit(sum(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) != 0 for fork in forks))


if __name__ == "__main__":
    if "RANK" not in os.environ:
        os.environ["RANK"] = str(forked())
    dist.init_process_group("stratagem", device_id=None if DEVICE.type == "cpu" else DEVICE)
    wanted = sys.argv[1:] or [check.__name__ for check in CHECKS if DEVICE.type == "cpu" or check not in ON_HOSTS]
    for check in CHECKS:
        if check.__name__ in wanted:
            check()
            dist.barrier()
            if dist.get_rank() == 0:
                print("ok", check.__name__, flush=True)
    dist.destroy_process_group()
