"""Auto-shard policies, dataset functions, and workers that have different amounts of data."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

from stratagem.data.distribute import distribute, distribute_from_function
from stratagem.data.files import FileDataset, Path
from stratagem.data.options import AutoShardPolicy, DistributeOptions, InputContext
from stratagem.data.placement import InputPlacement
from stratagem.errors import ConfigurationError
from tests.conformance.scenarios.examples import Numbers, Stream
from tests.unit.data.reading import CPU, Shares, batches, epoch, on_workers, steps_of, values

FILE, DATA, OFF = (DistributeOptions(auto_shard_policy=AutoShardPolicy[name]) for name in ("FILE", "DATA", "OFF"))


def numbers_in(file: Path) -> Iterable[int]:
    """A file "a-b" holds the numbers from a to b."""
    first, last = map(int, str(file).split("-"))
    return range(first, last + 1)


def files(*names: str, batch_size: int = 4, **arguments: Any) -> DataLoader[int]:
    return DataLoader(FileDataset(names, numbers_in), batch_size=batch_size, **arguments)


def test_file_each_worker_reads_its_own_files() -> None:
    first, second = epoch(lambda: files("0-5", "6-11"), num_workers=2, options=FILE)
    assert first == [[[0, 1]], [[2, 3]], [[4]], [[5]]]
    assert second == [[[6, 7]], [[8, 9]], [[10]], [[11]]]


def test_file_with_several_replicas() -> None:
    first, second = epoch(lambda: files("0-5", "6-11", "12-13"), num_workers=2, replicas=2, options=FILE)
    assert first == [[[0], [1]], [[2], [3]], [[4], [5]], [[12], [13]]]
    assert second == [[[6], [7]], [[8], [9]], [[10], [11]], [[], []]]


def test_file_needs_files() -> None:
    with pytest.raises(ConfigurationError, match=r"3 workers, got 2.*DATA"):
        epoch(lambda: files("0-5", "6-11"), num_workers=3, options=FILE)
    with pytest.raises(ConfigurationError, match=r"made of files.*got DataLoader.*DATA"):
        epoch(lambda: DataLoader(Stream(4), batch_size=2), num_workers=2, options=FILE)


def test_file_lists_must_be_the_same() -> None:
    def work(placement: InputPlacement) -> None:
        names = ("0-5", "6-11") if placement.worker == 0 else ("6-11", "0-5")
        steps_of(distribute(files(*names), placement=placement, options=FILE))

    with pytest.raises(ConfigurationError, match="list of files"):
        on_workers(2, work)


def test_file_with_a_map_style_dataset_and_with_batches() -> None:
    class MapStyle(Numbers):
        def __init__(self, names: Sequence[str]) -> None:
            self.files = names
            self.rows = [row for name in names for row in numbers_in(name)]
            super().__init__(len(self.rows))

        def __getitem__(self, index: int) -> int:
            return self.rows[index]

        def with_files(self, names: Sequence[str]) -> MapStyle:
            return MapStyle(names)

    class Batched:
        def __init__(self, names: Sequence[str]) -> None:
            self.files = names

        def with_files(self, names: Sequence[str]) -> Batched:
            return Batched(names)

        def __iter__(self) -> Any:
            return (torch.tensor(numbers_in(name)) for name in self.files)

    names = ("0-3", "4-9", "10-12", "13-13")
    first, second = epoch(lambda: DataLoader(MapStyle(names), batch_size=4, shuffle=True), 2, options=FILE)
    assert sorted(row for step in first for row in step[0]) == [0, 1, 2, 3, 10, 11, 12]
    assert sorted(row for step in second for row in step[0]) == [4, 5, 6, 7, 8, 9, 13]
    first, second = epoch(lambda: Batched(names), 2, options=FILE)
    assert first == [[[0, 1]], [[2, 3]], [[10, 11]], [[12]]]
    assert second == [[[4, 5, 6]], [[7, 8, 9]], [[13]], [[]]]
    with pytest.raises(ConfigurationError, match="own sampler"):
        epoch(lambda: DataLoader(MapStyle(names), batch_size=4, sampler=[3, 1]), 2, options=FILE)


def test_data_each_worker_takes_its_rows_of_each_batch() -> None:
    for source in (lambda: DataLoader(Numbers(12), batch_size=4), lambda: batches(12, 4), lambda: files("0-7", "8-11")):
        first, second = epoch(source, num_workers=2, options=DATA)
        assert first == [[[0, 1]], [[4, 5]], [[8, 9]]]
        assert second == [[[2, 3]], [[6, 7]], [[10, 11]]]


@pytest.mark.parametrize(
    "source", [lambda: DataLoader(Numbers(12), batch_size=4), lambda: batches(12, 4), lambda: files("0-7", "8-11")]
)
def test_off_everybody_sees_all(source: Any) -> None:
    everything = [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]], [[8, 9]], [[10, 11]]]
    assert epoch(source, num_workers=2, options=OFF) == [everything, everything]


def test_off_workers_shuffle_differently() -> None:
    first, second = epoch(lambda: DataLoader(Numbers(12), batch_size=4, shuffle=True), num_workers=2, options=OFF)
    rows = [[row for step in steps for row in step[0]] for steps in (first, second)]
    assert rows[0] != rows[1] and sorted(rows[0]) == sorted(rows[1]) == list(range(12))


def test_auto_is_file_for_files_else_data() -> None:
    assert epoch(lambda: files("0-5", "6-11"), 2) == epoch(lambda: files("0-5", "6-11"), 2, options=FILE)
    assert epoch(lambda: batches(12, 4), 2) == epoch(lambda: batches(12, 4), 2, options=DATA)
    assert epoch(lambda: DataLoader(Numbers(12), batch_size=4), 2)[1] == [[[2, 3]], [[6, 7]], [[10, 11]]]


def test_one_worker_sees_all_whatever_the_policy() -> None:
    for options in (FILE, DATA, OFF):
        steps = epoch(lambda: files("0-5", "6-11"), replicas=2, options=options)
        assert steps == [[[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]]


def test_processes_of_a_loader_share_files() -> None:
    loader = files("0-3", "4-7", batch_size=2, num_workers=2, timeout=60)
    (steps,) = epoch(lambda: loader)
    assert sorted(row for step in steps for row in step[0]) == list(range(8))


def test_who_has_no_data_left_takes_part_with_size_0() -> None:
    def work(placement: InputPlacement) -> tuple[Any, Shares]:
        heard = Shares()
        loader = files("0-5", "6-6", batch_size=4)
        return steps_of(distribute(loader, placement=placement, options=FILE, listener=heard)), heard

    (first, heard), (second, heard_too) = on_workers(2, work)
    assert first == [[[0, 1]], [[2, 3]], [[4]], [[5]]]
    assert second == [[[6]], [[]], [[]], [[]]]
    assert [(share.num_examples, share.batch_examples) for share in heard.begun] == [
        ((2,), 3),
        ((2,), 2),
        ((1,), 1),
        ((1,), 1),
    ]
    assert [share.num_examples for share in heard_too.begun] == [(1,), (0,), (0,), (0,)]
    assert heard_too.begun[1].weights == (0.0,)


class Example(NamedTuple):
    image: torch.Tensor
    name: list[str]
    extra: dict[Any, Any]


def test_who_never_had_data_gets_the_form_of_the_others() -> None:
    def collate(rows: list[int]) -> Example:
        extra: dict[Any, Any] = {"rate": 0.5, 3: (torch.tensor(1.5), torch.zeros(len(rows), dtype=torch.bfloat16))}
        return Example(torch.zeros(len(rows), 3, 2), [str(row) for row in rows], extra)

    def work(placement: InputPlacement) -> list[Any]:
        loader = files("0-3", "1-0", collate_fn=collate)  # the second file is empty
        return list(distribute(loader, placement=placement, options=FILE))

    (mine, _), (empty, _) = on_workers(2, work)
    assert mine.name == ["0", "1"] and empty.name == []
    assert empty.image.shape == (0, 3, 2) and empty.image.dtype == torch.float32
    assert empty.extra["rate"] == 0.5 and empty.extra[3][0] == 1.5
    assert empty.extra[3][1].shape == (0,) and empty.extra[3][1].dtype == torch.bfloat16


@pytest.mark.parametrize("options", [DATA, FILE, OFF])
def test_nobody_has_any_data(options: DistributeOptions) -> None:
    assert epoch(lambda: files("1-0", "1-0"), num_workers=2, options=options) == [[], []]


def test_workers_that_read_other_batches_are_told() -> None:
    def work(placement: InputPlacement) -> None:
        steps_of(distribute([torch.tensor([placement.worker, 1])], placement=placement))

    with pytest.raises(ConfigurationError, match=r"workers 0 and 1 must read the same.*first batch.*OFF"):
        on_workers(2, work)


def test_workers_that_read_other_batches_from_the_second_epoch_on_are_told() -> None:
    class Shuffled:
        """As one that draws from torch's generator, from which the model of one worker drew once more."""

        def __init__(self, worker: int) -> None:
            self._orders = iter([[0, 1, 2, 3], [worker, 2, 3, 1 - worker]])

        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.tensor(next(self._orders)).split(2))

    def work(placement: InputPlacement) -> None:
        dataset = distribute(Shuffled(placement.worker), placement=placement)
        assert len(steps_of(dataset)) == 2
        with pytest.raises(ConfigurationError, match="workers 0 and 1 must read the same data, but the first batch"):
            steps_of(dataset)

    on_workers(2, work)


def test_workers_with_other_datasets_are_told() -> None:
    def work(placement: InputPlacement) -> None:
        steps_of(distribute(DataLoader(Numbers(8 + placement.worker), batch_size=4), placement=placement))

    with pytest.raises(ConfigurationError, match="the same dataset"):
        on_workers(2, work)


def test_a_function_makes_batches_for_each_replica() -> None:
    asked: list[InputContext] = []

    def dataset_fn(context: InputContext) -> list[torch.Tensor]:
        asked.append(context)
        size = context.get_per_replica_batch_size(8)
        mine = torch.arange(24)[context.input_pipeline_id :: context.num_input_pipelines]
        return list(mine.split(size))

    def work(placement: InputPlacement) -> list[Any]:
        dataset = distribute_from_function(dataset_fn, placement=placement)
        return [steps_of(dataset) for _ in range(2)]

    first, second = on_workers(2, work, replicas=2)
    assert first == [[[[0, 2], [4, 6]], [[8, 10], [12, 14]], [[16, 18], [20, 22]]]] * 2
    assert second == [[[[1, 3], [5, 7]], [[9, 11], [13, 15]], [[17, 19], [21, 23]]]] * 2
    assert sorted(asked, key=lambda context: context.input_pipeline_id) == [
        InputContext(2, 0, 4),
        InputContext(2, 1, 4),
    ]


def test_a_function_may_end_in_the_middle_of_a_step() -> None:
    placement = InputPlacement((CPU, CPU))
    heard = Shares()
    dataset = distribute_from_function(lambda context: batches(5, 2), placement=placement, listener=heard)
    assert steps_of(dataset) == [[[0, 1], [2, 3]], [[4], []]]
    assert [share.num_examples for share in heard.begun] == [(2, 2), (1, 0)] and len(dataset) == 2


def test_a_function_that_cannot_be_used() -> None:
    placement = InputPlacement((CPU,))
    with pytest.raises(ConfigurationError, match="single examples"):
        distribute_from_function(lambda context: Numbers(4), placement=placement)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigurationError, match="shards by"):
        distribute_from_function(lambda context: batches(4, 2), placement=placement, options=DATA)
    with pytest.raises(ConfigurationError, match=r"divisible by the 3 replicas, got 8"):
        InputContext(1, 0, 3).get_per_replica_batch_size(8)


def test_length_is_unknown_where_workers_read_different_things() -> None:
    def work(placement: InputPlacement) -> None:
        for options in (FILE, OFF):
            with pytest.raises(TypeError, match="how many steps"):
                len(distribute(files("0-1", "2-3"), placement=placement, options=options))
        with pytest.raises(TypeError, match="how many steps"):
            len(distribute_from_function(lambda context: batches(4, 2), placement=placement))
        assert len(distribute(batches(4, 2), placement=placement)) == 2

    on_workers(2, work)


def test_a_set_of_batches_without_examples_is_no_step() -> None:
    source = [torch.arange(0), torch.arange(3), torch.arange(0)]
    assert epoch(lambda: source, num_workers=2) == [[[[0, 1]]], [[[2]]]]


def test_reading_stops_together_when_a_worker_has_fewer_batches() -> None:
    def work(options: DistributeOptions, placement: InputPlacement) -> Any:
        make = functools.partial(batches, 6, 2)
        source = make() if placement.worker == 0 else make()[:2]
        return [values(item) for item in distribute(source, placement=placement, options=options)]

    own = [[[number]] for number in range(6)]
    assert on_workers(2, functools.partial(work, OFF)) == [own, [*own[:4], [[]], [[]]]]
    with pytest.raises(ConfigurationError, match=r"must read the same data, but 1 of 2 have no batch left .*OFF"):
        on_workers(2, functools.partial(work, DATA))  # half of the last batch would be nobody's


@pytest.mark.parametrize("dropped", [(), (0, 1)], ids=["none", "two"])
def test_a_collate_fn_that_drops_examples_is_warned_of_once(
    dropped: Sequence[int], caplog: pytest.LogCaptureFixture
) -> None:
    """A replica whose examples were dropped weighed in the mean as if they were there, without a word."""

    def collate(items: list[int]) -> torch.Tensor:
        return torch.tensor([item for item in items if item not in dropped])

    loader = DataLoader(Numbers(8), batch_size=8, collate_fn=collate)
    dataset = distribute(loader, placement=InputPlacement((CPU, CPU)))
    assert steps_of(dataset) == [[[item for item in range(4) if item not in dropped], [4, 5, 6, 7]]]
    steps_of(dataset)
    assert caplog.text.count("2 examples of 4") == (1 if dropped else 0)
