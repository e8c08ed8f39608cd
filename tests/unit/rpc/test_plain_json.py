"""JSON of plain values and of dataclasses, which every parser accepts."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import types
from typing import Any

import pytest

from stratagem.rpc.plain_json import to_json


@dataclasses.dataclass
class Part:
    loss: float | None
    steps: tuple[int, ...] = ()


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(("loss", "shown"), [(0.5, 0.5), (None, None), (math.nan, "nan"), (-math.inf, "-inf")])
def test_an_object_is_its_fields_and_no_number_is_none(loss: float | None, shown: Any, indent: int | None) -> None:
    content = {"part": Part(loss, (1, 2)), "lines": collections.deque([1]), "map": types.MappingProxyType({"a": True})}
    expected = {"part": {"loss": shown, "steps": [1, 2]}, "lines": [1], "map": {"a": True}}
    assert json.loads(to_json(content, indent)) == expected
    assert json.loads(to_json(Part(loss), indent)) == {"loss": shown, "steps": []}


@pytest.mark.parametrize("loss", [0.5, math.nan])
def test_what_json_does_not_know_is_refused(loss: float) -> None:
    with pytest.raises(TypeError, match="expected what JSON knows, got set"):
        to_json({"loss": loss, "tasks": {1}})
