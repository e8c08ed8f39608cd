"""Hosts in network namespaces: they talk over links of a known rate, and nothing of them is left."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.collectives.loop import RankResult, SizeResult
from benchmarks.hosts import Host, HostsUnavailableError, distant_hosts, shaped_hosts, why_unavailable
from benchmarks.links import jobs
from benchmarks.links.cases import NotOverTheLinkError, bytes_to_send, check_crossed, link_cases

ROOT = Path(__file__).parents[3]
PROBE = f"stratagem-probe-{os.getpid()}"
TRIAL = f"""
ip netns add {PROBE} || exit 1
ip -netns {PROBE} link add switch type bridge && ip -netns {PROBE} link add one type veth peer name two &&
tc -netns {PROBE} qdisc add dev one root tbf rate 1mbit burst 32kb latency 20ms
result=$?
ip netns delete {PROBE}
exit $result
"""


@pytest.fixture(scope="module", autouse=True)
def allowed() -> None:
    """Skips where namespaces, veth, bridges or tbf are not to be had; found out without the code under test."""
    if reason := why_unavailable():
        pytest.skip(reason)
    trial = subprocess.run(["sh", "-c", TRIAL], capture_output=True, text=True, check=False)
    if trial.returncode:
        pytest.skip(f"no shaped links on this machine: {trial.stderr.strip()}")


def namespaces() -> set[str]:
    text = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in text.splitlines() if line.startswith("stratagem-")}


def interfaces() -> str:
    return subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout


def on(host: Host, *command: str) -> str:
    return subprocess.run(host.command(*command), capture_output=True, text=True, check=True).stdout


def test_hosts_reach_each_other_over_shaped_links_and_go_away() -> None:
    before, links = namespaces(), interfaces()
    with shaped_hosts(2, 50) as hosts:
        assert len(namespaces() - before) == 3
        assert interfaces() == links  # the machine's own network is not touched
        assert jobs.measure_goodput(hosts) > 0
        assert hosts[0].sent_bytes() > 1e6 and hosts[1].received_bytes() > 1e6
        assert hosts[1].sent_bytes() < 1e6  # acknowledgements alone
        for host in hosts:
            assert "rate 50Mbit" in on(host, "tc", "qdisc", "show", "dev", "eth0")
        with shaped_hosts(1, 50) as (third,):
            assert third.namespace not in {host.namespace for host in hosts}
    assert namespaces() == before


CONNECT = """
import socket, sys, time
begin = time.monotonic()
refused = socket.socket().connect_ex((sys.argv[1], 1))
print(refused, time.monotonic() - begin)
"""


@pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="no interfaces of a program's on this machine")
def test_distant_hosts_are_so_far_apart_and_go_away() -> None:
    before, links = namespaces(), interfaces()
    with distant_hosts(0.2) as (here, there):
        assert len(namespaces() - before) == 2 and interfaces() == links
        for host, other in ((here, there), (there, here), (here, here)):
            error, took_s = on(host, sys.executable, "-c", CONNECT, other.address).split()
            assert int(error) == errno.ECONNREFUSED and (host is other or float(took_s) >= 0.2)
    assert namespaces() == before


def test_an_error_leaves_nothing() -> None:
    before = namespaces()
    with pytest.raises(RuntimeError, match="in the middle"), shaped_hosts(1, 100):
        assert namespaces() != before
        raise RuntimeError("in the middle")
    assert namespaces() == before


def test_hosts_that_cannot_be_built_leave_nothing() -> None:
    before = namespaces()
    with pytest.raises(HostsUnavailableError, match="tbf"), shaped_hosts(1, 0):
        pytest.fail("a link without a rate was built")
    assert namespaces() == before


def test_sigterm_leaves_nothing() -> None:
    before = namespaces()
    code = (
        "import signal\n"
        "from benchmarks.hosts import shaped_hosts\n"
        "with shaped_hosts(1, 100) as hosts:\n"
        "    print(hosts[0].namespace, flush=True)\n"
        "    signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() in namespaces()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert namespaces() == before


def fake_ranks(num_iterations: int) -> list[RankResult]:
    sizes = [SizeResult(1000, num_iterations, median_s=0.001, cpu_s=0.0, checksum=1)]
    return [RankResult(sizes, {})] * 2


def test_bytes_that_have_to_cross() -> None:
    ranks = fake_ranks(num_iterations=10)
    assert bytes_to_send(ranks, "float32") == 15_000  # with three to warm up and two checked ones
    assert bytes_to_send(ranks, "bfloat16") == 7_500


def test_bytes_that_went_another_way_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    check_crossed(Host("a", "10.0.0.1"), 15_000, 15_000)

    def run(hosts: Sequence[Host], sizes: Sequence[int]) -> list[RankResult]:
        return fake_ranks(num_iterations=10)

    monkeypatch.setattr(jobs, "run_gloo", run)
    monkeypatch.setattr(jobs, "measure_goodput", lambda hosts: 1e7)
    (case,) = link_cases(100, 2, [1000], [], [], gloo=True)
    with pytest.raises(NotOverTheLinkError, match=r"at least 15,000 bytes each way over the link of stratagem-\d+-"):
        case.measure()


@pytest.mark.thorough
def test_an_all_reduce_over_links_is_measured() -> None:
    (case,) = link_cases(400, 2, [1 << 20], ["tcp"], ["bfloat16"], gloo=False)
    (sample,), versions = case.measure()
    assert list(case.identities[0]) == ["benchmark", "system", "lane", "wire", "rate_mbit", "n", "bytes"]
    assert set(sample) == {"median_s", "busbw_gbs", "of_goodput", "goodput_gbs"}
    assert all(sample.values())
    assert versions["stratagem"]


def test_rows_of_links() -> None:
    rows = [
        case.identities[0] for case in link_cases(100, 2, [1000], ["tcp", "grpc"], ["float32", "bfloat16"], gloo=True)
    ]
    assert [(row["system"], row["lane"], row["wire"]) for row in rows] == [
        ("stratagem", "tcp", "float32"),
        ("stratagem", "tcp", "bfloat16"),
        ("stratagem", "grpc", "float32"),
        ("stratagem", "grpc", "bfloat16"),
        ("gloo", "tcp", "float32"),
    ]
