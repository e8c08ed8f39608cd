"""What parameter servers wrote, read as plain states by anybody."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem.checkpoint.catalog import check, find_damage, next_number
from stratagem.checkpoint.manifest import MANIFEST, encode, read_content
from stratagem.checkpoint.reading import LEASED, OBJECT, describe, latest_checkpoint, load_checkpoint, summarize
from stratagem.checkpoint.server_state import SavedRows, ServerState, consolidate
from stratagem.cluster.units import Plan
from stratagem.data.distribute import distribute
from stratagem.data.distributed import DistributedDataset
from stratagem.data.placement import InputPlacement
from stratagem.errors import CheckpointError, ConfigurationError
from stratagem.ps.specs import GroupSpec, ShardSpec
from stratagem.ps.store import Store
from stratagem.strategy.default import DefaultStrategy
from stratagem.strategy.ps.servers import Servers, place_of
from stratagem.training.estimator.training import _updates_in
from stratagem.training.saving.checkpoint import Checkpoint
from stratagem.training.saving.manager import CheckpointManager
from stratagem.training.saving.object_states import put_back, take
from tests.unit.ps.driver import DirectWorker
from tests.unit.ps.test_checkpoint import checkpoint as take_checkpoint
from tests.unit.ps.test_checkpoint import unit

ROWS = 5


@pytest.fixture
def by_chief(tmp_path: Path) -> Path:
    """The chief took it by itself."""
    return written_by_servers(tmp_path)


def written_by_servers(folder: Path, num_others: int = 0) -> Path:
    """One weight cut in two, a bias whole, and three steps of Adam by two ps; so many of another model."""
    torch.manual_seed(0)
    stores = [Store(f"ps:{index}") for index in range(2)]
    for index, (store, (first, count)) in enumerate(zip(stores, [(0, 3), (3, 2)], strict=True)):
        shards = [ShardSpec("weight", (ROWS, 4), first, count, 0)]
        if index == 0:
            shards.append(ShardSpec("bias", (ROWS,), 0, ROWS, 12))
        spec = GroupSpec(1, "Adam", torch.float32, tuple(shards))
        worker = DirectWorker(store, "worker:0", spec)
        worker.hyper = {"lr": 0.1}
        worker.create(start()[index])
        for step in range(3):
            worker.commit(gradients(step)[index], unit(step))
    if num_others:
        other = DirectWorker(stores[0], "worker:0", GroupSpec(2, "SGD", torch.float32, (ShardSpec("x", (), 0, 1, 0),)))
        other.create(torch.zeros(1))
        for step in range(3, 3 + num_others):
            other.commit(torch.ones(1), unit(step))
    return taken(folder, stores, max(3, num_others))


def taken(folder: Path, stores: list[Store], step: int) -> Path:
    path = take_checkpoint(folder, stores, step)
    (path / MANIFEST).write_bytes(encode(read_content(path) | {"created": "2026-01-01T00:00:00+00:00"}))
    (path / "nonce").unlink()
    return path


def test_a_checkpoint_of_the_chief_says_whose_running_statistics_it_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An evaluator took those of an untrained BatchNorm for the model's, without a word."""
    store, name = Store("ps:0"), "block.norm.num_batches_tracked"
    spec = GroupSpec(1, "", torch.int64, (ShardSpec(name, (), 0, 1, 0),))
    DirectWorker(store, "worker:0", spec).create(torch.zeros(1, dtype=torch.int64))
    load_checkpoint(taken(tmp_path / "initial", [store], 0))
    assert not caplog.messages, "they are right before the first update"
    assert load_checkpoint(taken(tmp_path / "trained", [store], 3))[name] == 0
    assert [message for message in caplog.messages if "running statistics of block.norm as" in message]


def dealt(weight: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
    return [torch.cat([weight[:3].reshape(-1), bias]), weight[3:].reshape(-1)]


def start() -> list[torch.Tensor]:
    return dealt(torch.arange(20.0).view(ROWS, 4), torch.ones(ROWS))


def gradients(step: int) -> list[torch.Tensor]:
    return dealt(*gradient(step))


def gradient(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(step)
    return torch.randn(ROWS, 4), torch.randn(ROWS)


def trained_here(num_steps: int) -> tuple[nn.Linear, torch.optim.Adam]:
    model = nn.Linear(4, ROWS)
    with torch.no_grad():
        model.weight.copy_(torch.arange(20.0).view(ROWS, 4))
        model.bias.fill_(1)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    train(model, optimizer, range(num_steps))
    return model, optimizer


def train(model: nn.Linear, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        model.weight.grad, model.bias.grad = gradient(step)
        optimizer.step()


def test_a_process_goes_on_where_servers_stopped(by_chief: Path) -> None:
    expected, _ = trained_here(5)
    model = nn.Linear(4, ROWS)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    assert latest_checkpoint(by_chief.parent) == str(by_chief)
    assert Checkpoint(model=model, optimizer=optimizer).restore(by_chief).step == 3
    assert {key: float(state["step"]) for key, state in optimizer.state.items()} == {
        model.weight: 3.0,
        model.bias: 3.0,
    }
    train(model, optimizer, range(3, 5))
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-6, atol=1e-6)


def test_adagrad_goes_on_where_servers_had_no_update_of_it(tmp_path: Path) -> None:
    """The first ``step()`` of a single process ended in a KeyError: torch's constructor makes sums, the ps had none."""
    store = Store("ps:0")
    shards = (ShardSpec("weight", (ROWS, 4), 0, ROWS, 0), ShardSpec("bias", (ROWS,), 0, ROWS, 20))
    worker = DirectWorker(store, "worker:0", GroupSpec(1, "Adagrad", torch.float32, shards))
    expected, _ = trained_here(0)
    worker.create(torch.cat([expected.weight.detach().reshape(-1), expected.bias.detach()]))
    model = nn.Linear(4, ROWS)
    first, optimizer = (
        torch.optim.Adagrad(each.parameters(), 0.1, initial_accumulator_value=0.5) for each in (expected, model)
    )
    Checkpoint(model=model, optimizer=optimizer).restore(taken(tmp_path, [store], 0))
    train(expected, first, range(2))
    train(model, optimizer, range(2))
    torch.testing.assert_close(model.state_dict(), expected.state_dict())
    of_table = ServerState(tmp_path / "step-00000000", ["weight"])
    state = of_table.optimizer_state(["weight", "bias"], first.state_dict()["param_groups"])
    assert state.keys() == {1}, "a table's sums begin on the ps"


def test_a_plain_state_dict(by_chief: Path) -> None:
    expected, _ = trained_here(3)
    torch.testing.assert_close(load_checkpoint(by_chief), dict(expected.state_dict()), rtol=1e-6, atol=1e-6)


def test_what_the_chief_does_not_know_is_missed(by_chief: Path) -> None:
    with pytest.raises(CheckpointError, match=r"only the variables of the parameter servers, and no state of epoch"):
        Checkpoint(model=nn.Linear(4, ROWS), epoch=0).restore(by_chief)
    with pytest.raises(CheckpointError, match="no names of 2 models"):
        Checkpoint(one=nn.Linear(4, ROWS), two=nn.Linear(4, ROWS)).restore(by_chief)
    with pytest.raises(CheckpointError, match=r"no variable 0\.weight"):
        Checkpoint(model=nn.Sequential(nn.Linear(4, ROWS))).restore(by_chief)


def test_those_of_the_chief_are_left_out_where_more_is_needed(
    by_chief: Path, served: tuple[Checkpoint, FakeServers]
) -> None:
    """A worker that was started again found the chief's newest in its own folder, and ended the job."""
    assert CheckpointManager(Checkpoint(model=nn.Linear(4, ROWS)), by_chief.parent).restore_or_initialize() is not None
    more: Any = Checkpoint(net=nn.Linear(4, ROWS), epoch=0)
    manager = CheckpointManager(more, by_chief.parent)
    assert manager.restore_or_initialize() is None, "there is none but the chief's"
    own = served[0].save(by_chief.parent / "step", step=2)
    assert latest_checkpoint(by_chief.parent) == str(by_chief)
    assert manager.restore_or_initialize() == own and more.epoch == 2


@pytest.mark.parametrize(("held", "word"), [(8, ""), (2, "is repeated"), (9, "are not repeated")])
def test_what_comes_again_is_said(held: int, word: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of a restored checkpoint with 8 updates, by how many the parameter servers had."""
    servers: Any = object.__new__(Servers)
    servers._groups = SimpleNamespace(num_updates=held)
    with caplog.at_level(logging.INFO):
        servers._warn_of_undone(8)
    assert bool(caplog.messages) == bool(word) and word in caplog.text


def test_harm_to_a_servers_part_is_named(by_chief: Path) -> None:
    check(by_chief)
    data = bytearray((by_chief / "ps-1.safetensors").read_bytes())
    data[-3] ^= 4
    (by_chief / "ps-1.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"ps-1.safetensors was altered"):
        Checkpoint(model=nn.Linear(4, ROWS)).restore(by_chief)


class FakeServers(Servers):
    """Servers that write three steps of Adam, or fail."""

    def __init__(self, model: nn.Linear) -> None:
        self._model = model
        self.error: Exception | None = None
        self.saved: list[Path] = []
        self.num_others = 0
        said: dict[str, dict[str, float]] = {}
        self.chief: Any = SimpleNamespace(
            record_logs=lambda group, ordinal, logs: said.update({group: logs}),
            logs=lambda group, ordinal: said.get(group),
        )

    def save(self, directory: Path) -> Path:
        if self.error is not None:
            raise self.error
        self.saved.append(directory)
        return written_by_servers(directory, self.num_others)

    def check(self, modules: Iterable[nn.Module]) -> None:
        """They are as the servers have them."""

    @property
    def table_names(self) -> frozenset[str]:
        return frozenset()

    def load_once(self, load: Any, *_: Any) -> None:
        load()

    def names(self) -> dict[tuple[int, torch.Size], str]:
        return {(value.data_ptr(), value.shape): name for name, value in self._model.named_parameters()}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> tuple[Checkpoint, FakeServers]:
    model, optimizer = trained_here(0)
    servers = FakeServers(model)
    monkeypatch.setattr(DefaultStrategy, "servers", servers)
    made = Checkpoint(net=model, adam=optimizer, epoch=2, job_start=40)
    monkeypatch.undo()
    return made, servers


def test_what_servers_do_not_hold_is_committed_with_them(
    tmp_path: Path, served: tuple[Checkpoint, FakeServers]
) -> None:
    checkpoint, servers = served
    path = Path(checkpoint.save(tmp_path / "step", step=40))
    assert path.name == "step-00000040" and not find_damage(path)
    assert servers.saved[0].parent == tmp_path and servers.saved[0].name.startswith(".draft-")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step-00000040"]
    assert not (path / "host" / "net.safetensors").exists(), "the weights are in the servers' files alone"

    expected, _ = trained_here(5)
    model = nn.Linear(4, ROWS)
    optimizer = torch.optim.Adam(model.parameters(), 0.7)
    plain: Any = Checkpoint(net=model, adam=optimizer, epoch=0)
    assert plain.restore(tmp_path).step == 40 and plain.epoch == 2
    train(model, optimizer, range(3, 5))
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-6, atol=1e-6)

    flipped = bytearray((path / "host" / "host.json").read_bytes())
    flipped[9] ^= 1
    (path / "host" / "host.json").write_bytes(flipped)
    with pytest.raises(CheckpointError, match=r"host/host.json was altered"):
        plain.restore(path)


def test_an_estimator_goes_on_after_the_updates_of_its_own_model(
    tmp_path: Path, served: tuple[Checkpoint, FakeServers]
) -> None:
    """Those of a model trained before it in the job were counted, and it ended before its max_steps."""
    checkpoint, servers = served
    servers.num_others = 5
    assert _updates_in(describe(Path(checkpoint.save(tmp_path / "step", step=41)))) == 40 + 3


def test_the_script_s_number_counts_not_the_servers(tmp_path: Path, served: tuple[Checkpoint, FakeServers]) -> None:
    # Parameter servers that started again count their updates from 0.
    checkpoint, _ = served
    checkpoint.save(tmp_path / "step", step=40)
    later = checkpoint.save(tmp_path / "step")
    assert Path(later).name == "step-00000041" and latest_checkpoint(tmp_path) == later


def test_each_checkpoint_of_a_path_replaces_the_one_before(
    tmp_path: Path, served: tuple[Checkpoint, FakeServers]
) -> None:
    checkpoint, servers = served  # which count as many updates each time, as those of a script's second model do
    written = [checkpoint.write(tmp_path, step=next_number(tmp_path, 1)) for _ in range(3)]
    assert len(set(written)) == len(servers.saved) == 3 and latest_checkpoint(tmp_path) == written[-1]


def test_of_two_workers_the_first_wins(tmp_path: Path, served: tuple[Checkpoint, FakeServers]) -> None:
    checkpoint, servers = served
    first = checkpoint.save(tmp_path / "step", step=5)
    torch.rand(1)  # the second worker's random numbers are others
    assert checkpoint.save(tmp_path / "step", step=5) == first and len(servers.saved) == 1
    assert not find_damage(Path(first))


def test_a_worker_of_another_seed_keeps_its_random_numbers(
    tmp_path: Path, served: tuple[Checkpoint, FakeServers]
) -> None:
    """Each worker went on with those of the one that had saved, so that all dropped out the same."""
    checkpoint, _ = served
    torch.manual_seed(3)
    path = checkpoint.save(tmp_path / "step", step=40)
    torch.manual_seed(3)
    drawn = torch.rand(2)
    checkpoint.restore(path)
    assert torch.equal(torch.rand(2), drawn)
    torch.manual_seed(4)
    checkpoint.restore(path)
    own = torch.rand(2)
    torch.manual_seed(4)
    assert torch.equal(own, torch.rand(2))


def test_servers_that_cannot_write_leave_nothing(tmp_path: Path, served: tuple[Checkpoint, FakeServers]) -> None:
    checkpoint, servers = served
    servers.error = CheckpointError("ps:0 cannot write its shards")
    with pytest.raises(CheckpointError, match="ps:0 cannot write"):
        checkpoint.save(tmp_path / "step")
    assert not list(tmp_path.iterdir())


def test_a_summary_lists_variables_whole(tmp_path: Path, served: tuple[Checkpoint, FakeServers]) -> None:
    path = Path(served[0].save(tmp_path / "step", step=40))
    for file in path.glob("ps-*.safetensors"):
        file.write_bytes(bytes(file.stat().st_size))  # whose values are not read: they may be more than memory holds
    summary = summarize(path)
    assert summary["step"] == 40 and summary["objects"]["adam"] == "optimizer on parameter servers"
    shapes = {entry["name"]: entry["shape"] for entry in summary["tensors"] if entry["file"] == "ps-*"}
    assert shapes == {"weight": [ROWS, 4], "bias": [ROWS]}
    assert {"host/host.json", "ps-0.json"} <= {file["name"] for file in summary["files"]}


def test_an_optimizer_that_has_more_than_the_servers_is_told_apart_from_one_they_do_not_know() -> None:
    """Both were "not connected", of an optimizer that add_param_group had given more after prepare."""
    model = nn.Linear(4, ROWS)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    names = {place_of(parameter): name for name, parameter in model.named_parameters()}

    def take_it(known: dict[Any, str]) -> None:
        servers: Any = SimpleNamespace(names=lambda: known, check=lambda modules: None)
        take({"optimizer": optimizer}, DefaultStrategy(), servers, copy=False, keep=True)

    take_it(names)
    with pytest.raises(ConfigurationError, match=r"optimizer is not connected .*strategy.prepare first"):
        take_it({})
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ConfigurationError, match=r"has got parameters since .*add_param_group before prepare"):
        take_it(names)


@pytest.mark.parametrize("by_servers", [False, True])
def test_the_epoch_is_carried_over_between_servers_and_another_strategy(
    caplog: pytest.LogCaptureFixture, by_servers: bool
) -> None:
    """It began at 0 again."""
    loader = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2)
    source: Any = None  # nothing is leased
    split: Any = distribute(loader, placement=InputPlacement((torch.device("cpu"),)))
    next(iter(split))
    leased = DistributedDataset(loader, Plan(6, 2, shuffle=False, seed=0), 1, source, torch.device("cpu"))
    saved = (LEASED, 3) if by_servers else (OBJECT, {**split.state_dict(), "epoch": 3})
    data = split if by_servers else leased
    put_back({"data": data}, {"data": saved})
    assert data.epoch == 3
    assert "data starts at the beginning of epoch 3: " in caplog.text
    assert not by_servers or len(list(data)) == 3


def test_rows_of_a_table_are_read_as_they_are_asked_for(by_chief: Path) -> None:
    whole = {
        "weight": consolidate(by_chief)["weight"],
        "slot/exp_avg/weight": consolidate(by_chief, "exp_avg")["weight"],
    }
    for name, expected in whole.items():
        rows = SavedRows(by_chief, name)
        assert rows.shape == (ROWS, 4) and rows.dtype == torch.float32
        for first, stop in ((0, ROWS), (1, 2), (2, 4), (4, 9)):
            assert torch.equal(rows[first:stop], expected[first:stop])
    with pytest.raises(CheckpointError, match="rows of other, found 0"):
        SavedRows(by_chief, "other")
    (by_chief / "ps-1.json").unlink()
    with pytest.raises(CheckpointError, match="expected 5 rows of weight, found 3"):
        SavedRows(by_chief, "weight")
