"""The script that `stratagem run` starts: all scenarios on one strategy, one after the other; results as JSON."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import stratagem as sg


def outcome(scenario: Callable[[sg.Strategy], Any], strategy: sg.Strategy) -> dict[str, Any]:
    """``{"value": …}`` as it comes out of JSON, or ``{"error": class, "message": text}`` with the notes of the error.

    Every scenario begins with the same state of torch's generator, whatever ran before it.
    """
    torch.manual_seed(1234)
    try:
        found: dict[str, Any] = json.loads(json.dumps({"value": scenario(strategy)}, default=_plain))
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        return {"error": type(error).__name__, "message": "\n".join([str(error), *notes])}
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    raise TypeError(f"a scenario returned a {type(value).__name__}, which is no JSON value")


def _named(name: str) -> Callable[[sg.Strategy], Any]:
    module, function = name.split(":")
    found: Callable[[sg.Strategy], Any] = getattr(importlib.import_module(module), function)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="folder for <worker>.json")
    parser.add_argument("scenarios", nargs="+", help="module:function of each")
    options = parser.parse_args()
    strategy = sg.strategy_from_environment()
    assert isinstance(strategy, sg.MultiWorkerMirroredStrategy | sg.ParameterServerStrategy)
    outcomes = {name: outcome(_named(name), strategy) for name in options.scenarios}
    (options.out / f"{strategy.task.index}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
