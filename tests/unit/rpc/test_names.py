"""A host name means to gRPC what it means to the system."""

import subprocess
import sys

_SCRIPT = """
from concurrent import futures
import stratagem, grpc
from stratagem.rpc.channels import connect

server = grpc.server(futures.ThreadPoolExecutor(1))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with connect(f"127.1:{port}") as channel:  # 127.0.0.1 to the system; gRPC's own resolver asks a DNS server
    grpc.channel_ready_future(channel).result(timeout=20)
server.stop(0)
"""


def test_names_are_looked_up_by_the_system() -> None:
    subprocess.run([sys.executable, "-c", _SCRIPT], check=True, timeout=60)
