"""Outside of replicas there is only replica 0; what was done to it there reaches the others when they run again."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import stratagem as sg
from stratagem.errors import ConfigurationError
from stratagem.strategy.replicas.outside_changes import OptimizerChanges
from tests.unit.strategy.mirrored_replicas import Replicas, equal

INPUTS = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
        self.head = nn.Linear(4, 2)
        self.register_buffer("offset", torch.zeros(2))
        self.register_buffer("absent", None)
        self.mode = "fast"

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(inputs)) + self.offset
        return out

    def start_again(self) -> None:
        """As older code does."""
        for parameter in self.parameters():
            parameter.data.fill_(0.25)
        self.mode = "slow"


@pytest.fixture
def own() -> Net:
    torch.manual_seed(0)
    return Net()


def _fill(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)


def _data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.fill_(0.5)


def _load(model: Any) -> None:
    state = {name: torch.full_like(value, 2.0) for name, value in model.state_dict().items()}
    assert not model.load_state_dict(state).missing_keys


WRITES: dict[str, Callable[[Any], object]] = {
    "in place": _fill,
    "through data": _data,
    "load_state_dict": _load,
    "load a part": lambda model: model.head.load_state_dict(nn.Linear(4, 2).state_dict()),
    "init": lambda model: nn.init.normal_(model.head.weight),
    "apply": lambda model: model.apply(lambda part: [p.data.zero_() for p in part.parameters()]),
    "a method of the user": lambda model: model.start_again(),
    "double": lambda model: model.double(),
    "to dtype": lambda model: model.to(torch.bfloat16),
    "inference mode": lambda model: torch.inference_mode()(model.head.weight.mul_)(2),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_to_parameters(replicas: Replicas, own: Net, write: Callable[[Any], object]) -> None:
    model = replicas.prepare(own)
    replicas.run(lambda _: None)
    before = [parameter.detach().clone() for parameter in own.parameters()]
    write(model)
    assert any(
        one.dtype != other.dtype or not torch.equal(one, other)
        for one, other in zip(before, own.parameters(), strict=True)
    )
    assert replicas.run(lambda _: model.head.weight.dtype) == [own.head.weight.dtype] * 2
    assert equal(*replicas.copies(model))


def test_writes_through_what_was_kept_from_before(replicas: Replicas, own: Net) -> None:
    model = replicas.prepare(own)
    weight, dropout = model.head.weight, model.body[1]
    replicas.run(lambda _: None)
    with torch.no_grad():
        weight.fill_(1.5)
    dropout.p = 0.7
    own.mode = "odd"
    assert (
        replicas.run(lambda _: (float(model.head.weight.detach().sum()), model.body[1].p, model.mode))
        == [(12.0, 0.7, "odd")] * 2
    )


def test_attributes_at_any_depth(replicas: Replicas, own: Net) -> None:
    model = replicas.prepare(own)
    model.mode = "slow"
    model.body[1].p = 0.9
    model.new = [torch.zeros(2)]
    model.state, model.step, model.param_groups = "idle", 3, None  # an optimizer's are each replica's own
    del model.body[0].in_features
    replicas.run(lambda _: None)
    first, second = replicas.copies(model)
    assert (second.state, second.step, second.param_groups) == ("idle", 3, None)
    assert second.mode == "slow" and second.body[1].p == 0.9 and not hasattr(second.body[0], "in_features")
    assert first.new[0].data_ptr() != second.new[0].data_ptr()
    del model.new
    assert replicas.run(lambda _: hasattr(model, "new")) == [False, False]


def test_tensors_that_are_attributes(replicas: Replicas, own: Net) -> None:
    own.mask = torch.ones(2)
    model = replicas.prepare(own)
    model.mask.mul_(0.5)
    model.kept = model(INPUTS)  # with a graph, which cannot be copied
    assert replicas.run(lambda _: (model.mask.tolist(), model.kept.requires_grad)) == [
        ([0.5, 0.5], True),
        ([0.5, 0.5], False),
    ]
    replicas.run(lambda replica: model.mask.add_(replica))
    assert replicas.run(lambda _: model.mask.tolist()) == [[0.5, 0.5], [1.5, 1.5]]
    model.lock = threading.Lock()
    with pytest.raises(ConfigurationError, match=r"lock of Net was set .* and cannot be copied"):
        replicas.run(lambda _: None)
    del model.lock
    replicas.run(lambda _: None)


def test_modes_and_frozen_parameters(replicas: Replicas, own: Net) -> None:
    model = replicas.prepare(own)
    model.eval()
    model.body.requires_grad_(False)
    model.head.train()
    modes = replicas.run(lambda _: [part.training for part in model.modules()])
    assert modes == [[False, False, False, False, True]] * 2
    assert replicas.run(lambda _: [p.requires_grad for p in model.parameters()]) == [[False, False, True, True]] * 2
    for parameter in model.parameters():
        parameter.requires_grad = not parameter.requires_grad
    assert replicas.run(lambda _: [p.requires_grad for p in model.parameters()]) == [[True, True, False, False]] * 2


def test_buffers(replicas: Replicas, own: Net) -> None:
    model = replicas.prepare(own)
    model.offset = torch.ones(3)
    model.absent = torch.ones(())
    assert replicas.run(lambda _: (model.offset.tolist(), float(model.absent))) == [([1.0] * 3, 1.0)] * 2
    model.offset += 1
    model.absent = None
    model.register_buffer("later", torch.zeros(1))
    assert (
        replicas.run(lambda _: (model.offset.tolist(), model.absent, float(model.later)))
        == [([2.0] * 3, None, 0.0)] * 2
    )
    pointers = replicas.run(lambda _: model.offset.data_ptr())
    assert pointers[0] != pointers[1]

    def rebind(replica: int) -> None:
        model.offset = torch.full((2,), float(replica))

    replicas.run(rebind)
    assert replicas.run(lambda _: model.offset.tolist()) == [[0.0, 0.0], [1.0, 1.0]]
    with torch.inference_mode():
        model.offset = torch.full((2,), 5.0)
    assert replicas.run(lambda _: model.offset.tolist()) == [[5.0, 5.0]] * 2


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad(replicas: Replicas, own: Net, to_none: bool) -> None:
    optimizer = torch.optim.SGD(own.parameters(), 0.1)
    model, optimizer = replicas.prepare(own, optimizer)
    for zero in (model.zero_grad, optimizer.zero_grad):
        replicas.run(lambda _: model(INPUTS).sum().backward())
        assert all(parameter.grad.any() for its in replicas.copies(model) for parameter in its.parameters())
        zero(set_to_none=to_none)
        for gradients in replicas.run(lambda _: [parameter.grad for parameter in model.parameters()]):
            assert all(gradient is None if to_none else not gradient.any() for gradient in gradients)


def test_gradients_taken_away_through_the_originals(replicas: Replicas, own: Net) -> None:
    model = replicas.prepare(own)
    replicas.run(lambda _: model(INPUTS).sum().backward())
    own.zero_grad()
    assert replicas.run(lambda _: model.head.weight.grad) == [None, None]


def test_hooks(replicas: Replicas, own: Net) -> None:
    model = replicas.prepare(own)
    calls: list[tuple[int, str]] = []
    handle = model.register_forward_hook(lambda module, args, output: calls.append((id(module), "model")))
    model.head.register_forward_pre_hook(lambda module, args: calls.append((id(module), "head")))
    replicas.run(lambda _: model(INPUTS))
    assert sorted(calls) == sorted(
        pair for its in replicas.copies(model) for pair in ((id(its), "model"), (id(its.head), "head"))
    )
    handle.remove()
    calls.clear()
    replicas.run(lambda _: model(INPUTS))
    assert sorted(name for _, name in calls) == ["head", "head"]


@pytest.mark.parametrize("early", [False, True])
def test_hooks_of_gradients(replicas: Replicas, own: Net, early: bool) -> None:
    """Registered outside of replicas they changed the gradients of replica 0 alone."""

    def gradients(model: Any) -> list[float]:
        def step(_: int) -> float:
            model.zero_grad()
            model(INPUTS).sum().backward()
            return float(model.head.weight.grad.sum())

        return list(replicas.run(step))

    handle = own.head.weight.register_hook(torch.zeros_like) if early else None
    model = replicas.prepare(own)
    if handle is None:
        assert 0.0 not in gradients(model)
        handle = model.head.weight.register_hook(torch.zeros_like)
    assert gradients(model) == gradients(model) == [0.0, 0.0]
    handle.remove()
    assert 0.0 not in gradients(model)


def test_hooks_of_gradients_keep_their_order(replicas: Replicas, own: Net) -> None:
    model = replicas.prepare(own)
    called: list[int] = []
    for number in range(40):
        model.head.weight.register_hook(lambda _, number=number: called.append(number))
    replicas.run(lambda replica: model(INPUTS).sum().backward() if replica else None)
    assert called == list(range(40))


def test_hooks_that_each_replica_was_given_stay_its_own(replicas: Replicas, own: Net) -> None:
    optimizer = torch.optim.SGD(own.parameters(), 0.1)
    optimizer = replicas.prepare(own, optimizer)[1]
    steps: list[int] = []
    for replica, its in enumerate(replicas.copies(optimizer)):
        its.register_step_pre_hook(lambda its, args, kwargs, replica=replica: steps.append(replica))
    replicas.mirrors.record()
    optimizer.register_step_pre_hook(lambda its, args, kwargs: steps.append(9))
    replicas.run(lambda _: optimizer.step())
    assert sorted(steps) == [0, 1, 9, 9]


def test_while_replicas_wait(replicas: Replicas, own: Net) -> None:
    model = replicas.prepare(own)

    def outside(_: list[Any]) -> list[None]:
        with replicas.mirrors.interrupted():
            model.mode = "between"
            model.start_again()
            with torch.no_grad():
                model.offset.fill_(4)
        return [None] * 2

    def step(replica: int) -> tuple[str, float]:
        model.body[1].p = 0.2 + 0.1 * replica
        replicas.replica_threads.meet("merge", None, outside)
        return model.mode, float(model.offset[0])

    assert replicas.run(step) == [("slow", 4.0)] * 2
    assert equal(*replicas.copies(model))
    assert [its.body[1].p for its in replicas.copies(model)] == [0.2, pytest.approx(0.3)]


def test_a_run_that_fails_leaves_each_replica_its_own(replicas: Replicas, own: Net) -> None:
    model = replicas.prepare(own)

    def step(replica: int) -> None:
        model.mode = f"of {replica}"
        if replica:
            raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        replicas.run(step)
    assert replicas.run(lambda _: model.mode) == ["of 0", "of 1"]


STRUCTURE: dict[str, tuple[Callable[[Any], object], str]] = {
    "a new layer": (lambda model: setattr(model, "tail", nn.Linear(2, 2)), "tail of Net"),
    "another layer": (lambda model: setattr(model.body, "0", nn.Linear(4, 4)), r"body\.0 of Net"),
    "another parameter": (
        lambda model: setattr(model.head, "bias", nn.Parameter(torch.zeros(2))),
        r"head\.bias of Net",
    ),
    "no parameter": (lambda model: setattr(model.head, "bias", None), r"head\.bias of Net"),
    "append": (lambda model: model.body.append(nn.ReLU()), r"body\.2 of Net"),
    "parametrized": (lambda model: nn.utils.parametrizations.orthogonal(model.head), r"head\.weight of Net"),
    "pruned": (lambda model: prune.l1_unstructured(model.head, "weight", 0.5), r"head\.weight of Net"),
    "assigned": (lambda model: model.load_state_dict(Net().state_dict(), assign=True), "weight of Net"),
}


@pytest.mark.parametrize(("change", "named"), STRUCTURE.values(), ids=STRUCTURE)
def test_the_structure_is_fixed(replicas: Replicas, own: Net, change: Callable[[Any], object], named: str) -> None:
    model = replicas.prepare(own)
    change(model)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=named + " was added, replaced or removed after strategy.prepare"):
            replicas.run(lambda _: model.mode)


@pytest.mark.parametrize(
    "change", [lambda m: setattr(m, "head", nn.Identity()), lambda m: m.to("meta")], ids=["head", "moved"]
)
def test_a_model_that_is_done_with_does_not_keep_others_from_training(
    replicas: Replicas, own: Net, change: Callable[[Any], object]
) -> None:
    """The folds of a cross-validation, each stripped of its head or moved away when it has been trained."""
    done = replicas.prepare(own)
    replicas.run(lambda _: done(INPUTS[:, :4]))
    change(done)
    model = replicas.prepare(Net().eval())
    assert torch.equal(*replicas.run(lambda _: model(INPUTS[:, :4])))
    with pytest.raises(ConfigurationError, match=r"of Net was added, replaced or removed|Net was moved to meta"):
        replicas.run(lambda _: done(INPUTS[:, :4]))


def test_a_structure_that_is_undone_runs_again(replicas: Replicas, own: Net) -> None:
    """``del`` of an nn.Sequential gives it another dictionary, in which no change was seen any more."""
    model = replicas.prepare(own)
    last = own.body[1]
    for time in range(2):
        del own.body[1]
        with pytest.raises(ConfigurationError, match=r"body\.1 of Net was .* no step can use it until then"):
            replicas.run(lambda _: model.mode)
        own.body.append(last)
        replicas.run(lambda _: None)
        assert equal(*replicas.copies(model)), time
    own.body[0] = nn.Linear(4, 4)
    with pytest.raises(ConfigurationError, match=r"body\.0 of Net was"):
        replicas.run(lambda _: model.mode)


def test_a_prepared_model_is_pruned(replicas: Replicas, own: Net) -> None:
    """Once more, or for good: parameters are in another order then, at which the next run ended in a StopIteration."""
    prune.identity(own.eval().head, "weight")
    model = replicas.prepare(own)
    prune.l1_unstructured(own.head, "weight", 0.5)
    outputs = replicas.run(lambda _: model(INPUTS[:, :4]))
    assert torch.equal(*outputs) and own.head.get_buffer("weight_mask").sum() == 4
    prune.l1_unstructured(own.body[0], "weight", 0.5)
    with pytest.raises(ConfigurationError, match=r"undo that \(prune\.remove\).*prune\.identity\(layer, \"weight\"\)"):
        replicas.run(lambda _: model.mode)
    prune.remove(own.body[0], "weight")
    replicas.run(lambda _: None)
    assert equal(*replicas.copies(model)) and (own.body[0].get_parameter("weight") == 0).sum() == 8
    names = [[name for name, _ in its.named_parameters()] for its in replicas.copies(model)]
    assert names[0] == names[1] and names[0][:2] == ["body.0.bias", "body.0.weight"]


def test_what_an_error_kept_back_is_carried_later(replicas: Replicas, own: Net) -> None:
    model = replicas.prepare(own)
    model.start_again()
    model.tail = nn.ReLU()
    with pytest.raises(ConfigurationError, match="tail of Net was added"):
        replicas.run(lambda _: model.mode)
    del own.tail
    assert replicas.run(lambda _: model.mode) == ["slow", "slow"]
    assert equal(*replicas.copies(model))


def test_a_model_that_was_moved_cannot_run(replicas: Replicas, own: Net) -> None:
    model = replicas.prepare(own)
    model.to("meta")
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="Net was moved to meta after"):
            replicas.run(lambda _: model.mode)


def test_attributes_and_state_of_optimizers(replicas: Replicas, own: Net) -> None:
    class Marked(torch.optim.SGD):
        mark = 0

        def reset(self) -> None:
            """Forgets its momentum, and writes to weights without a trace."""
            for state in self.state.values():
                state["momentum_buffer"].zero_()
            self.param_groups[0]["params"][0].data.zero_()

    model, optimizer = replicas.prepare(own, Marked(own.parameters(), 0.1, momentum=0.9))

    def step(replica: int) -> None:
        model(INPUTS).sum().backward()
        optimizer.step()

    model.eval()
    replicas.run(step)
    optimizer.mark = 3
    optimizer.reset()
    assert replicas.run(lambda _: optimizer.mark) == [3, 3]
    for its in replicas.copies(optimizer):
        assert not any(state["momentum_buffer"].any() for state in its.state.values())
    assert equal(*replicas.copies(model)) and not next(own.parameters()).any()


def test_what_is_loaded_is_kept_by_an_evaluation_before_the_first_step() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    model = strategy.prepare(Net())
    model.load_state_dict({**model.state_dict(), "offset": torch.ones(2)})
    with strategy.averaged_buffers(model):
        pass
    replicas = strategy.local_results(strategy.run(lambda: model.offset.tolist()))
    strategy.close()
    assert replicas == ([1.0, 1.0], [1.0, 1.0])


def test_after_an_interrupted_prepare_others_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks of what had been interrupted were carried to the other replicas, where they cannot be copied."""
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    record, calls = OptimizerChanges.record, itertools.count()

    def interrupted(changes: OptimizerChanges) -> None:
        if next(calls):
            raise KeyboardInterrupt
        record(changes)

    def prepared() -> torch.nn.Module:
        net = torch.nn.Linear(2, 1)
        made: torch.nn.Module = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))[0]
        return made

    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(OptimizerChanges, "record", interrupted)
            prepared()
        net = prepared()
        strategy.run(lambda: net(torch.ones(1, 2)).sum().backward())
    finally:
        strategy.close()
