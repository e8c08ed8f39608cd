"""Checkpoints of one process: saved, restored, numbered, kept, written meanwhile."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torchmetrics
from torch import nn

from stratagem.arguments import warn_once
from stratagem.checkpoint import manifest
from stratagem.checkpoint.catalog import HOST, find_damage, scan, steps
from stratagem.checkpoint.durable import read_file
from stratagem.checkpoint.reading import latest_checkpoint, load_checkpoint
from stratagem.errors import CheckpointError, ConfigurationError
from stratagem.measuring import measures
from stratagem.rpc.heap import ENVIRONMENT
from stratagem.strategy.one_process import CentralStorageStrategy, OneDeviceStrategy
from stratagem.strategy.replicas.variable import Variable
from stratagem.training.saving.checkpoint import Checkpoint
from stratagem.training.saving.manager import CheckpointManager
from stratagem.worker import background_writes
from stratagem.worker.step_meter import active_meter
from tests.unit.training.checkpoint_objects import Script, same

torch.set_num_threads(1)


def test_a_restored_training_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    script = Script()
    script.train(2)
    script.checkpoint.epoch += 7
    path = script.checkpoint.save(tmp_path / "run" / "step")
    script.train(3)
    drawn = random.random(), np.random.rand()

    other = Script(seed=5)
    other.train(1)
    restored = other.checkpoint.restore(path)
    assert (restored.path, restored.step) == (path, 1)
    other.train(3)
    assert same(script.state(), other.state())
    assert other.checkpoint.epoch == 7 and other.scheduler.state_dict() == script.scheduler.state_dict()
    assert (random.random(), np.random.rand()) == drawn


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_wait_for_more_are_said_to_be_in_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, to_none: bool
) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    checkpoint = Checkpoint(model=model, optimizer=optimizer)

    def backward(begins: bool) -> int:
        if begins:
            optimizer.zero_grad(set_to_none=to_none)
        model(torch.ones(3, 2)).sum().backward()
        return sum("between two backward passes" in record.message for record in caplog.records)

    checkpoint.save(tmp_path / "first")
    backward(begins=True)
    optimizer.step()
    checkpoint.save(tmp_path / "between")
    backward(begins=True)  # of a loss that another optimizer trains, say: the next update begins anew
    checkpoint.save(tmp_path / "between")
    assert backward(begins=True) == 0
    checkpoint.save(tmp_path / "amid")
    assert backward(begins=False) == 1
    assert backward(begins=False) == 1


def test_gradients_of_steps_that_are_over_wait_for_nothing_under_central_storage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = CentralStorageStrategy(["cpu:0", "cpu:1"])
    made = nn.Linear(2, 1)
    model, optimizer = strategy.prepare(made, torch.optim.SGD(made.parameters(), 0.1))

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()

    strategy.run(step)
    with strategy.scope():
        Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "between")
    strategy.run(step)
    assert "between two backward passes" not in caplog.text


def test_what_a_metric_has_counted_is_said_to_be_in_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A restored one counted the rest of its epoch alone, without a word."""
    warn_once.cache_clear()
    lasting = torchmetrics.MeanMetric()
    lasting.persistent(True)
    lasting.update(3.0)
    path = Checkpoint(metric=lasting).save(tmp_path / "lasting")
    assert "metrics of torchmetrics" not in caplog.text
    other = torchmetrics.MeanMetric()
    other.persistent(True)
    Checkpoint(metric=other).restore(path)
    assert other.metric_state == lasting.metric_state
    Checkpoint(metric=torchmetrics.MeanMetric()).save(tmp_path / "usual")
    assert caplog.text.count("A checkpoint has no states of metrics of torchmetrics") == 1


def test_the_model_file_is_a_plain_state_dict(tmp_path: Path) -> None:
    script = Script()
    path = Path(script.checkpoint.save(tmp_path / "step"))
    assert path.name == "step-00000001" and (tmp_path / "latest").read_text() == "step-00000001\n"
    assert same(safetensors.torch.load_file(path / "model.safetensors"), script.state())
    assert same(load_checkpoint(tmp_path), script.state())
    assert len(load_checkpoint(path, "optimizer")["state"]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_a_tensor_may_have_the_name_that_its_file_has_for_itself(tmp_path: Path) -> None:
    model = nn.ParameterDict({"__metadata__": nn.Parameter(torch.ones(2))})
    checkpoint = Checkpoint(model=model)
    path = checkpoint.save(tmp_path / "step")
    nn.init.zeros_(model["__metadata__"])
    checkpoint.restore(path)
    assert model["__metadata__"].tolist() == [1.0, 1.0]


def test_files_are_cut_at_the_size_asked_for(tmp_path: Path) -> None:
    script = Script(max_file_bytes=50)
    path = Path(script.checkpoint.save(tmp_path / "step"))
    assert len(list(path.glob("model-*.safetensors"))) > 2
    assert same(load_checkpoint(path), script.state())


def test_numbers_go_on_and_names_are_free(tmp_path: Path) -> None:
    save = Script().checkpoint.save
    names = [save(tmp_path / "step", step=40), save(tmp_path / "step"), save(f"{tmp_path}/"), save(tmp_path)]
    assert [Path(name).name for name in names] == ["step-00000040", "step-00000041", "step-00000042", "step-00000043"]
    assert Path(save(tmp_path / "other")).name == "other-00000044"
    assert latest_checkpoint(tmp_path) == str(tmp_path / "other-00000044")
    save(tmp_path / "early", step=3)
    assert latest_checkpoint(tmp_path) == str(tmp_path / "other-00000044")
    assert (tmp_path / "latest").read_text() == "other-00000044\n"
    assert latest_checkpoint(tmp_path / "absent") is None


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    script = Script()
    path = script.checkpoint.save(tmp_path / "step", step=4)
    assert script.checkpoint.save(tmp_path / "step", step=4) == path, "the same state again is the same checkpoint"
    before = script.state()
    script.train()
    with pytest.raises(CheckpointError, match=r"step-00000004: .*holds another state"):
        script.checkpoint.save(tmp_path / "step", step=4)
    assert same(load_checkpoint(path), before)
    assert not list(tmp_path.glob(".*"))


def test_the_good_one_that_is_named_is_of_the_same_folder(tmp_path: Path) -> None:
    """Another job's was "the last good checkpoint"."""
    model = nn.Linear(2, 1)
    Checkpoint(model=model).save(tmp_path / "other" / "step", step=9)
    bad = Path(Checkpoint(model=model).save(tmp_path / "ours" / "step"))
    (bad / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="There is no other checkpoint"):
        Checkpoint(model=model).restore(bad)
    good = Checkpoint(model=model).save(tmp_path / "ours" / "step", step=2)
    with pytest.raises(CheckpointError, match=f"The last good checkpoint is {good}"):
        Checkpoint(model=model).restore(bad)


def test_nothing_is_saved_where_nobody_looks_for_it(tmp_path: Path) -> None:
    script = Script()
    path = script.checkpoint.save(tmp_path / "step")
    for save in (script.checkpoint.save, script.checkpoint.write):
        with pytest.raises(CheckpointError, match=f"is itself a checkpoint.*: save in {tmp_path}$"):
            save(path)
    with pytest.raises(CheckpointError, match="without a leading dot"):
        script.checkpoint.save(tmp_path / ".step")
    (tmp_path / "weights.pt").touch()
    with pytest.raises(CheckpointError, match=r"weights\.pt is a file, but a checkpoint is a folder: .* load_state"):
        script.checkpoint.restore(tmp_path / "weights.pt")


def test_a_folder_that_may_not_be_looked_into_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lost+found").mkdir()
    stat = Path.stat

    def refused(path: Path, **options: Any) -> os.stat_result:
        if path.parent.name == "lost+found":
            raise PermissionError
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refused)
    assert Script().checkpoint.save(tmp_path / "step") == latest_checkpoint(tmp_path)


def test_a_file_that_the_disk_does_not_give_is_not_called_altered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(Checkpoint(number=1).save(tmp_path / "step"))

    def broken(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("stratagem.checkpoint.catalog.hash_file", broken)
    damage = find_damage(path)
    assert damage and all(line.endswith(" cannot be read: Input/output error") for line in damage)


def test_write_keeps_the_folder_to_one_checkpoint(tmp_path: Path) -> None:
    script = Script()
    first = script.checkpoint.write(tmp_path / "best")
    script.train()
    second = script.checkpoint.write(tmp_path / "best")
    assert first != second and not Path(first).exists()
    assert same(load_checkpoint(tmp_path / "best"), script.state())
    assert script.checkpoint.restore(tmp_path / "best").path == second == latest_checkpoint(tmp_path)


def test_what_a_crash_left_of_a_removal_goes_with_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(Script().checkpoint, tmp_path, max_to_keep=1)
    with monkeypatch.context() as dying:
        dying.setattr("stratagem.checkpoint.catalog.shutil.rmtree", lambda *_, **__: None)
        manager.save()
        manager.save()
    assert len(list(tmp_path.iterdir())) == 3, "nothing was left of it: the test proves nothing"
    path = manager.save()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["latest", Path(path).name]


def test_one_that_was_set_aside_has_no_number(tmp_path: Path) -> None:
    (tmp_path / ".damaged-step-00000001-12345678").mkdir()
    assert Path(Script().checkpoint.save(tmp_path / "step")).name == "step-00000001"


def test_write_leaves_what_another_writes_meanwhile(tmp_path: Path) -> None:
    """As workers of parameter servers do, whose numbers of steps differ: each once removed the other's."""
    other = Checkpoint(epoch=14)

    class Slow:
        def state_dict(self) -> dict[str, Any]:
            other.write(tmp_path, step=14)
            return {}

        def load_state_dict(self, state: Any) -> None: ...

    Checkpoint(slow=Slow()).write(tmp_path, step=4)
    assert other.restore(tmp_path).step == 14


def test_an_asynchronous_save_keeps_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, write = threading.Event(), Checkpoint._write
    began = threading.Event()

    def slow(*arguments: Any) -> None:
        began.set()
        assert go_on.wait(60)
        write(*arguments)

    monkeypatch.setattr(Checkpoint, "_write", slow)
    script = Script(asynchronous=True)
    script.train(2)
    moment = script.state()
    path = script.checkpoint.save(tmp_path / "step")
    assert began.wait(60)
    script.train(2)
    assert not Path(path).exists() and latest_checkpoint(tmp_path) is None
    assert script.checkpoint.last_stall_s > 0
    go_on.set()
    script.checkpoint.wait()
    assert same(load_checkpoint(path), moment) and not same(moment, script.state())


def test_a_manager_restores_what_it_is_still_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took the one before, of which nobody was told."""
    write = Checkpoint._write
    script = Script()
    manager = CheckpointManager(script.checkpoint, tmp_path)
    manager.save()
    go_on = threading.Event()

    def slow(*arguments: Any) -> None:
        assert go_on.wait(60)
        write(*arguments)

    monkeypatch.setattr(Checkpoint, "_write", slow)
    path = manager.save(blocking=False)
    timer = threading.Timer(0.2, go_on.set)
    timer.start()
    restored = manager.restore_or_initialize()
    timer.join()
    assert restored == path


@pytest.mark.parametrize("by", ["real", "real/../real", "link"])
@pytest.mark.parametrize("what", ["restore", "restore_or_initialize", "save"])
def test_new_objects_wait_for_what_those_before_still_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, by: str
) -> None:
    """A cell that is run again found the checkpoint before, and took the number of the one being written."""
    go_on, write = threading.Event(), Checkpoint._write
    (tmp_path / "link").symlink_to("real")

    def slow(*arguments: Any) -> None:
        assert go_on.wait(60)
        write(*arguments)

    monkeypatch.setattr(Checkpoint, "_write", slow)
    old = Script()
    old.checkpoint.save(tmp_path / "real" / "step", blocking=False)
    timer = threading.Timer(0.2, go_on.set)
    timer.start()
    new = Script()
    new.train()
    folder = tmp_path / by
    manager = CheckpointManager(new.checkpoint, folder)
    if what == "save":
        assert manager.save() == str(folder / "step-00000002")
    elif what == "restore":
        new.checkpoint.restore(folder / "step-00000001")
    else:
        assert manager.restore_or_initialize() == str(folder / "step-00000001")
    timer.join()
    assert (what == "save") != same(new.state(), old.state())


def test_an_interrupted_save_is_waited_for_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one took its number, and was refused because of it."""
    go_on, write = threading.Event(), Checkpoint._write

    def slow(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert go_on.wait(60)
        write(*arguments)

    script = Script()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Checkpoint, "_write", slow)
        script.checkpoint.save(tmp_path / "step")
    assert latest_checkpoint(tmp_path) is None
    go_on.set()
    script.train()
    assert script.checkpoint.save(tmp_path / "step") == str(tmp_path / "step-00000002")


def test_a_save_that_was_interrupted_before_its_thread_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    script = Script()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", interrupt)
        script.checkpoint.save(tmp_path / "step")
    assert script.checkpoint.save(tmp_path / "step") == str(tmp_path / "step-00000001")
    assert background_writes.failure() is None


def test_what_an_asynchronous_save_could_not_do_is_raised_by_the_next(tmp_path: Path) -> None:
    script = Script(asynchronous=True)
    (tmp_path / "file").touch()
    script.checkpoint.save(tmp_path / "file" / "step")
    with pytest.raises(CheckpointError, match=r"cannot write .*file"):
        script.checkpoint.save(tmp_path / "step")
    assert script.checkpoint.save(tmp_path / "step", blocking=True) == latest_checkpoint(tmp_path)


def test_some_objects_of_a_checkpoint(tmp_path: Path) -> None:
    script = Script()
    path = script.checkpoint.save(tmp_path / "step")
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
    torch.manual_seed(11)
    state = torch.get_rng_state()
    Checkpoint(model=model).restore(path, random=False)
    assert same(dict(model.state_dict()), script.state()) and torch.equal(torch.get_rng_state(), state)
    with pytest.raises(CheckpointError, match=r"has no ema; it has model, optimizer.*\w\. Name what it has: sg"):
        Checkpoint(ema=model).restore(path)
    with pytest.raises(CheckpointError, match="expected a model for model, as in the checkpoint, got a value"):
        Checkpoint(model=3).restore(path)


def test_a_variable(tmp_path: Path) -> None:
    with OneDeviceStrategy().scope():
        variable = Variable(torch.tensor([1.0, 2.0]))
        checkpoint = Checkpoint(variable=variable)
        path = checkpoint.save(tmp_path / "step")
        variable.assign(torch.zeros(2))
        checkpoint.restore(path)
        assert variable.value().tolist() == [1.0, 2.0]


NOT_SAVED = [("save", 1), ("_x", 1), ("x/y", 1), ("thing", object()), ("numbers", [1, 2])]


@pytest.mark.parametrize(("name", "item"), NOT_SAVED)
def test_what_cannot_be_saved_is_refused(name: str, item: object) -> None:
    with pytest.raises(ConfigurationError, match=name):
        Checkpoint(**{name: item})  # type: ignore[arg-type]


def test_attributes_are_the_objects() -> None:
    checkpoint: Any = Checkpoint(epoch=1)
    checkpoint.epoch += 1
    assert checkpoint.epoch == 2
    with pytest.raises(AttributeError, match="has no 'step'"):
        checkpoint.step = 3
    with pytest.raises(ConfigurationError, match="epoch is of type object"):
        checkpoint.epoch = object()


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    script = Script()
    other = Script().checkpoint.save(tmp_path / "other", step=1)
    keeper = CheckpointManager(script.checkpoint, tmp_path, max_to_keep=2)
    assert keeper.restore_or_initialize() is None and not keeper.checkpoints
    paths = [keeper.save(step) for step in (2, 3, 4)]
    assert keeper.checkpoints == paths[1:] and keeper.latest_checkpoint == paths[-1]
    assert not Path(paths[0]).exists() and Path(other).exists()
    everything = CheckpointManager(script.checkpoint, tmp_path / "all", max_to_keep=None)
    assert [everything.save() for _ in range(7)] == everything.checkpoints
    with pytest.raises(ConfigurationError, match="max_to_keep"):
        CheckpointManager(script.checkpoint, tmp_path, max_to_keep=0)


@pytest.mark.parametrize("find", [scan, steps])
def test_a_look_through_a_folder_reads_each_manifest_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, find: Callable[[Path], list[Any]]
) -> None:
    """The chief's have one inside, of what a script added; of a script's own, only that there is none is seen."""
    checkpoint = Script().checkpoint
    *_, third, fourth = [Path(checkpoint.save(tmp_path / "of", step=step)) for step in (1, 2, 3, 4)]
    fourth.rename(third / HOST)
    read: list[Path] = []

    def counted(path: Path) -> bytes:
        content = read_file(path)
        read.append(path)
        return content

    monkeypatch.setattr(manifest, "read_file", counted)
    assert len(find(tmp_path)) == 3
    assert sorted(read) == sorted(tmp_path.rglob(manifest.MANIFEST))
    assert sorted(steps(tmp_path)) == [1, 2, 4]


def test_the_manifest_tells_how_it_was_made(tmp_path: Path) -> None:
    path = Path(Script(strategy=OneDeviceStrategy()).checkpoint.save(tmp_path / "step", step=12))
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["step"], manifest["strategy"], manifest["num_workers"]) == (12, "OneDeviceStrategy", 1)
    assert {file["name"] for file in manifest["files"]} == {p.name for p in path.iterdir()} - {"manifest.json"}


def test_a_script_saves_at_its_end(tmp_path: Path) -> None:
    """By ``atexit``, when executors take nothing any more."""
    script = (
        "import atexit, sys, torch, stratagem as sg\n"
        "checkpoint = sg.Checkpoint(model=torch.nn.Linear(2, 1))\n"
        "atexit.register(lambda: checkpoint.save(sys.argv[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "step")], capture_output=True, text=True)
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
    assert latest_checkpoint(tmp_path) is not None


@pytest.mark.thorough
def test_a_checkpoint_that_is_removed_while_it_is_opened_is_refused_as_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Script().checkpoint.save(tmp_path / "step")
    from_file = torch.UntypedStorage.from_file

    def removed(file: str, *arguments: Any, **named: Any) -> Any:
        shutil.rmtree(path)
        return from_file(file, *arguments, **named)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", removed)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(path, "model")


def test_what_was_read_is_given_back(tmp_path: Path) -> None:
    """Workers keep freed memory; a table of parameter servers is more than they need to train."""
    script = (
        "import psutil, sys, torch, stratagem as sg\n"
        "model = torch.nn.Linear(4096, 8192, bias=False)\n"  # 128 MiB
        "path = sg.Checkpoint(model=model).save(sys.argv[1] + '/step')\n"
        "before = psutil.Process().memory_info().rss\n"
        "sg.Checkpoint(model=model).restore(path)\n"
        "print(psutil.Process().memory_info().rss - before)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, check=True, timeout=240)
    assert int(done.stdout) < 32 << 20


@pytest.mark.parametrize("other", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RAdam, torch.optim.Adamax])
def test_the_state_of_another_optimizer_is_refused(tmp_path: Path, other: Any) -> None:
    model = nn.Linear(2, 1)
    Checkpoint(model=model, optimizer=torch.optim.Adam(model.parameters())).save(tmp_path / "adam")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.weight += 1
    optimizer = other(model.parameters(), 0.1)
    with pytest.raises(CheckpointError, match=rf"state of {other.__name__} for optimizer, got that of Adam: leave"):
        Checkpoint(model=model, optimizer=optimizer).restore(tmp_path)
    assert torch.equal(model.weight, before["weight"] + 1), "nothing was loaded"
    state = load_checkpoint(tmp_path, "optimizer")
    assert state.keys() == torch.optim.Adam(model.parameters()).state_dict().keys()


def test_a_state_of_the_same_optimizer_that_lacks_a_setting_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    del optimizer.param_groups[0]["dampening"]
    saved = Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "old")
    with pytest.raises(CheckpointError, match=r"of a different optimizer than optimizer.* nothing of dampening"):
        Checkpoint(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1)).restore(saved)


def test_torch_finds_the_parameters_of_a_large_optimizer_without_a_search(tmp_path: Path) -> None:
    """It looks into its group for the number of each tensor: in a list that is quadratic."""
    layers = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam([{"params": layer.parameters()} for layer in layers])
    sum(layer(torch.ones(2)).sum() for layer in layers).backward()
    optimizer.step()
    before = optimizer.state_dict()
    saved = Checkpoint(optimizer=optimizer).save(tmp_path / "step")
    given: list[Any] = []
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state: given.extend(group["params"] for group in state["param_groups"])
    )
    Checkpoint(optimizer=optimizer).restore(saved)
    assert given == [range(2), range(2, 4)]
    assert str(optimizer.state_dict()) == str(before)


def test_the_newest_is_found_though_the_one_before_it_goes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that was told that there is none began anew. A link that leads nowhere is not gone."""
    old = Path(Checkpoint(layer=nn.Linear(1, 1)).save(tmp_path / "jobs" / "ckpt", step=1))
    (tmp_path / "jobs" / "link").symlink_to("nowhere")
    listed = Path.iterdir

    def replaced_after(folder: Path) -> Any:
        found = [*listed(folder)]
        if folder == old.parent and old.exists():
            shutil.copytree(old, old.with_name("ckpt-00000002"))
            shutil.rmtree(old)
        return iter(found)

    monkeypatch.setattr(Path, "iterdir", replaced_after)
    assert latest_checkpoint(tmp_path) == str(old.with_name("ckpt-00000002"))


class Lookahead(torch.optim.Optimizer):
    """Has a form of its own for its state."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base, self.num_steps = base, 0

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict["base"])
        self.num_steps = state_dict["steps"]


class Counting(torch.optim.SGD):
    """Reads the groups that it loads as torch saves them."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.numbers: list[int] = []
        for group in state_dict["param_groups"]:
            self.numbers = self.numbers + group["params"]
        super().load_state_dict(state_dict)


def test_an_optimizer_that_loads_its_state_in_its_own_way_gets_what_it_saved(tmp_path: Path) -> None:
    parameters = list(torch.nn.Linear(2, 1).parameters())
    ahead, fresh = (Lookahead(torch.optim.SGD(parameters, 0.1)) for _ in range(2))
    ahead.num_steps = 3
    Checkpoint(optimizer=fresh).restore(Checkpoint(optimizer=ahead).save(tmp_path / "ahead"))
    assert fresh.num_steps == 3
    counting = Counting(parameters, 0.1)
    Checkpoint(optimizer=counting).restore(Checkpoint(optimizer=counting).save(tmp_path / "counting"))
    assert counting.numbers == [0, 1]


def test_what_a_manager_saves_counts_as_saving(tmp_path: Path) -> None:
    script = Script()
    script.train(1)
    meter = active_meter()
    assert meter is not None
    meter.start_clock()
    before = meter.values().get(measures.SAVE, 0.0)
    CheckpointManager(script.checkpoint, tmp_path).save()
    assert meter.values()[measures.SAVE] > before


def test_two_that_save_into_one_directory_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each removed the other's checkpoints, and resumed from them."""
    caplog.set_level(logging.WARNING)
    first, second, named = (
        CheckpointManager(Script().checkpoint, tmp_path, max_to_keep=2, checkpoint_name=name)
        for name in ("step", "step", "other")
    )
    for manager in (first, first, second, second, named, second, named):
        manager.save()
    assert not caplog.messages, "what was there before it began may be what it goes on with"
    for manager in (first, second, first):
        manager.save()
    said, again = caplog.messages
    assert said != again, "each once"
    assert "saved by another job, or by another CheckpointManager" in said and str(tmp_path) in said
