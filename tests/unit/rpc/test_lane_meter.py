"""What is counted lane by lane, and what the kernel says about the links."""

from __future__ import annotations

import socket
import threading
import time

from stratagem.rpc.lane_meter import BytesMeter


def test_lanes_to_one_task_count_together_and_go_on_after_they_come_back() -> None:
    meter = BytesMeter()
    for _ in range(2):
        lane = meter.lane("ps:0", "tcp")
        lane.sent_bytes += 5
        lane.sent_frames += 1
    meter.lane("ps:1", "shm").received_bytes += 7
    values = meter.values()
    assert values["sent_bytes|ps:0/tcp"] == 10 and values["sent_frames|ps:0/tcp"] == 2
    assert values["received_bytes|ps:1/shm"] == 7 and "link_busy_s|ps:1/shm" not in values


def test_a_lane_that_is_taken_for_want_of_a_better_one_says_so_until_the_better_one_is_there() -> None:
    meter = BytesMeter()
    meter.chose("ps:0", "tcp", "it is on another host", "no shm lane: no room")
    assert meter.notes == {"lane|ps:0": "tcp, because it is on another host", "fallback|ps:0": "no shm lane: no room"}
    meter.chose("ps:0", "shm", "it is on this host")
    assert meter.notes == {"lane|ps:0": "shm, because it is on this host"}


def test_a_link_that_is_read_slowly_is_not_full() -> None:
    meter, stop = BytesMeter(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        meter.lane("worker:1", "tcp", sender)

        def send() -> None:
            sender.settimeout(0.05)
            while not stop.is_set():
                try:
                    sender.send(bytes(1 << 20))
                except TimeoutError:
                    continue

        writer = threading.Thread(target=send)
        writer.start()
        started = time.monotonic()
        time.sleep(0.5)  # nobody reads
        took_s = time.monotonic() - started
        values = meter.values()
        stop.set()
        writer.join()
        receiver.close()
    assert 0 < values["round_trip_s|worker:1/tcp"] < 1.0
    assert values["link_busy_s|worker:1/tcp"] < 0.5 * took_s, "the other end had no room"
