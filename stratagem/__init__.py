"""Stratagem: tf.distribute for PyTorch.

``import stratagem as sg`` gives what a training script needs. ``__init__.pyi`` says which name lives where; each is
loaded when first used, so that a chief or a command line does not load torch.
"""

import os
import sys
from typing import Any

import lazy_loader

from stratagem.rpc.logs import show_until_configured

# gRPC's fork handlers deadlock with forked DataLoader workers; set before grpc loads (docs/protocol.md 28).
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

show_until_configured()

__version__ = "0.1.0"

_TENSORFLOW_ROOMS = ("distribute", "experimental", "cluster_resolver", "partitioners")
_COORDINATOR = (
    "there is no ClusterCoordinator: every worker runs the script itself, and takes its batches from "
    "strategy.distribute_dataset"
)
_NOT_HERE = {
    **dict.fromkeys(("coordinator", "ClusterCoordinator"), _COORDINATOR),
    "Server": "a ps serves inside the constructor of the strategy, and then ends: start the same script in every task",
    "InputOptions": "its name is DistributeOptions",
}
_get, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """A name of the public API; ``tf.distribute.experimental.partitioners.…`` and ``experimental_…`` are understood."""
    name = name.removeprefix("experimental_")
    if name not in (*_TENSORFLOW_ROOMS, *__all__):
        hint = f": {_NOT_HERE[name]}" if name in _NOT_HERE else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    return sys.modules[__name__] if name in _TENSORFLOW_ROOMS else _get(name)
