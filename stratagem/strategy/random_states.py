"""States of random number generators, as tensors: torch (CPU and CUDA), numpy, Python, and those of local replicas."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from stratagem.strategy.base import Strategy

_REPLICA = "replica:"


def random_states() -> dict[str, torch.Tensor]:
    """What the generators are at now, by name."""
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    _, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states["numpy"] = torch.tensor([*map(int, key), position, has_gauss], dtype=torch.int64)
    states["numpy.gauss"] = torch.tensor(gauss, dtype=torch.float64)
    version, internal, next_gauss = random.getstate()
    states["python"] = torch.tensor([version, *internal], dtype=torch.int64)
    if next_gauss is not None:
        states["python.gauss"] = torch.tensor(next_gauss, dtype=torch.float64)
    return states


def set_random_states(states: Mapping[str, torch.Tensor]) -> None:
    """Puts the generators back there. A CUDA device that is not here is left out."""
    torch.set_rng_state(states["torch"])
    for name, state in states.items():
        kind, _, index = name.partition(":")
        if kind == "cuda" and int(index) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, int(index))
    numbers = states["numpy"].tolist()
    key = np.array(numbers[:-2], dtype=np.uint32)
    np.random.set_state(("MT19937", key, numbers[-2], numbers[-1], float(states["numpy.gauss"])))
    version, *internal = states["python"].tolist()
    next_gauss = float(states["python.gauss"]) if "python.gauss" in states else None
    random.setstate((version, tuple(internal), next_gauss))


def have_seed_of_process(states: Mapping[str, torch.Tensor]) -> bool:
    """Whether they are of a process that seeded torch like this one; of another seed they are another worker's."""
    generator = torch.Generator()
    generator.set_state(states["torch"])
    return generator.initial_seed() == torch.initial_seed()


@contextlib.contextmanager
def random_untouched(strategy: Strategy | None = None) -> Iterator[None]:
    """Around what is done in the middle of a training that must not notice: afterwards the generators are where they
    were, and with a strategy the streams of its replicas, which may have run meanwhile."""
    states = random_states() if strategy is None else all_random_states(strategy)
    try:
        yield
    finally:
        if strategy is None:
            set_random_states(states)
        else:
            set_all_random_states(states, strategy)


def all_random_states(strategy: Strategy) -> dict[str, torch.Tensor]:
    """:func:`random_states`, and the streams of a strategy's replicas that have their own."""
    return random_states() | {_REPLICA + name: state for name, state in strategy.random_states().items()}


def set_all_random_states(states: Mapping[str, torch.Tensor], strategy: Strategy) -> None:
    """Puts them back there. Streams of replicas that are not here are left out."""
    set_random_states(states)
    own = {name: state for name, state in states.items() if name.startswith(_REPLICA)}
    strategy.set_random_states({name.removeprefix(_REPLICA): state for name, state in own.items()})
