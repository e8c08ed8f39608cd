"""The script that `stratagem run` or torch_xla starts: all scenarios on one strategy, one after the other; as JSON."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Sequence
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
    parser.add_argument("--xla-devices", type=int, default=0, help="several: by SPMD")
    options = parser.parse_args()
    if options.xla_devices == 1:
        importlib.import_module("torch_xla").launch(_on_xla, (options.out, options.scenarios))
    elif options.xla_devices:
        importlib.import_module("torch_xla.runtime").use_spmd()
        _on_xla(0, options.out, options.scenarios)
    else:
        strategy = sg.strategy_from_environment()
        assert isinstance(strategy, sg.MultiWorkerMirroredStrategy | sg.ParameterServerStrategy)
        _run(options.out / f"{strategy.task.index}.json", options.scenarios, strategy)


def _on_xla(index: int, out: Path, names: Sequence[str]) -> None:
    _run(out / f"{index}.json", names, sg.TPUStrategy())


def _run(path: Path, names: Sequence[str], strategy: sg.Strategy) -> None:
    path.write_text(json.dumps({name: outcome(_named(name), strategy) for name in names}))


if __name__ == "__main__":
    main()
