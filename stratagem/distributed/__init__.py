"""``torch.distributed`` over the ring's lanes: importing this registers the backend "stratagem".

    import stratagem.distributed
    torch.distributed.init_process_group("stratagem")

The rest of the script stays the same: DDP, FSDP, device meshes and plain collectives.
"""

from __future__ import annotations

import torch.distributed as dist

from stratagem.distributed.forming import make_process_group
from stratagem.distributed.process_group import LaneProcessGroup

__all__ = ["LaneProcessGroup"]

BACKEND = "stratagem"

# Torch 2.15 attaches a recorder of its own to what is not in this set, by a C++ backend that these groups do not have.
_self_recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
_self_recording.add(BACKEND)
dist.Backend.register_backend(BACKEND, make_process_group, extended_api=True, devices=["cpu", "cuda"])
