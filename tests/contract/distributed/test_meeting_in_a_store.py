"""How ranks find each other in a store, and what they are told when somebody does not come."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from stratagem.cluster.config import WorkerConfig
from stratagem.cluster.incarnation import Incarnation
from stratagem.distributed.forming import own_host
from stratagem.distributed.store_members import Rendezvous, StoreMembers
from stratagem.errors import ClusterTimeoutError, ConfigurationError, PeerUnavailableError
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.security import OPEN
from stratagem.worker.ring.lane_plan import RankInfo
from stratagem.worker.ring.ring_service import RingService

TASKS = ["worker:0", "worker:1", "worker:2"]


def test_who_is_missing_is_named() -> None:
    store = HashStore()
    store.set("0/words/0", "\n".join(["here", *TASKS]))
    with pytest.raises(ClusterTimeoutError, match=r"worker:2 did not find worker:1 in time .waiting for words"):
        Rendezvous(store, 2, TASKS, 0.05).exchange("words", "here")


def test_ranks_that_want_different_groups_are_told_at_once() -> None:
    """As with another WORLD_SIZE, on either side."""
    store = HashStore()

    def meet(tasks: list[str], rank: int) -> str:
        with pytest.raises(ConfigurationError) as refused:
            Rendezvous(store, rank, tasks, 30.0).exchange("words", "here")
        return str(refused.value)

    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(meet, (TASKS[:2], TASKS), (0, 1)))
    assert told[0].startswith("worker:0 wants a group of worker:0, worker:1, and rank 1 one of worker:0, worker:1, w")
    assert told[1].startswith("worker:1 wants a group of worker:0, worker:1, worker:2, and rank 0 one of worker:0, w")


def test_a_second_life_of_a_group_does_not_read_words_of_the_first() -> None:
    store = HashStore()

    def life(word: str) -> list[list[str]]:
        said: list[list[str]] = [[], []]

        def run(rank: int) -> None:
            said[rank] = Rendezvous(store, rank, TASKS[:2], 10.0).exchange("words", f"{word}{rank}")

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return said

    assert life("a") == [["a0", "a1"]] * 2
    assert life("b") == [["b0", "b1"]] * 2


def test_a_rank_that_is_asked_before_it_has_met_the_others_says_so() -> None:
    """Its server stands before it knows anybody."""
    members = StoreMembers(0, TASKS, OPEN)
    ring_service = RingService("127.0.0.1", lambda: members.membership, BytesMeter())
    with pytest.raises(PeerUnavailableError, match=r"worker:1 .* is not known here yet; ask again"):
        ring_service.meet(Incarnation("worker:1", 1), 1, 1, RankInfo("worker:1"))
    ring_service.close()


@pytest.mark.parametrize(
    ("bind", "environ", "host"),
    [
        ("127.0.0.1:0", {}, "127.0.0.1"),
        ("127.0.0.1:0", {"MASTER_ADDR": "localhost"}, "127.0.0.1"),
        ("10.1.2.3:0", {"MASTER_ADDR": "localhost"}, "10.1.2.3"),
        ("127.0.0.1:0", {"MASTER_ADDR": "no.such.host.invalid"}, "127.0.0.1"),
    ],
)
def test_where_a_rank_listens(bind: str, environ: dict[str, str], host: str) -> None:
    assert own_host(WorkerConfig(task="worker:0", bind=bind), environ) == host
