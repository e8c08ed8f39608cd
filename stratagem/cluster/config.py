"""Configuration of each role: frozen, strict, unknown keys refused. No I/O.

The order of sources is flag > environment > YAML > default; :mod:`stratagem.cluster.sources` applies it.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Literal

import pydantic

from stratagem.arguments import told_path
from stratagem.cluster.choice import StrategyOrAuto
from stratagem.cluster.communication import CommunicationOptions, Compression, Transport, WireDType
from stratagem.cluster.spec import split_address

MAX_COUNT = 1 << 30
"""gRPC has 32 bits for a number, and we double some."""
MAX_TASKS = 1_000_000
"""Of a type: an index has six digits."""


class RoleConfig(pydantic.BaseModel):
    """What every role has in common."""

    model_config = pydantic.ConfigDict(frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True)

    task: str
    """Task id, for example "ps:0"."""
    bind: str = "127.0.0.1:0"
    """host:port to listen on; port 0 picks a free one and prints it."""
    chief: str = ""
    """host:port of the chief. Of several, separated by ",", one serves and the others stand by; file:PATH names
    the file chief.address in the chief's state_dir. Empty only for the chief itself."""
    insecure: bool = False
    """Listen beyond loopback without TLS, send the token unencrypted, and let NCCL bypass TLS."""
    tls: str = ""
    """Folder with ca.crt and this task's certificate and key (`stratagem certs` makes them); empty: no TLS."""
    token_file: str = ""
    """File with a token by which the tasks of the job authenticate each other; empty: none."""
    log_format: Literal["text", "json"] = "text"
    """Format of the log lines on stderr."""
    start_timeout_s: float = pydantic.Field(default=300.0, gt=0)
    """Seconds to wait for the whole cluster to come up, once one of its tasks is there."""
    checkpoint_dir: str = ""
    """Where the chief commits checkpoints and every ps reads and writes its part; a task that comes too late finds the
    end of the job there. Empty: only requests that name a directory."""
    run_id: str = ""
    """Name that the supervisor gives this run, for example the uid of a Kubernetes Job. A task that has ended well in
    one, and is started in it again (its pod was deleted while it ended), ends at once, which needs checkpoint_dir. A
    script that fails in one before anybody has made a step ends with 42: it is not to be tried again."""

    @pydantic.field_validator("checkpoint_dir", "tls", "token_file")
    @classmethod
    def _from_here(cls, path: str) -> str:
        """Also when the script has changed the current folder."""
        return os.path.abspath(path) if path else path

    @pydantic.field_validator("bind", "advertise", "metrics_bind", "web", check_fields=False)
    @classmethod
    def _is_address(cls, address: str) -> str:
        if address:
            split_address(address)
        return address


class ServerConfig(RoleConfig):
    """A role that others call: under which address, and what it refuses to exceed."""

    advertise: str = ""
    """host:port that others are told, if it differs from what this task listens on: a container listens on 0.0.0.0, a
    port may be mapped. Port 0 stands for the one really bound. Empty: the task's address in the cluster, without a
    cluster the one it listens on."""
    max_message_bytes: int = pydantic.Field(default=64 << 20, ge=1 << 16, le=MAX_COUNT)
    """Largest gRPC message accepted, in bytes. Payload travels in frames (a worker's frame_bytes)."""
    max_connections: int = pydantic.Field(default=16384, ge=1, le=MAX_COUNT)
    """gRPC connections at once; a further one is closed. A worker has up to three."""
    max_calls: int = pydantic.Field(default=2048, ge=1, le=MAX_COUNT)
    """Calls at once, a stream is one; in a worker and a ps each has a thread. A worker has two or three at a chief or
    a ps, and one at the worker of rank 0 while a ring forms."""
    max_calls_per_peer: int = pydantic.Field(default=64, ge=1, le=MAX_COUNT)
    """Calls at once of one peer: of one certificate's owner, without TLS of one connection. A worker has fewer than
    ten."""
    max_ids_per_request: int = pydantic.Field(default=1 << 20, ge=1)
    """Entries of all lists of one request: units, variables, groups."""
    checkpoint_roots: str = ""
    """Folders, with ":" between them, in which a request may name a place for a checkpoint; checkpoint_dir is one
    without being named. Chief and ps need the same. A worker tells the chief that it starts itself."""


class MemberConfig(RoleConfig):
    """A role that is no chief, and computes."""

    num_threads: int = pydantic.Field(default=1, ge=1)
    """Intra-op threads of torch; 1 because several processes usually share a machine."""
    peer_timeout_s: float = pydantic.Field(default=60.0, gt=0)
    """Seconds to wait for a peer that restarts, before giving up with an error that names it."""


class LaneConfig(ServerConfig, MemberConfig):
    """A role that opens lanes for others."""

    max_lanes_per_peer: int = pydantic.Field(default=128, ge=1)
    """Lanes of one task that are requested and not open yet. A ring needs one per stripe, and a few more."""


class ChiefConfig(ServerConfig):
    """What a chief is told: whom it waits for and how long, what it saves where."""

    task: str = "chief:0"
    """Task id."""
    num_workers: int = pydantic.Field(ge=1, le=MAX_TASKS)
    """Workers in the cluster; the job starts when all have joined."""
    max_workers: int = pydantic.Field(default=0, ge=0)
    """Most workers that the job admits, while it runs too; 0: num_workers. For a ring with min_workers, and for
    parameter servers with a staleness above 0: steps of others are cut for num_workers, and refuse those who come in
    addition."""
    min_workers: int = pydantic.Field(default=0, ge=0)
    """Workers that a ring needs to continue while others are lost, and to admit newcomers; 0: a ring is as large as
    it started. Not for parameter servers, whose workers come and go anyway."""
    num_ps: int = pydantic.Field(default=0, ge=0, le=MAX_TASKS)
    """Parameter servers in the cluster."""
    max_ps: int = pydantic.Field(default=0, ge=0, le=1024)
    """Most parameter servers: newcomers are admitted while the job runs, and the last ones released on SIGTERM; 0:
    their number is what `stratagem scale` says. For a staleness above 0."""
    ps_replicas: int = pydantic.Field(default=1, ge=1, le=2)
    """Copies of what each ps holds. 2: another ps has everything that a ps acknowledges, so that nothing is lost when a
    ps dies. For a staleness above 0, and two ps or more."""
    state_dir: str = ""
    """Directory of the journal; empty keeps none: then a restarted chief starts a new job. Its file chief.address says
    where the chief serves."""
    standby: bool = False
    """Wait while another chief holds the journal in state_dir, and take over its job when that one is lost."""
    checkpoint_every_s: float = pydantic.Field(default=0.0, ge=0)
    """Seconds between checkpoints that the chief takes by itself; 0: none beyond the first and those requested."""
    keep_checkpoints: int = pydantic.Field(default=3, ge=1)
    """Complete checkpoints to keep in checkpoint_dir; older ones that the chief made itself are removed."""
    checkpoints_stay: bool = True
    """Whether checkpoint_dir outlives the job; else it is done well though its last checkpoint could not be written."""
    heartbeat_interval_s: float = pydantic.Field(default=0.5, gt=0)
    """Seconds between heartbeats; less than session_timeout_s."""
    session_timeout_s: float = pydantic.Field(default=6.0, gt=0)
    """Seconds of silence after which a session is lost."""
    session_grace_s: float = pydantic.Field(default=3.0, ge=0)
    """Seconds within which a task whose connection to the chief broke may reconnect as if nothing had happened; less
    when its address refuses connections or a new process joins in its place."""
    worker_timeout_s: float = pydantic.Field(default=60.0, gt=0)
    """Seconds a lost task may stay away before the job is stopped."""
    seed: int = pydantic.Field(default=0, ge=0, lt=1 << 64)
    """Seed of the permutations of the data."""
    metrics_bind: str = ""
    """host:port to serve Prometheus metrics on, at /metrics; empty: none. The rule of bind holds: beyond loopback with
    TLS or insecure only."""
    web: str = ""
    """host:port to serve the page of the job on; empty: none. The rule of bind holds."""

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> ChiefConfig:
        if not self.heartbeat_interval_s < self.session_timeout_s:
            raise ValueError(
                f"heartbeat_interval_s {self.heartbeat_interval_s:g} has to be less than session_timeout_s "
                f"{self.session_timeout_s:g}, the silence after which a task is lost"
            )
        if self.checkpoint_every_s and self.num_ps and not self.checkpoint_dir:
            raise ValueError(
                f"checkpoint_every_s {self.checkpoint_every_s:g} needs a place for the checkpoints: give the chief and "
                "every ps the same checkpoint_dir"
            )
        if self.num_ps:
            told_path(self.checkpoint_dir)
        if self.ps_replicas > max(1, self.num_ps):
            raise ValueError(
                f"ps_replicas {self.ps_replicas} needs as many ps: the copy of a ps is kept on another, and num_ps is "
                f"{self.num_ps}"
            )
        if self.max_connections < self.num_workers + self.num_ps + 2:
            raise ValueError(
                f"max_connections {self.max_connections} is too few: each of {self.num_workers} workers and "
                f"{self.num_ps} ps keeps one, and so do the launcher and an evaluator. Give more"
            )
        if self.standby and not self.state_dir:
            raise ValueError("a standby chief takes over from a journal: give both chiefs the same state_dir")
        return self


class PsConfig(LaneConfig):
    transport: Literal["auto", "grpc", "tcp", "shm"] = "auto"
    """Lane to the ps whose copy this one keeps. auto: shm inside a host and tcp between hosts."""
    max_variables: int = pydantic.Field(default=100_000, ge=1)
    """Largest number of shards held."""
    max_store_bytes: int = pydantic.Field(default=0, ge=0)
    """Largest size of variables and slots, in bytes; 0: what this machine, its control group and ``ulimit -v`` have
    free when the ps starts."""
    max_peer_bytes: int = pydantic.Field(default=0, ge=0)
    """Bytes that one worker may have staged here, and as many that may wait for it unread; 0: 64 MiB and four times
    what is held."""
    max_peers: int = pydantic.Field(default=4096, ge=1)
    """Incarnations of workers that this ps remembers at once; a fence makes room."""


class WorkerConfig(LaneConfig):
    """A worker: the connection its script makes."""

    frame_bytes: int = pydantic.Field(default=4 << 20, ge=1 << 10)
    """Payload bytes of one frame. Measured with a 25 M parameter MLP, CPU-seconds a step: 0.56 at 256 KiB, 0.46 at
    1 MiB, 0.42 at 4 MiB; larger ones gain little and leave less to overlap."""
    strategy: StrategyOrAuto = "auto"
    """Strategy that ``strategy_from_environment`` builds."""
    devices: str = ""
    """Devices of the replicas of this process, for example "cuda:0,cuda:1" or (logical ones) "cpu:0,cpu:1"; empty: its
    part of the GPUs of the host, else one CPU."""
    transport: Transport = "auto"
    """Lane to other workers and to ps. auto: shm inside a host, tcp between hosts, grpc where neither works; nccl in a
    ring whose workers have a GPU each."""
    wire_dtype: WireDType = "float32"
    """Element type of float32 gradients of a ring between hosts; sums are float32 always."""
    bucket_bytes: int = pydantic.Field(default=0, ge=0, le=sys.maxsize)
    """Bytes in a gradient bucket of the ring; 0: 25 MiB."""
    chunk_bytes: int = pydantic.Field(default=0, ge=0, le=sys.maxsize)
    """Bytes in a chunk on a ring's tcp or grpc lane; 0: a short trial at the start chooses."""
    stripes: int = pydantic.Field(default=1, ge=1)
    """Parallel connections to the next worker of a ring."""
    collective_timeout_s: float = pydantic.Field(default=300.0, gt=0)
    """Seconds a collective of a ring may stall before it fails, naming the worker that holds it up."""
    compression: Literal["", Compression] = ""
    """Compression of gradients in a ring: bf16, fp16, int8, powersgd or topk; empty: none."""
    max_inbox_bytes: int = pydantic.Field(default=4 << 30, ge=1 << 20)
    """Bytes of frames in one lane that arrived before they were requested."""
    staleness: float = pydantic.Field(default=float("inf"), ge=0)
    """Staleness bound for parameter servers: 0 synchronous, inf asynchronous."""

    @pydantic.model_validator(mode="after")
    def _stripes_are_let_in(self) -> WorkerConfig:
        if self.stripes >= self.max_lanes_per_peer:
            raise ValueError(
                f"stripes {self.stripes} has to be less than max_lanes_per_peer {self.max_lanes_per_peer}: each is a "
                "lane to the next worker"
            )
        return self

    def communication_options(self, **others: Any) -> CommunicationOptions:
        """Options of collectives as they are configured here, and ``others``."""
        names = ("transport", "wire_dtype", "chunk_bytes", "stripes")
        return CommunicationOptions(**{name: getattr(self, name) for name in names}, **others)


class EvaluatorConfig(MemberConfig):
    """The evaluator: it reads checkpoints and stays outside the training cluster."""

    task: str = "evaluator:0"
    """Task id."""
    checkpoint_dir: str = pydantic.Field(min_length=1)
    """Where new checkpoints appear: the chief's."""
