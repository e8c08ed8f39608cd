"""How ranks find each other in a store, and what they are told when somebody does not come."""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore
from torch.distributed import DistNetworkError

from stratagem.cluster.config import WorkerConfig
from stratagem.cluster.spec import ClusterSpec
from stratagem.cluster.task import Incarnation
from stratagem.distributed.forming import form, own_host
from stratagem.distributed.store_members import Rendezvous, StoreMembers
from stratagem.errors import ClusterTimeoutError, ConfigurationError, PeerUnavailableError, StratagemError
from stratagem.rpc.binding import free_port
from stratagem.rpc.host_id import own_host_id
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.security import OPEN
from stratagem.strategy.torchrun import with_addresses
from stratagem.worker.ring.building import Opener
from stratagem.worker.ring.lane_plan import RankInfo
from stratagem.worker.ring.ring_member import RingMember
from stratagem.worker.ring.ring_service import RingService
from tests.contract.distributed.ranks import on_every_rank, process_groups
from tests.polling import until

TASKS = ["worker:0", "worker:1", "worker:2"]


def test_who_is_missing_is_named() -> None:
    store = HashStore()

    def meet(rank: int) -> str:
        with pytest.raises(ClusterTimeoutError) as missing:
            Rendezvous(store, rank, TASKS, 1.0).exchange("words", "here")
        return str(missing.value)

    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(meet, (0, 2)))
    for rank, text in zip((0, 2), told, strict=True):
        assert text.startswith(f"worker:{rank} did not find worker:1 within 1 s, waiting for words. Did"), told
    with pytest.raises(ClusterTimeoutError, match=r"worker:2 did not find worker:0 within 0.05 s, waiting for rank 0"):
        Rendezvous(HashStore(), 2, TASKS, 0.05)


def test_who_is_missing_is_said_while_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("stratagem.distributed.store_members._TELL_S", 0.2)
    store = HashStore()

    def meet(rank: int) -> None:
        with pytest.raises(ClusterTimeoutError):
            Rendezvous(store, rank, TASKS, 3.0).exchange("words", "here")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(meet, (0, 2)))
    told = sorted(line.partition(", at most")[0] for line in caplog.messages)
    assert told == [f"worker:{rank} waits for worker:1 (words)" for rank in (0, 2)]


def test_a_rank_that_rank_0_does_not_want_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratagem.distributed.store_members._LEAD_S", 0.1)
    store = HashStore()
    assert Rendezvous(store, 0, TASKS[:1], 30.0).exchange("words", "alone") == ["alone"]
    with pytest.raises(ConfigurationError, match="worker:1 wants a group of worker:0, worker:1, and rank 0 one of w"):
        Rendezvous(store, 1, TASKS[:2], 30.0)


@pytest.mark.parametrize("came_before", [(0,), (1,), (0, 1), (0, 1, 2), (1, 2, 1)])
@pytest.mark.parametrize("is_late", [0, 2])
def test_ranks_that_came_before_and_died_or_gave_up_are_not_waited_for(
    came_before: tuple[int, ...], is_late: int
) -> None:
    """As where torchrun starts all ranks again, over the same store, because one died before it came."""
    store = HashStore()
    for rank in came_before:
        with contextlib.suppress(ClusterTimeoutError):
            Rendezvous(store, rank, TASKS, 0.02).exchange("words", "of before")

    def meet(rank: int) -> list[str]:
        time.sleep(0.1 * (rank == is_late))
        meeting = Rendezvous(store, rank, TASKS, 20.0)
        return meeting.exchange("words", f"here {rank}") + meeting.exchange("more", f"{rank}")

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(meet, range(3))) == [["here 0", "here 1", "here 2", "0", "1", "2"]] * 3


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


@pytest.mark.parametrize(("rank", "others", "their_rank"), [(1, ["worker:0", "worker:2"], 1), (0, ["worker:1"], 0)])
def test_groups_made_in_another_order_are_told_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, rank: int, others: list[str], their_rank: int
) -> None:
    """Torch numbers the groups of each rank: two that are not the same meet under one number."""
    for name in ("_TELL_S", "_LEAD_S"):
        monkeypatch.setattr(f"stratagem.distributed.store_members.{name}", 0.2)
    store, has_come, have_others = HashStore(), threading.Event(), threading.Event()

    class Watched(PrefixStore):
        def set(self, name: str, word: str) -> None:
            super().set(name, word)
            has_come.set()

        def wait(self, keys: list[str], *timeout: datetime.timedelta) -> None:
            have_others.wait(20.0)  # it looks once who else has come, and after that
            super().wait(keys, *timeout)

    with ThreadPoolExecutor(1) as pool:
        one = pool.submit(lambda: Rendezvous(Watched("1", store), rank, TASKS[:2], 60.0).exchange("words", "here"))
        assert has_come.wait(20.0)
        with contextlib.suppress(ClusterTimeoutError):
            Rendezvous(PrefixStore("1", store), their_rank, others, 0.05).exchange("words", "there")
        have_others.set()
        with pytest.raises(
            ConfigurationError, match=f"and rank {rank} one of {', '.join(others)}: .*in the same order"
        ):
            one.result(40.0)


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


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_of_a_group_that_has_formed_only_arrivals_stay_in_the_store(kind: str, tmp_path: Path) -> None:
    store = HashStore() if kind == "memory" else FileStore(str(tmp_path / "store"), 3)
    with ThreadPoolExecutor(3) as pool:
        groups = list(pool.map(lambda rank: form(store, rank, [0, 1, 2], 20.0), range(3)))
    num_keys = store.num_keys() - (kind == "file")  # it counts its processes by a key of its own
    for group in groups:
        group.shutdown()
    assert [store.check([f"arrival/{rank}"]) for rank in range(3)] == [True] * 3
    assert num_keys == 3


def test_a_rank_that_is_asked_before_it_has_met_the_others_says_so() -> None:
    """Its server stands before it knows anybody."""
    members = StoreMembers(0, TASKS, OPEN)
    ring_service = RingService("127.0.0.1", lambda: members.membership, BytesMeter())
    with pytest.raises(PeerUnavailableError, match=r"worker:1 .* is not known here yet; ask again"):
        ring_service.meet(Incarnation("worker:1", 1), 1, 1, RankInfo("worker:1"))
    ring_service.close()


def test_nobody_calls_a_rank_that_has_not_met_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 is late to learn addresses: rank 1 waits for it."""
    has_waited, store = threading.Event(), HashStore()

    class Late(PrefixStore):
        def get(self, key: str) -> bytes:
            if "the address" in key:
                has_waited.wait(2.0)
            return super().get(key)

    class Waiting(PrefixStore):
        def wait(self, keys: list[str], *timeout: datetime.timedelta) -> None:
            if any("knows the others/0" in key for key in keys):
                has_waited.set()
            super().wait(keys, *timeout)

    stores = (Late("group", store), Waiting("group", store))
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda rank: form(stores[rank], rank, [0, 1], 20.0), (0, 1)))
        for group in made:
            group.shutdown()
    assert not [line for line in caplog.messages if "refused" in line]


def test_ranks_of_two_torchruns_meet_though_these_count_restarts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one starts its ranks again because one failed there, the other because the first one did."""
    store = HashStore()
    monkeypatch.setattr("stratagem.strategy.torchrun.TCPStore", lambda *given, **named: store)
    cluster = ClusterSpec(worker=("127.0.0.1:1", "127.0.0.1:2"))

    def meet(rank: int) -> ClusterSpec:
        environ = {"RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(rank)}
        return with_addresses(cluster, WorkerConfig(task=f"worker:{rank}", start_timeout_s=5.0), environ)

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(meet, range(2))
    assert one == other and len(one.worker) == 2


class Ending(PrefixStore):
    """A store that is gone once the test says so: who waits for the other rank there ends, however late that was."""

    is_over = False

    def check(self, keys: list[str]) -> bool:
        if self.is_over:
            raise DistNetworkError("the test is over")
        return super().check(keys)

    def wait(self, keys: list[str], *timeout: datetime.timedelta) -> None:
        until(lambda: self.is_over or self.check(keys))


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("arrival/1", b"\xff\xfe", "worker:0 found '��' under 'arrival/1' in the store, which no rank writes there"),
        ("arrival/1", "x" * 5000, "Give this job a store, a MASTER_PORT or a path of its own"),
        ("its ranks/1", "other\0words\nworker:0\nworker:1", "its ranks/1' in the store, which no rank writes there"),
        ("its ranks/1", "é" * 16 + "\nworker:0\nworker:1", "its ranks/1' in the store, which no rank writes there"),
        (
            "the address/1",
            f"hello {own_host_id()}\nworker:0\nworker:1",
            "worker:1 has put no address into the store: expected an address like",
        ),
        ("the address/1", "", "worker:0 found '' under"),
    ],
    ids=["no text", "long", "signs", "no ASCII", "no address", "empty"],
)
def test_what_no_rank_wrote_is_refused(key: str, value: Any, told: str) -> None:
    class Altered(Ending):
        def set(self, name: str, word: Any) -> None:
            super().set(name, value if name.endswith(key) else word)

    store = HashStore()
    altered = Altered("group", store)
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(form, altered, 1, [0, 1], 20.0)
        with pytest.raises(ConfigurationError) as refused:
            form(PrefixStore("group", store), 0, [0, 1], 20.0)
        assert told in str(refused.value) and len(str(refused.value)) < 1000
        altered.is_over = True
        assert isinstance(other.exception(), StratagemError)


def test_a_call_that_rank_0_did_not_write_is_refused() -> None:
    class Altered(Ending):
        def set(self, name: str, word: Any) -> None:
            super().set(name, "elsewhere" if name.startswith("call of") else word)

    store = HashStore()
    altered = Altered("group", store)
    with ThreadPoolExecutor(1) as pool:
        lead = pool.submit(lambda: Rendezvous(altered, 0, TASKS[:2], 20.0).exchange("words", "here"))
        with pytest.raises(ConfigurationError, match="worker:1 found 'elsewhere' under 'call of "):
            Rendezvous(PrefixStore("group", store), 1, TASKS[:2], 20.0)
        altered.is_over = True
        assert isinstance(lead.exception(), ClusterTimeoutError)


def test_a_store_that_is_gone_is_named() -> None:
    class Gone(PrefixStore):
        def check(self, keys: list[str]) -> bool:
            raise DistNetworkError("Connection reset by peer")

    with pytest.raises(ClusterTimeoutError, match=r"worker:0 cannot read the store \(Connection reset by peer\), wait"):
        Rendezvous(Gone("group", HashStore()), 0, TASKS, 20.0).exchange("words", "here")


def test_a_rank_that_is_out_of_reach_is_named_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    form_ring = RingMember.form  # the time is for the lanes alone: until then the ranks come as late as they like
    monkeypatch.setattr(RingMember, "form", lambda member, options, device, _: form_ring(member, options, device, 0.5))
    address, store = f"127.0.0.1:{free_port('127.0.0.1')}", HashStore()

    class Altered(PrefixStore):
        def set(self, name: str, word: str) -> None:
            own = name.endswith("the address/0")
            super().set(name, f"{address} {own_host_id()}\nworker:0\nworker:1" if own else word)

    def meet(rank: int) -> str:
        with pytest.raises(ClusterTimeoutError) as late:
            form(Altered("group", store), rank, [0, 1], 20.0)
        return str(late.value)

    with ThreadPoolExecutor(2) as pool:
        for text in pool.map(meet, range(2)):
            assert text.endswith(f"Does every rank come to this point of the script, and can it reach {address}?")


@pytest.mark.parametrize("kind", ["closed", "swapped"])
def test_lanes_that_cannot_be_opened_do_not_outlast_the_timeout(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """What ended after 15 s, and with two addresses swapped after 90 s."""
    address, store = f"127.0.0.1:{free_port('127.0.0.1')}", HashStore()
    given_s: list[float] = []

    class Timed(Opener):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            given_s.append(self.deadline - time.monotonic())

    monkeypatch.setattr("stratagem.worker.ring.building.Opener", Timed)

    class Altered(PrefixStore):
        def set(self, name: str, word: str) -> None:
            if name.endswith("the address/1") and kind == "closed":
                word = f"{address} {own_host_id()}\nworker:0\nworker:1"
            if "the address/" in name and kind == "swapped":
                name = name[:-1] + str(1 - int(name[-1]))
            super().set(name, word)

    def meet(rank: int) -> None:
        with pytest.raises((PeerUnavailableError, ClusterTimeoutError), match="the ring did not form: "):
            form(Altered("group", store), rank, [0, 1], 3.0)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(meet, range(2)))
    assert len(given_s) >= 2 and max(given_s) <= 3.0, "no try of a lane is longer than the timeout"


@pytest.mark.parametrize("rank", [2, -3])
def test_a_rank_beyond_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ConfigurationError, match=f"there is no rank {rank} among 2: RANK goes from 0 to WORLD_SIZE"):
        form(HashStore(), rank, [0, 1], 5.0)


def test_no_time_to_meet_is_refused_in_the_words_of_torch() -> None:
    with pytest.raises(ConfigurationError, match=r"expected a timeout= above 0, got timedelta\(seconds=0\)"):
        form(HashStore(), 0, [0], 0.0)


def test_compression_is_refused_and_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_COMPRESSION", "topk")
    with pytest.raises(ConfigurationError, match=r"'topk' .*STRATAGEM_COMPRESSION\) is for the ring of a strategy"):
        form(HashStore(), 0, [0], 5.0)


def test_ranks_that_the_script_of_one_task_has_spawned_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_TASK", "worker:0")  # as `stratagem run`, `stratagem worker` and pods say
    with process_groups(2) as groups:
        assert on_every_rank(groups, lambda group: group.size()) == [2, 2]


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


def test_what_is_for_the_ring_of_a_strategy_alone_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STRATAGEM_BUCKET_BYTES", "100000")
    monkeypatch.setenv("STRATAGEM_COLLECTIVE_TIMEOUT_S", "77")
    for _ in range(2):
        form(HashStore(), 0, [0], 20.0).shutdown()
    bucket, timeout = [line for line in caplog.messages if "has no effect in a process group" in line]
    assert bucket.startswith("--bucket-bytes (STRATAGEM_BUCKET_BYTES) is for") and "bucket_cap_mb=" in bucket
    assert timeout.startswith("--collective-timeout-s (STRATAGEM_COLLECTIVE_TIMEOUT_S)") and "timeout=" in timeout
