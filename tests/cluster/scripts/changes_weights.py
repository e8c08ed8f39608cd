"""Changes weights around prepare: by load_once, which all workers see; by a callback; in place, which is refused."""

from __future__ import annotations

import functools
import itertools
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests.cluster.scripts import faults


def loaded(strategy: sg.Strategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD([model.weight], 0.0)  # the bias gets gradients, and stays
    prepare = functools.partial(strategy.prepare, gradients="sum" if sys.argv[1] == "uneven sums" else "mean")
    model, optimizer = prepare(model, optimizer)
    again = (*prepare(model, optimizer), prepare(model))
    assert all(one is other for one, other in zip(again, (model, optimizer, model), strict=True)), again
    strategy.load_once(lambda: nn.init.constant_(model.weight, 7.0))
    if sys.argv[1] == "optimizer later":
        strategy.prepare(alone := nn.Linear(2, 1))
        strategy.prepare(alone, torch.optim.SGD(alone.parameters(), 0.1))
    if sys.argv[1] == "prepared twice":
        strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    num_examples = {"uneven batches": 7, "uneven sums": 7, "step first": 11, "left over": 11}.get(sys.argv[1], 40)
    data = strategy.distribute_dataset(DataLoader(TensorDataset(torch.ones(num_examples, 2)), 4))
    num_batches = 0

    def step(batch: list[torch.Tensor]) -> None:
        nonlocal num_batches
        num_batches += 1
        if sys.argv[1] in ("weighed in two batches", "uneven batches", "uneven sums"):
            if sys.argv[1] == "weighed in two batches":
                strategy.set_weight(float(num_batches))
            model(batch[0]).mean().backward()
            if num_batches == 2:
                optimizer.step()
            return
        if sys.argv[1] == "left over":
            model(batch[0]).mean().backward()
            if num_batches in (2, 4):
                optimizer.step()
                optimizer.zero_grad()
            return
        if sys.argv[1] == "step first":
            optimizer.step()  # with the gradient of the batch before
        optimizer.zero_grad()
        if sys.argv[1] == "weighed twice":
            strategy.set_weight(1.0)
            model(batch[0]).mean().backward()
            strategy.set_weight(2.0)
        model(batch[0]).sum().backward()
        if sys.argv[1] != "step first":
            optimizer.step()

        if sys.argv[1] == "by hand":
            with torch.no_grad():
                model.bias -= 0.1 * model.bias.grad

    if sys.argv[1] == "refused":
        model.load_state_dict({"weight": torch.zeros(1, 2), "bias": torch.zeros(1)})
    for batch in itertools.chain(data, data if sys.argv[1] == "left over" else ()):
        strategy.run(step, (batch,))
        assert model.weight.tolist() == [[7.0, 7.0]], model.weight
    if sys.argv[1] == "after the loop":
        strategy.run(optimizer.step)
    if sys.argv[1] == "lead ends first" and not sg.is_lead():
        strategy.barrier()


def clamped(strategy: sg.Strategy) -> None:
    """Gradients large enough to leave in the middle of backward, changed afterwards where torch does not see it."""
    with strategy.scope():
        model = nn.Linear(256, 256, bias=False)
        nn.init.zeros_(model.weight)
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 1.0))

    def step(batch: list[torch.Tensor]) -> None:
        optimizer.zero_grad()
        (100 * model(batch[0])).sum().backward()
        model.weight.grad.data.clamp_(-1.0, 1.0)
        optimizer.step()

    for batch in strategy.distribute_dataset(DataLoader(TensorDataset(torch.ones(40, 256)), 4)):
        strategy.run(step, (batch,))
    assert -10.0 <= float(model.weight.min()) <= -1.0, model.weight


def best_of_fit(strategy: sg.Strategy) -> None:
    """The loss grows in every epoch: what is best are the weights after the first."""
    with strategy.scope():
        model = sg.Model(nn.Linear(2, 1, bias=False))
    model.load_state_dict({"weight": torch.ones(1, 2)})  # before anything is prepared
    model.compile(lambda parameters: torch.optim.SGD(parameters, 1.0, maximize=True), "mse")
    x, y = torch.ones(16, 2), torch.zeros(16, 1)
    stopping = sg.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    task = str(getattr(strategy, "task", ""))
    hears = sg.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: faults.at_step(task, epoch),
        on_epoch_missed=lambda epoch, logs: faults.at_step(task, epoch + 10),
    )
    history = model.fit(x, y, batch_size=8, epochs=4, validation_data=(x, y), callbacks=[stopping, hears], verbose=0)
    losses = history.history["val_loss"]
    assert len(losses) == 2 and losses[0] < losses[1], losses
    assert model.evaluate(x, y, verbose=0) == losses[0], "what evaluate takes from the ps"


def loaded_by_hand(strategy: sg.Strategy) -> None:
    """The best weights of a model whose training is over, on each worker for itself; then the next model."""
    x, y = torch.ones(16, 2), torch.zeros(16, 1)

    def trained() -> sg.Model:
        with strategy.scope():
            model = sg.Model(nn.Linear(2, 1))
            model.compile(lambda parameters: torch.optim.SGD(parameters, 0.01), "mse")
        model.fit(x, y, batch_size=8, epochs=2, validation_data=(x, y), verbose=0)
        return model

    first = trained()
    best = {name: value + 1 for name, value in first.state_dict().items()}
    first.module.load_state_dict(best)
    strategy.barrier()
    trained().evaluate(x, y, verbose=0)
    assert all(torch.equal(value, best[name]) for name, value in first.state_dict().items()), first.state_dict()
    checkpoint = sg.Checkpoint(model=first.module, strategy=strategy)
    for use in (lambda: first.evaluate(x, y, verbose=0), lambda: checkpoint.save("changed/")):
        if strategy.servers is not None:
            try:
                use()
            except sg.ConfigurationError as error:
                assert "weight was changed here since the last update" in str(error), error
            else:
                raise AssertionError("the ps have other weights, and that was not said")


def table(strategy: sg.Strategy) -> None:
    """A lead that starts again would do so over what the others have trained since."""
    with strategy.scope():
        layer = sg.nn.Embedding(4, 2)
    layer, _ = strategy.prepare(layer, torch.optim.SGD(layer.parameters(), 0.1))
    strategy.load_once(lambda: layer.load_state_dict({"weight": torch.ones(4, 2)}))
    assert layer.whole_weight().eq(1).all()
    layer.load_state_dict({"weight": torch.zeros(4, 2)})


def main() -> None:
    strategy = sg.strategy_from_environment()
    if sys.argv[1] == "table":
        table(strategy)
    best_of_fit(strategy)
    if sys.argv[1] == "best":
        return
    clamped(strategy)
    loaded(strategy)
    if sys.argv[1] == "kept":
        loaded_by_hand(strategy)


if __name__ == "__main__":
    main()
