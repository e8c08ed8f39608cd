"""Batches of any form: counted, cut, emptied, moved."""

from __future__ import annotations

import collections
import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, default_collate

from stratagem.arguments import warn_once
from stratagem.data.distribute import distribute
from stratagem.data.nested import (
    CopiedAsDict,
    empty_like,
    empty_of,
    fingerprint,
    form_of,
    num_examples,
    part_of,
    tensors,
    to_device,
)
from stratagem.data.placement import InputPlacement
from stratagem.errors import ConfigurationError
from stratagem.training.fit.running_metrics import Logs
from tests.unit.data.reading import CPU, epoch

Point = collections.namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    names: list[str]
    rate: float
    size: tuple[int, int] = (28, 28)


@dataclasses.dataclass
class Checked:
    x: torch.Tensor
    y: torch.Tensor

    def __post_init__(self) -> None:
        assert len(self.x) == len(self.y)


def batch() -> dict[str, Any]:
    x = torch.arange(8).view(4, 2)
    return {
        "point": Point(x, [x + 1, np.arange(4.0)]),
        "record": Record(x.float(), ["a", "b", "c", "d"], 0.5),
        "tuple": (x, None, "all"),
        "scalar": torch.tensor(3),
        "ids": ["p", "q", "r", "s"],
    }


def test_a_part_keeps_the_form() -> None:
    assert num_examples(batch()) == 4
    part = part_of(batch(), 1, 3)
    assert part["point"].x.tolist() == [[2, 3], [4, 5]]
    assert isinstance(part["point"], Point) and part["point"].y[1].tolist() == [1.0, 2.0]
    assert part["record"].names == ["b", "c"] and part["record"].rate == 0.5 and part["record"].size == (28, 28)
    assert part["tuple"][1:] == (None, "all") and part["scalar"].item() == 3 and part["ids"] == ["q", "r"]


def test_an_empty_one_keeps_the_form() -> None:
    for empty in (empty_like(batch()), part_of(batch(), 4, 4)):
        assert [list(tensor.shape) for tensor in tensors(empty)] == [[0, 2], [0, 2], [0, 2], [0, 2], []]
        assert empty["point"].y[1].shape == (0,) and empty["ids"] == [] and empty["record"].names == []
        assert empty["tuple"][2] == "all"


def test_replicas_get_parts_of_nested_batches() -> None:
    (item,) = distribute([batch()], placement=InputPlacement((CPU,) * 3))
    assert [part["ids"] for part in item.values] == [["p", "q"], ["r", "s"], []]
    assert item.values[2]["record"].x.shape == (0, 2)


def test_a_dataclass_may_check_its_fields() -> None:
    checked = Checked(torch.arange(4), torch.arange(4) + 4)
    assert [tensor.tolist() for tensor in tensors({"a": [checked]})] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    (item,) = distribute([checked], placement=InputPlacement((CPU,) * 2))
    assert [(part.x.tolist(), part.y.tolist()) for part in item.values] == [([0, 1], [4, 5]), ([2, 3], [6, 7])]
    assert len(empty_like(checked).y) == 0


def test_mappings_keep_their_type() -> None:
    class Kind(collections.UserDict[str, torch.Tensor]):
        pass

    ordered = collections.OrderedDict(b=torch.arange(3), a=torch.arange(3))
    default = collections.defaultdict(lambda: torch.zeros(1), x=torch.arange(3))
    for kind in (ordered, default, Kind(x=torch.arange(3))):
        part = part_of(kind, 0, 2)
        assert type(part) is type(kind) and list(part) == list(kind)
        assert all(len(value) == 2 for value in part.values()) and all(len(value) == 3 for value in kind.values())


def test_plain_values_alone_are_examples() -> None:
    assert num_examples([1, 2, 3]) == 3 and part_of([1, 2, 3], 1, 3) == [2, 3]
    assert part_of((1, 2, 3), 0, 1) == (1,) and empty_like(["a"]) == []
    assert part_of({"text": ["a", "b"], "language": "en"}, 1, 2) == {"text": ["b"], "language": "en"}


def test_a_tuple_beside_tensors_is_no_list_of_examples() -> None:
    assert part_of({"x": torch.arange(2), "size": (28, 28)}, 0, 1)["size"] == (28, 28)


def test_a_tuple_of_texts_has_one_for_each_example() -> None:
    loaded = default_collate([(torch.tensor(1), "a"), (torch.tensor(2), "b"), (torch.tensor(3), "c")])
    assert loaded[1] == ("a", "b", "c")  # as torch gives them
    assert part_of(loaded, 1, 3)[1] == ("b", "c") and empty_like(loaded)[1] == ()
    assert part_of([torch.arange(3), ("height", "width")], 0, 1)[1] == ("height", "width")
    assert part_of([torch.arange(2), ("a", None)], 1, 2)[1] == (None,)  # one without a text
    assert part_of([torch.arange(2), (None, None)], 1, 2)[1] == (None, None)


@pytest.mark.parametrize("layout", ["torch.sparse_coo", "torch.jagged"])
def test_tensors_that_have_no_rows_to_cut(layout: str) -> None:
    rows = [torch.ones(1), torch.ones(2)]
    made: dict[str, Callable[[], torch.Tensor]] = {
        "torch.sparse_coo": lambda: torch.eye(2).to_sparse(),
        "torch.jagged": lambda: torch.nested.nested_tensor(rows, layout=torch.jagged),
    }
    for workers in (1, 2):
        with pytest.raises(ConfigurationError, match=r"(nested tensor|layout torch\.sparse\w*) cannot be cut"):
            epoch(lambda: [(torch.arange(2), made[layout]())], workers, replicas=2)


def test_a_worker_without_data_gets_nested_tensors_of_no_components() -> None:
    batch = torch.nested.nested_tensor([torch.ones(1, 3), torch.ones(2, 3)], layout=torch.jagged)
    for empty in (empty_like(batch), empty_of(json.loads(json.dumps(form_of(batch))))):
        assert empty.layout is torch.jagged and len(empty) == 0 and empty.values().shape == (0, 3)


@pytest.mark.filterwarnings("ignore:.*beta state:UserWarning")  # of torch, about CSR
@pytest.mark.parametrize(
    "collated",
    [
        lambda rows: torch.stack(rows).to_sparse(),
        lambda rows: torch.stack(rows).to_sparse(1),
        lambda rows: torch.stack(rows).to_sparse_csr(),
    ],
    ids=["coo", "hybrid", "csr"],
)
def test_a_replica_without_examples_gets_a_sparse_batch_of_none(
    collated: Callable[[list[torch.Tensor]], torch.Tensor],
) -> None:
    loader: DataLoader[torch.Tensor] = DataLoader(torch.eye(4), 4, collate_fn=collated)  # type: ignore[arg-type]
    ((first, _, empty),) = [item.values for item in distribute(loader, placement=InputPlacement((CPU,) * 3))]
    assert (first.size(0), empty.size(0)) == (2, 0)
    assert (empty.layout, empty.dtype) == (first.layout, first.dtype)
    if first.layout is torch.sparse_coo:
        assert empty.sparse_dim() == first.sparse_dim()


def test_what_moves_itself_has_no_empty_form_and_stays() -> None:
    packed = pack_sequence([torch.ones(2)])
    assert empty_like(packed) is packed


def test_a_replica_with_examples_of_others_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """A sum over the replicas counted those examples twice, without a word."""
    loader: DataLoader[torch.Tensor] = DataLoader(torch.ones(4, 1), 4, collate_fn=pack_sequence)  # type: ignore[arg-type]
    warn_once.cache_clear()
    for replicas, times in ((2, 0), (3, 1), (3, 1)):
        list(distribute(loader, placement=InputPlacement((CPU,) * replicas)))
        assert caplog.text.count("without examples gets a PackedSequence with examples of others") == times


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")  # of torch, about this layout
def test_a_nested_tensor_without_a_size_is_refused_with_the_layout_that_has_one() -> None:
    def collate(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.nested_tensor(rows, layout=torch.strided)

    loader: DataLoader[torch.Tensor] = DataLoader(torch.ones(4, 2), 4, collate_fn=collate)  # type: ignore[arg-type]
    for source in (loader, [collate([torch.ones(2), torch.ones(1)])]):
        with pytest.raises(ConfigurationError, match=r"torch\.strided does not say its size.*layout=torch\.jagged"):
            list(distribute(source, placement=InputPlacement((CPU,))))


def test_batches_that_say_no_number_of_examples() -> None:
    with pytest.raises(ConfigurationError, match=r"share their first.*\[3\], \[2, 5\]; .*map-style.*from_jagged"):
        num_examples({"x": torch.zeros(3), "y": torch.zeros(2, 5)})
    for opaque in (object(), 3, torch.tensor(1.0), {"x": None}):
        with pytest.raises(ConfigurationError, match="first dimension"):
            num_examples(opaque)


def test_objects_that_move_themselves() -> None:
    packed = pack_sequence([torch.arange(3), torch.arange(2)])
    with pytest.raises(ConfigurationError, match="PackedSequence"):
        part_of([packed, torch.arange(2)], 0, 1)
    moved = to_device([packed, torch.arange(2)], torch.device("meta"))
    assert isinstance(moved[0], PackedSequence) and moved[0].data.is_meta and moved[1].is_meta
    assert to_device(batch(), torch.device("meta"))["record"].x.is_meta


def test_the_form_travels() -> None:
    empty = empty_of(json.loads(json.dumps(form_of(batch()))))
    assert [list(tensor.shape) for tensor in tensors(empty)][:2] == [[0, 2], [0, 2]]
    assert type(empty["point"]).__name__ == "Point" and empty["point"].y[1].dtype == np.float64
    assert empty["record"].x.shape == (0, 2) and empty["record"].size == () and empty["record"].rate == 0.5
    assert empty["scalar"].item() == 3 and empty["tuple"][1:] == (None, "all")
    with pytest.raises(ConfigurationError, match="keys"):
        form_of({(1, 2): torch.arange(2)})


def test_fingerprints_differ_with_values_and_forms() -> None:
    same = fingerprint(batch())
    assert fingerprint(batch()) == same
    others = [batch() for _ in range(4)]
    others[0]["scalar"] += 1
    others[1]["ids"][3] = "x"
    others[2]["record"].x[3, 1] = 9
    others[3]["point"].y[1][0] = 7
    assert same not in [fingerprint(other) for other in others]
    assert fingerprint(torch.zeros(2, dtype=torch.bfloat16)) != fingerprint(torch.zeros(2))


def test_fingerprints_are_those_of_another_process() -> None:
    batches = [(np.array([f"text {number}" for number in range(3)], object), [object()]) for _ in range(2)]
    assert fingerprint(batches[0]) == fingerprint(batches[1])
    batches[0][0][2] = "another"
    assert fingerprint(batches[0]) != fingerprint(batches[1])


def test_what_is_copied_as_a_dict_is_one() -> None:
    class Upper(CopiedAsDict):
        def __getitem__(self, name: str) -> str:
            return str(self.data[name]).upper()

        def __setitem__(self, name: str, value: str) -> None:
            if name == "kept":
                raise ValueError(name)
            self.data[name] = value

    mapping = Upper(one="a")
    for copied in (copy.copy(mapping), mapping.copy(), mapping | {}, {} | mapping):
        assert type(copied) is dict and copied == {"one": "A"}
    assert mapping | {"one": 1} == {"one": 1} and {"one": 1} | mapping == {"one": "A"}
    mapping |= {"two": "b"}
    assert type(mapping) is Upper and dict(mapping) == {"one": "A", "two": "B"}
    with pytest.raises(ValueError, match="kept"):
        mapping |= {"kept": "c"}


@pytest.mark.parametrize("copied", [copy.copy, Logs.copy, copy.deepcopy, dict, lambda logs: logs | {}])
def test_logs_are_copied_before_they_are_read(copied: Callable[[Logs], Any]) -> None:
    assert copied(Logs(lambda: {"loss": 1.0})) == {"loss": 1.0}
