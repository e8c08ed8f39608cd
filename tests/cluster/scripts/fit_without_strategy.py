"""A script in the words of Keras that makes no strategy: in a job it trains with the job's."""

from __future__ import annotations

import json

import torch

import stratagem as sg


def main() -> None:
    """Trains, and prints what the lead has seen."""
    torch.manual_seed(0)
    model = sg.Model(torch.nn.Linear(4, 3))
    model.compile(optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1), loss="cross_entropy")
    inputs = torch.arange(240.0).reshape(60, 4) / 240
    history = model.fit(inputs, torch.arange(60) % 3, batch_size=16, epochs=2, verbose=0)
    strategy = sg.get_strategy()
    found = {"strategy": type(strategy).__name__, "replicas": strategy.num_replicas_in_sync}
    print(json.dumps({**found, "has": sg.has_strategy(), "loss": history.history["loss"]}))


if __name__ == "__main__":
    main()
