"""Workers that hold different examples: a script that has cut its data by rank itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from stratagem.data.distribute import contents_of, distribute
from stratagem.data.options import AutoShardPolicy, DistributeOptions
from stratagem.data.placement import InputPlacement
from stratagem.training.fit.sources import Arrays
from tests.conformance.scenarios.examples import Numbers
from tests.unit.data.reading import on_workers

X, Y = torch.arange(24.0).view(12, 2), torch.arange(12) % 3


class Augmented(Dataset[Any]):
    """What it keeps is the same on every worker, what it gives is drawn."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x.numpy()
        self.paths = [f"/tmp/{np.random.rand()}" for _ in x]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + np.random.rand()


class Rows(Dataset[Any]):
    """As datasets.Dataset of Hugging Face, whose ``[]`` may transform what it keeps."""

    def __init__(self, texts: list[str], transforms: bool = True) -> None:
        self._table = {"text": texts}
        self._transforms = transforms

    def with_format(self, name: None) -> Rows:
        return Rows(self._table["text"], False)

    def __len__(self) -> int:
        return len(self._table["text"])

    def __getitem__(self, index: int) -> Any:
        assert not self._transforms, "an example was read"
        return {"text": self._table["text"][index]}


WHOLE: list[Callable[[slice], Any]] = [
    lambda part: TensorDataset(X[part], Y[part]),
    lambda part: Arrays([{"a": X[part]}, Y[part]]),
    lambda part: Subset(TensorDataset(X), range(12)[part]),
    lambda part: ConcatDataset([TensorDataset(X[:4]), TensorDataset(X[part])]),
    lambda part: list(zip(X[part], Y[part].tolist(), strict=True)),
    lambda part: X[part],
    lambda part: X.T[0][part].view(-1, 1),  # each row is one number, of stride 2
    lambda part: Augmented(X[part]),
    lambda part: Rows([f"text {number}" for number in range(12)][part]),
]


@pytest.mark.parametrize("make", WHOLE)
def test_parts_of_a_dataset_are_told_apart_and_one_dataset_is_not(make: Callable[[slice], Any]) -> None:
    mine, other = (contents_of(make(slice(rank, None, 2))) for rank in range(2))
    assert mine and other and mine != other
    assert contents_of(make(slice(None))) == contents_of(make(slice(None)))


def test_there_is_no_telling_of_what_cannot_be_looked_at() -> None:
    class Refuses(Numbers):
        def __len__(self) -> int:
            raise OSError("the file is gone")

    assert contents_of(Refuses(4)) == 0
    numbers = Numbers(4)
    assert contents_of(numbers) == contents_of(Numbers(4)) and not numbers.asked


@pytest.mark.parametrize(("by_rank", "policy", "warns"), [(True, "DATA", 1), (False, "DATA", 0), (True, "OFF", 0)])
def test_a_warning_says_once_that_a_script_has_cut_its_data_by_rank(
    caplog: pytest.LogCaptureFixture, by_rank: bool, policy: str, warns: int
) -> None:
    def work(placement: InputPlacement) -> None:
        part = slice(placement.worker, None, 2) if by_rank else slice(None)
        options = DistributeOptions(auto_shard_policy=AutoShardPolicy[policy])
        loader = DataLoader(TensorDataset(X[part]), batch_size=2, shuffle=True)
        for _ in range(2):  # as where a script distributes one for each epoch
            dataset = distribute(loader, placement=placement, options=options)
            for _ in range(2):
                list(dataset)

    on_workers(2, work)
    assert caplog.text.count("The workers hold different examples") == warns
    assert ("AutoShardPolicy.OFF" in caplog.text) == bool(warns)
