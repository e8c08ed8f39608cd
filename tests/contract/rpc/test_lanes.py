"""One suite for every lane: what is sent arrives, in order, whatever the size; a lane that ends says so."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from stratagem.errors import FrameError, JobStoppedError, LimitError, PeerUnavailableError
from stratagem.measuring import measures
from stratagem.rpc import channels
from stratagem.rpc.generated import frame_pb2
from stratagem.rpc.grpc_lane import EXCHANGE_METHOD, GrpcLane, ServedGrpcLane
from stratagem.rpc.lane import ReceivingLane, SendingLane, nothing
from stratagem.rpc.lane_listener import LaneListener, connect_lane
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.lent_slots import RELEASE, Lender
from stratagem.rpc.security import OPEN, Security
from stratagem.rpc.shm_lane import ShmSender
from stratagem.rpc.shm_receiver import ShmReceiver
from stratagem.rpc.slots import ShmBlock, SlotPool
from stratagem.rpc.striped_lane import StripedReceiver, StripedSender
from stratagem.rpc.tcp_lane import TcpReceiver, TcpSender
from tests import forks
from tests.contract.rpc.securities import make_certificates, with_tls

KIND = frame_pb2.COLLECTIVE
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


@dataclasses.dataclass
class Pair:
    sender: SendingLane
    receiver: ReceivingLane
    sent: BytesMeter
    received: BytesMeter


@contextlib.contextmanager
def tcp_pair(tls: bool = False) -> Iterator[Pair]:
    server = client = OPEN
    with tempfile.TemporaryDirectory() as folder:
        if tls:
            make_certificates(Path(folder), "worker:0", "worker:1")
            server, client = with_tls(Path(folder), "worker:1"), with_tls(Path(folder), "worker:0")
        yield from _tcp_pair(server, client)


def _tcp_pair(server: Security, client: Security) -> Iterator[Pair]:
    listener = LaneListener("127.0.0.1", server)
    try:
        ticket = listener.expect("peer", "tcp", "worker:0")
        outward = connect_lane(ticket, "127.0.0.1", soon(), "worker:1", client)
        sent, received = BytesMeter(), BytesMeter()
        pair = Pair(
            TcpSender(outward, "b", sent), TcpReceiver(listener.wait("peer", soon()), "a", received), sent, received
        )
    finally:
        listener.close()
    yield from closing(pair)


@contextlib.contextmanager
def grpc_pair() -> Iterator[Pair]:
    sent, received = BytesMeter(), BytesMeter()
    receiver = ServedGrpcLane("a", received)

    def exchange(messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        receiver.serve(messages, context.cancel)
        yield from ()

    pool = futures.ThreadPoolExecutor(2)
    server = grpc.server(pool, options=[("grpc.max_receive_message_length", -1)])
    handlers = {"Exchange": grpc.stream_stream_rpc_method_handler(exchange)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("stratagem.Worker", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    channel = channels.connect(f"127.0.0.1:{port}")
    try:
        yield from closing(
            Pair(GrpcLane(channel, EXCHANGE_METHOD, (), "b", sent, linger_s=10.0), receiver, sent, received)
        )
    finally:
        channel.close()
        server.stop(0).wait()
        pool.shutdown()


@contextlib.contextmanager
def striped_pair() -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(tcp_pair()) for _ in range(3)]
        sender = StripedSender([pair.sender for pair in pairs])
        yield Pair(sender, StripedReceiver([pair.receiver for pair in pairs]), pairs[0].sent, pairs[0].received)


def closing(pair: Pair) -> Iterator[Pair]:
    try:
        yield pair
    finally:
        pair.sender.close("the test is over")
        pair.receiver.close("the test is over")


@contextlib.contextmanager
def shm_pair() -> Iterator[Pair]:
    outward, inward = socket.socketpair()
    sent, received = BytesMeter(), BytesMeter()
    yield from closing(
        Pair(ShmSender(outward, "b", sent, lambda: 96 << 20), ShmReceiver(inward, "a", received), sent, received)
    )


PAIRS: dict[str, Callable[[], contextlib.AbstractContextManager[Pair]]] = {
    "tcp": tcp_pair,
    "tcp with TLS": lambda: tcp_pair(tls=True),
    "grpc": grpc_pair,
    "shm": shm_pair,
    "three tcp stripes": striped_pair,
}


@pytest.fixture(params=list(PAIRS))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with PAIRS[request.param]() as made:
        yield made


def send(pair: Pair, tensor: torch.Tensor, transfer: int = 1, offset: int = 0) -> None:
    pair.sender.send(KIND, transfer, 7, offset, lambda: [tensor], tensor.numel())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_elements", [0, 1, 1000, 300_000])
def test_elements_arrive(pair: Pair, dtype: torch.dtype, num_elements: int) -> None:
    tensor = (torch.arange(num_elements) % 2 if dtype is torch.bool else torch.arange(num_elements) % 100).to(dtype)
    send(pair, tensor, transfer=3, offset=11)
    frame = pair.receiver.receive(3, soon())
    assert (frame.kind, frame.transfer, frame.group, frame.offset) == (KIND, 3, 7, 11)
    assert torch.equal(frame.tensor.view(-1), tensor) or not num_elements


def test_many_frames_keep_their_order(pair: Pair) -> None:
    tensors = [torch.full((size,), float(index)) for index, size in enumerate([1, 70_000, 3, 0, 40_000, 5] * 5)]

    def send_all() -> None:
        for index, tensor in enumerate(tensors):
            send(pair, tensor, 1, index)

    sending = threading.Thread(target=send_all)
    sending.start()
    for index, tensor in enumerate(tensors):
        frame = pair.receiver.receive(0, soon())
        assert frame.offset == index
        assert torch.equal(frame.tensor.view(-1), tensor)
    sending.join()


@pytest.mark.parametrize("sizes", [(5, 100_000, 1), (3,) * 2_000, (50, 300_000, *(2,) * 3_000)], ids=len)
def test_several_pieces_are_one_payload(pair: Pair, sizes: tuple[int, ...]) -> None:
    """Also more than one call of the kernel takes."""
    pieces = [torch.arange(float(size)) for size in sizes]
    pair.sender.send(KIND, 1, 0, 0, lambda: pieces, sum(piece.numel() for piece in pieces))
    assert torch.equal(pair.receiver.receive(1, soon()).tensor, torch.cat(pieces))


def test_payload_goes_into_the_memory_given_where_the_lane_can(pair: Pair) -> None:
    into = torch.zeros(100_000)
    send(pair, torch.arange(90_000.0))
    frame = pair.receiver.receive(1, soon(), into=into)
    assert torch.equal(frame.tensor, torch.arange(90_000.0))
    if pair.receiver.name == "tcp":
        assert frame.tensor.data_ptr() == into.data_ptr()


def test_a_place_is_asked_for_each_frame_of_the_transfer_once_its_header_is_here() -> None:
    into, asked = torch.zeros(10), []

    def place(*of: int) -> torch.Tensor | None:
        asked.append(of)
        return into if of[2] == 0 else None

    with tcp_pair() as pair:
        for transfer, offset in ((7, 0), (1, 0), (1, 10)):
            pair.sender.send(KIND, transfer, 3, offset, lambda: (torch.arange(10.0),), 10)
        receiver = pair.receiver
        assert isinstance(receiver, TcpReceiver)
        first, second = (receiver.receive(1, soon(), place) for _ in range(2))
        assert first.tensor is into and asked == [(KIND, 3, 0, 10), (KIND, 3, 10, 10)]
        assert second.offset == 10 and torch.equal(second.tensor, torch.arange(10.0))
        into.zero_()
        assert torch.equal(receiver.receive(7, soon(), place).tensor, torch.arange(10.0)) and not into.any()


def test_memory_is_free_after_a_flush(pair: Pair) -> None:
    tensor = torch.ones(200_000)
    for _ in range(8):
        tensor.fill_(1.0)
        seen: list[torch.Tensor] = []

        def receive(seen: list[torch.Tensor] = seen) -> None:
            seen.append(pair.receiver.receive(0, soon()).tensor.clone())

        receiving = threading.Thread(target=receive)
        receiving.start()
        send(pair, tensor)
        pair.sender.flush(soon())
        tensor.fill_(-1.0)
        receiving.join()
        assert bool((seen[0] == 1.0).all())


def test_what_was_flushed_arrives_though_the_sender_closes(pair: Pair) -> None:
    tensor = torch.arange(2_000_000.0)
    with futures.ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(lambda: pair.receiver.receive(0, soon()).tensor.clone())
        send(pair, tensor)
        pair.sender.flush(soon())
        pair.sender.close("enough")
        assert torch.equal(receiving.result(), tensor)


def test_a_sender_that_closes_ends_the_receiver(pair: Pair) -> None:
    send(pair, torch.ones(3))
    pair.receiver.receive(0, soon())
    pair.sender.close("enough")
    assert not pair.sender.alive
    with pytest.raises(PeerUnavailableError):
        pair.receiver.receive(0, soon())
    with pytest.raises(PeerUnavailableError, match="enough"):
        send(pair, torch.ones(3))


def test_closing_wakes_a_receiver_that_waits(pair: Pair) -> None:
    errors: list[BaseException] = []

    def receive() -> None:
        try:
            pair.receiver.receive(0, soon(60))
        except PeerUnavailableError as error:
            errors.append(error)

    waiting = threading.Thread(target=receive)
    waiting.start()
    pair.receiver.close("stop waiting")
    waiting.join(30)
    assert not waiting.is_alive()
    assert "stop waiting" in str(errors[0])


def test_a_receiver_that_closes_ends_the_sender(pair: Pair) -> None:
    pair.receiver.close("gone")
    deadline = soon()
    with pytest.raises(PeerUnavailableError):
        while time.monotonic() < deadline:
            send(pair, torch.ones(100_000))
            pair.sender.flush(deadline)


def test_silence_ends_at_the_deadline(pair: Pair) -> None:
    with pytest.raises(PeerUnavailableError, match="in time"):
        pair.receiver.receive(1, soon(0.05))


def test_frames_of_other_transfers_wait_or_are_forgotten() -> None:
    for make in (tcp_pair, grpc_pair, shm_pair):
        with make() as pair:
            for transfer in (1, 2, 3):
                send(pair, torch.full((2,), float(transfer)), transfer)
            assert float(pair.receiver.receive(2, soon()).tensor[0]) == 2
            pair.receiver.forget(2)
            assert pair.receiver.receive(0, soon()).transfer == 3


def test_a_frame_that_does_not_fit_is_refused() -> None:
    for payload, into in ((torch.ones(10), torch.zeros(9)), (torch.ones(10), torch.zeros(10, dtype=torch.float64))):
        with tcp_pair() as pair:
            send(pair, payload)
            with pytest.raises(FrameError, match="expected"):
                pair.receiver.receive(1, soon(), into=into)


def test_bytes_that_are_no_frame_are_refused() -> None:
    ours, theirs = socket.socketpair()
    receiver = TcpReceiver(ours, "somebody", BytesMeter())
    theirs.sendall(b"GET / HTTP/1.1\r\nHost: example.invalid\r\n\r\n" + bytes(40))
    with pytest.raises(FrameError):
        receiver.receive(0, soon())
    receiver.close("done")
    theirs.close()


@pytest.mark.parametrize("tls", [False, True])
def test_frames_that_come_together_are_told_apart(tls: bool) -> None:
    sizes = [1, 0, 1000, 1018, 1019, 1020, 3, 100_000, 5, 2048, 0]  # 1,019 int64 fill what is read ahead
    payloads = [torch.full((size,), place) for place, size in enumerate(sizes)]
    with tcp_pair(tls) as pair:
        assert isinstance(pair.sender, TcpSender) and isinstance(pair.receiver, TcpReceiver)
        with pair.sender.corked():
            for place, payload in enumerate(payloads):
                send(pair, payload, transfer=place + 1)
        for place, payload in enumerate(payloads):
            assert pair.receiver.readable or tls or place not in (1, 2, 3)  # these were read with the first one
            frame = pair.receiver.receive(0, soon(), torch.zeros_like(payload) if place % 2 else None)
            assert frame.transfer == place + 1
            assert torch.equal(frame.tensor.long(), payload)
        assert not pair.receiver.readable


def test_bytes_are_counted(pair: Pair) -> None:
    send(pair, torch.zeros(1 << 18))
    pair.receiver.receive(1, soon())
    pair.sender.flush(soon())
    assert 1 << 20 <= _total(pair.sent, measures.SENT) < (1 << 20) + 4096
    assert 1 << 20 <= _total(pair.received, measures.RECEIVED) < (1 << 20) + 4096


def test_shared_slots_come_back_when_the_last_view_goes() -> None:
    with shm_pair() as pair:
        for round_number in range(100):  # 400 MB through at most 96: slots must come back
            send(pair, torch.full((1 << 20,), float(round_number)))
            frame = pair.receiver.receive(0, soon())
            half = frame.tensor[: 1 << 19]
            del frame
            assert float(half[-1]) == round_number
            del half


def test_a_shared_slot_is_not_reused_while_somebody_looks_at_it() -> None:
    with shm_pair() as pair:
        kept = []
        for number in range(12):
            send(pair, torch.full((1 << 20,), float(number)))
            kept.append(pair.receiver.receive(0, soon()).tensor[5:])
        assert [float(view[0]) for view in kept] == [float(number) for number in range(12)]


def test_an_impatient_sender_gives_up_a_reader_that_holds_everything() -> None:
    outward, inward = socket.socketpair()
    sender = ShmSender(outward, "b", BytesMeter(), lambda: 40 << 20, patient=False)
    receiver = ShmReceiver(inward, "a", BytesMeter())
    kept = []
    with pytest.raises(LimitError, match="unread"):
        for _ in range(30):
            sender.send(KIND, 1, 0, 0, lambda: [torch.ones(1 << 20)], 1 << 20)
            kept.append(receiver.receive(0, soon()))
    assert len(kept) >= 8
    sender.close("done")
    receiver.close("done")


@pytest.mark.parametrize("make", [tcp_pair, lambda: tcp_pair(tls=True), shm_pair], ids=["tcp", "tcp with TLS", "shm"])
def test_corked_frames_leave_at_the_end_in_their_order(make: Any) -> None:
    with make() as pair:
        sizes = [3, 1000, 5, 400_000, 7, 20_000, 2]  # in the last of which nothing but the end of the block sends
        with pair.sender.corked():
            send(pair, torch.ones(3), offset=1)
            assert not pair.receiver.readable
            for number, size in enumerate(sizes):
                send(pair, torch.full((size,), float(number)))
        assert pair.receiver.receive(0, soon()).offset == 1
        for number, size in enumerate(sizes):
            assert torch.equal(pair.receiver.receive(0, soon()).tensor, torch.full((size,), float(number)))


def test_a_small_frame_over_a_socket_that_another_thread_has_closed_is_the_end_of_the_lane() -> None:
    outward, inward = socket.socketpair()
    sender = ShmSender(outward, "b", BytesMeter(), lambda: 40 << 20, patient=False)
    outward.close()  # as close() does while a thread of the ps is about to answer
    with inward, pytest.raises(PeerUnavailableError, match="the lane to b broke"):
        sender.send(KIND, 1, 0, 0, lambda: [torch.ones(4)], 4)
    sender.close("the test is over")


def test_an_impatient_sender_never_waits_for_who_does_not_read_small_frames() -> None:
    outward, inward = socket.socketpair()
    sender = ShmSender(outward, "b", BytesMeter(), lambda: 40 << 20, patient=False)
    receiver = ShmReceiver(inward, "a", BytesMeter())
    for number in range(60):  # 1.4 MB, in a socket that takes a fraction of it
        sender.send(KIND, 1, 0, 0, lambda number=number: [torch.full((6000,), float(number))], 6000)  # type: ignore[misc]
    for number in range(60):
        assert torch.equal(receiver.receive(0, soon()).tensor, torch.full((6000,), float(number)))
    sender.close("done")
    receiver.close("done")


@pytest.mark.usefixtures("preloaded")
@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_forked_children_neither_hold_a_lane_open_nor_speak_on_it(kind: str) -> None:
    script = Path(__file__).with_name("forked.py")
    environment = {**os.environ, "PYTHONPATH": str(script.parents[3])}
    done = forks.run([sys.executable, script, kind], env=environment, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_receiver_that_lets_go_of_many_frames_at_once_does_not_wait_for_the_sender() -> None:
    """As a ps does with a gradient that it has applied: the sender listens again when it has another one."""
    with shm_pair() as pair:
        kept = []
        for number in range(600):  # more words than a socket takes
            send(pair, torch.full((10_000,), float(number)))
            kept.append(pair.receiver.receive(0, soon()).tensor)
        letting_go = threading.Thread(target=kept.clear, daemon=True)
        letting_go.start()
        letting_go.join(30)
        assert not letting_go.is_alive()
        for number in range(600):
            send(pair, torch.full((10_000,), float(number)))
            assert float(pair.receiver.receive(0, soon()).tensor[-1]) == number


@contextlib.contextmanager
def lending_pair(
    pool: SlotPool, keeps: bool, max_bytes: int = 1 << 40, on_wait: Callable[[], None] = nothing
) -> Iterator[Pair]:
    """The receiver lends the memory of large frames."""
    outward, inward = socket.socketpair()
    sent, received = BytesMeter(), BytesMeter()
    sender = ShmSender(outward, "b", sent, lambda: 1 << 40, on_wait=on_wait)
    lender = Lender(pool, lambda: keeps, lambda: max_bytes)
    yield from closing(Pair(sender, ShmReceiver(inward, "a", received, lender=lender), sent, received))


@pytest.mark.parametrize("keeps", [True, False])
def test_slots_that_the_receiver_lends_are_used_again_by_whoever_sends(keeps: bool) -> None:
    """400 MB over two lanes, of which the pool has a few slots each: looked at, on their way back, asked for ahead."""
    pool = SlotPool()
    with lending_pair(pool, keeps) as one, lending_pair(pool, keeps) as other, ThreadPoolExecutor(1) as thread:
        for number in range(50):
            for pair in (one, other):
                sending = thread.submit(send, pair, torch.full((1 << 20,), float(number)))
                frame = pair.receiver.receive(0, soon())
                assert torch.equal(frame.tensor, torch.full((1 << 20,), float(number)))
                del frame
                sending.result()
        thread.submit(send, one, torch.ones(3)).result()
        assert one.receiver.receive(0, soon()).tensor.tolist() == [1.0, 1.0, 1.0]
        assert sum(segment.tensor.numel() for segment in pool.segments) <= 2 * 6 * 4 << 20
    pool.close()


def test_corked_frames_leave_before_their_sender_waits_for_a_slot() -> None:
    pool = SlotPool()
    with lending_pair(pool, False) as pair, ThreadPoolExecutor(1) as thread:

        def send_all() -> None:
            sender: Any = pair.sender
            with sender.corked():
                for number in range(6):
                    send(pair, torch.full((1 << 20 if number % 2 else 4,), float(number)))

        sending = thread.submit(send_all)
        assert [float(pair.receiver.receive(0, soon()).tensor[-1]) for _ in range(6)] == [0, 1, 2, 3, 4, 5]
        sending.result()
    pool.close()


def test_a_sender_that_waits_for_a_slot_ends_with_the_lane_and_with_the_job() -> None:
    pool = SlotPool()
    with lending_pair(pool, False) as pair, ThreadPoolExecutor(1) as thread:
        sending = thread.submit(send, pair, torch.ones(1 << 20))
        pair.receiver.close("the test is over")
        with pytest.raises(PeerUnavailableError, match="the lane to b broke"):
            sending.result(30)

    def stop() -> None:
        raise JobStoppedError("the job has ended", 0)

    with lending_pair(pool, False, on_wait=stop) as pair, pytest.raises(JobStoppedError, match="has ended"):
        send(pair, torch.ones(1 << 20))
    pool.close()


def test_a_slot_that_is_not_lent_and_more_slots_than_may_be_lent_are_refused() -> None:
    pool = SlotPool()
    with lending_pair(pool, False) as pair:
        block = ShmBlock(7, 0, 0, 1 << 20, torch.zeros(1 << 20, dtype=torch.uint8), is_borrowed=True)
        sender: Any = pair.sender
        sender.send_slot(KIND, 1, 0, 0, torch.ones(4), block)
        with pytest.raises(FrameError, match="slot 7, which is not lent"):
            pair.receiver.receive(0, soon())
    with lending_pair(pool, False, max_bytes=5 << 20) as pair, ThreadPoolExecutor(1) as thread:
        sender = pair.sender
        for _ in range(2):
            thread.submit(sender.room, 1 << 20, torch.float32)
        with pytest.raises(LimitError, match="lent and not used"):
            pair.receiver.receive(0, soon())
        pair.receiver.close("it asks for too much")
    pool.close()


def test_a_descriptor_that_comes_with_what_cannot_be_understood_is_closed() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        sender = ShmSender(ours, "b", BytesMeter(), lambda: 1 << 20)
        socket.send_fds(theirs, [RELEASE.pack(99)], [theirs.fileno()])
        before = len(os.listdir("/proc/self/fd"))
        sender.collect()
        assert not sender.alive and len(os.listdir("/proc/self/fd")) == before
        sender.close("it was not understood")


def _total(meter: BytesMeter, name: str) -> float:
    return sum(measures.labels(meter.values(), name).values())
