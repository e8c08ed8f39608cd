"""A cluster of the ranks that torchrun started: they exchange addresses in the store of its agent."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from torch._C._distributed_c10d import PrefixStore, TCPStore

from stratagem.cluster.config import WorkerConfig
from stratagem.cluster.spec import ClusterSpec, join_address
from stratagem.distributed.forming import own_host
from stratagem.distributed.store_members import Rendezvous
from stratagem.errors import PeerUnavailableError
from stratagem.rpc.binding import free_port


def with_addresses(cluster: ClusterSpec, config: WorkerConfig, environ: Mapping[str, str]) -> ClusterSpec:
    """The cluster that these variables say, with addresses at which its workers reach each other; ``config`` is this
    worker's, by the cluster as they say it.

    The variables say one address, MASTER_ADDR:MASTER_PORT. Where a torchrun keeps a store there
    (TORCHELASTIC_USE_AGENT_STORE), worker 0 chooses another port for the chief, and all learn it from that store.
    Elsewhere the chief serves at that address; each worker listens where it reaches it from. Raises
    PeerUnavailableError: nobody answers at the store; ClusterTimeoutError: a rank does not come within
    ``start_timeout_s``.
    """
    rank, host = int(environ["RANK"]), own_host(config, environ)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        others = [join_address(host, 0) if index == rank else address for index, address in enumerate(cluster.worker)]
        return ClusterSpec(worker=(cluster.worker[0], *others[1:]))
    timeout = datetime.timedelta(seconds=config.start_timeout_s)
    try:
        store = TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    except RuntimeError as error:
        raise PeerUnavailableError(
            f"torchrun's store does not answer at {environ['MASTER_ADDR']}:{environ['MASTER_PORT']}: "
            f"{str(error).splitlines()[0]}"
        ) from None
    # Not by TORCHELASTIC_RESTART_COUNT: each machine's agent counts only what failed there.
    prefix = f"stratagem/{cluster.num_workers}"
    tasks = [f"worker:{index}" for index in range(cluster.num_workers)]
    meeting = Rendezvous(PrefixStore(prefix, store), rank, tasks, config.start_timeout_s)
    own = join_address(host, free_port(host) if rank == 0 else 0)
    return ClusterSpec(worker=tuple(meeting.exchange("the address", own)))
