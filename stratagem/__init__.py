"""Stratagem: tf.distribute for PyTorch.

``import stratagem as sg`` provides everything a training script needs. ``__init__.pyi`` says which module has each
name. Each is loaded on first use, so that a chief or a command line does not load torch.
"""

import os
import sys
from typing import Any

import lazy_loader

from stratagem.rpc.logs import show_until_configured
from stratagem.tensorflow_names import no_attribute

# gRPC's fork handlers deadlock with forked DataLoader workers; set before grpc loads (docs/protocol.md 28).
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
# Names are looked up by the system, as for every other socket (docs/design/grpc.md); set before grpc loads too.
os.environ.setdefault("GRPC_DNS_RESOLVER", "native")

show_until_configured()

__version__ = "0.1.0"

_TENSORFLOW_ROOMS = ("distribute", "experimental", "cluster_resolver", "partitioners", "train", "estimator", "keras")
_get, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """A name of the public API; ``tf.distribute.experimental.partitioners.…`` and ``experimental_…`` are understood."""
    name = name.removeprefix("experimental_")
    if name not in (*_TENSORFLOW_ROOMS, *__all__):
        raise no_attribute(f"module {__name__!r}", name, __name__)
    return sys.modules[__name__] if name in _TENSORFLOW_ROOMS else _get(name)
