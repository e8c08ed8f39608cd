"""The processes of a local job: command lines and environments. Pure, no I/O."""

from __future__ import annotations

import dataclasses
import math
import os
import resource
import shlex
from collections.abc import Mapping
from pathlib import Path

from stratagem.cluster.choice import ONE_PROCESS, StrategyName, choose_strategy
from stratagem.cluster.identity import CHIEF
from stratagem.cluster.job_rules import check_checkpoint_every, check_communication, check_max_workers, check_staleness
from stratagem.cluster.spec import ClusterSpec
from stratagem.cluster.task import TaskId
from stratagem.cluster.tf_config import emit_tf_config, torchrun_environment
from stratagem.errors import ConfigurationError
from stratagem.launch.chaos.events import ON_CONNECTIONS, parse
from stratagem.launch.fork_server import COMMAND_PREFIX
from stratagem.launch.script import check_script
from stratagem.rpc import heap
from stratagem.rpc.chief_address import FILE_NAME, FILE_PREFIX

AUTO = "auto"
"""In the place of a folder of certificates: throw-away ones are made for the run."""
_LOCAL = "127.0.0.1:0"
PER_CORE, FEWEST = 16, 64
"""Workers and ps that a host is trusted with: this many for each core, and this many whatever cores it has."""
_THREADS = {"chief": 9, "ps": 12, "worker": 12, "evaluator": 12}
"""Of each task beside the script's own, on two cores; gRPC starts more on more cores."""
_THREADS_OF_PAIR = 3
"""More of a worker in a ring, and of a ps for each worker."""
_THREADS_OF_LAUNCHER = 9
OF_ONE_TASK = (
    *("TF_CONFIG", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "SLURM_STEP_NUM_TASKS",  # makes a process one of several tasks of srun
)
"""Variables that say which task of which cluster a process is."""
_OWN = tuple(
    f"STRATAGEM_{name}" for name in ("TASK", "BIND", "CHIEF", "NUM_WORKERS", "NUM_PS", "TLS", "TOKEN_FILE", "JOINED")
)
_OPEN_FILES = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
_OF_A_PERSON = ("PYTHONINSPECT",)
"""Python would ask on standard input what to do when the process should end."""


def current_folder() -> str:
    """Where the job is started; a ConfigurationError when it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ConfigurationError("the current folder has been removed: change to one that is there") from None


@dataclasses.dataclass(frozen=True)
class LocalJob:
    """What `stratagem run` was asked for. A field without a word here is what the help of its option says."""

    script: Path
    args: tuple[str, ...] = ()
    module: bool = False
    """The script is the name of a module, as for ``python -m``."""
    num_workers: int = 1
    num_ps: int = 0
    num_chiefs: int = 1
    """2: one serves, and one stands by, to go on with its journal."""
    ps_replicas: int = 1
    min_workers: int = 0
    max_workers: int = 0
    strategy: str = "auto"
    staleness: float = math.inf
    max_restarts: int = 3
    num_threads: int = 0
    shutdown_timeout_s: float = 25.0
    checkpoint_every_s: float = 0.0
    checkpoint_dir: Path | None = None
    """None: a folder of the run directory."""
    checkpoint_roots: str = dataclasses.field(default_factory=current_folder)
    state_dir: Path | None = None
    """Where the run directory is made; None: the system's temporary directory, and it is removed on success."""
    log_dir: Path | None = None
    """None: a folder of the run directory."""
    summary: Path | None = None
    log_format: str = "text"
    evaluator: bool = False
    communication: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Fields of the workers' configuration that say how they talk, for example transport; missing: default."""
    tls: str = ""
    """Folder of certificates; "auto": throw-away ones for this run; empty: no TLS."""
    token_file: str = ""
    chaos: str = ""
    """Faults to happen, in the language of ``launch/chaos/events.py``."""
    web: str = ""
    """host:port of the page that shows the job; port 0: a free one, the same for each chief. Empty: none."""
    verbose: bool = False
    preload: bool = True

    def __post_init__(self) -> None:
        if self.num_workers < 1 or self.num_ps < 0 or self.max_restarts < 0 or self.num_threads < 0:
            raise ConfigurationError(
                f"expected --workers of at least 1 and no negative counts, got --workers {self.num_workers} "
                f"--ps {self.num_ps} --max-restarts {self.max_restarts} --threads {self.num_threads}"
            )
        if not (self.checkpoint_every_s >= 0 and self.shutdown_timeout_s >= 0):
            raise ConfigurationError(
                f"expected seconds of at least 0, got --checkpoint-every-s {self.checkpoint_every_s:g} "
                f"--shutdown-timeout {self.shutdown_timeout_s:g}"
            )
        check_checkpoint_every(self.checkpoint_every_s, self.num_ps)
        check_staleness(self.staleness, self.num_ps)
        if self.num_chiefs not in (1, 2):
            raise ConfigurationError(
                f"expected --chiefs 1, or 2 for a standby (a lost chief is restarted at once, so a third "
                f"would never be needed), got --chiefs {self.num_chiefs}"
            )
        if self.ps_replicas not in (1, 2) or self.ps_replicas > max(1, self.num_ps):
            raise ConfigurationError(
                f"expected --ps-replicas 1, or 2 with --ps 2 or more, because the copy of a ps is kept on another; got "
                f"--ps-replicas {self.ps_replicas} --ps {self.num_ps}"
            )
        if self.ps_replicas > 1 and self.staleness == 0:
            raise ConfigurationError(
                "--ps-replicas 2 needs a staleness above 0: at 0 all ps go back to a checkpoint together when one dies"
            )
        if not self.module and str(self.script).startswith(_OPEN_FILES):
            raise ConfigurationError(
                f"expected a training script, but {self.script} is an open file of this command, and each task opens "
                "the script by itself: give the path of a file"
            )
        check_script(self.script, self.module)
        if not self.module and self.script.suffix == ".ipynb":
            raise ConfigurationError(
                f"{self.script} is a notebook: `stratagem submit {shlex.quote(str(self.script))}` runs one"
            )
        if self.tls and self.tls != AUTO and not Path(self.tls).is_dir():
            raise ConfigurationError(
                f"--tls takes a folder of certificates, or the word {AUTO} for throw-away ones; {self.tls} is neither. "
                f"Before the script, write --tls {AUTO}"
            )
        chosen = self.chosen_strategy
        check_communication(self.communication, chosen)
        if self.min_workers and not (chosen == "ring" and 0 < self.min_workers <= self.num_workers):
            raise ConfigurationError(
                f"--min-workers {self.min_workers} is how many workers a ring needs to continue when others are "
                f"lost: expected --strategy ring and at least as many --workers, got {chosen} and "
                f"--workers {self.num_workers}; with parameter servers, workers come and go without it"
            )
        check_max_workers(self.max_workers, self.num_workers, self.min_workers, self.num_ps)
        for is_asked, why in (
            (self.evaluator, "an evaluator needs a cluster"),
            (self.chaos, "--chaos needs a cluster"),
            (self.web, "the chief of a cluster serves the page"),
            (self.num_chiefs > 1, "a second chief needs a cluster"),
        ):
            if is_asked and chosen in ONE_PROCESS:
                raise ConfigurationError(f"{why}, and this job is one process: add --workers 2 or --ps 1")
        transport = self.communication.get("transport", "grpc")
        if self.chaos and self.has_relays and transport != "grpc":
            raise ConfigurationError(
                f"--chaos: cut, reset and random act on gRPC connections, and --transport {transport} uses others: "
                "leave --transport out"
            )

    @property
    def has_relays(self) -> bool:
        """Whether connections are to suffer; then all bytes go through gRPC's."""
        events, drawn = parse(self.chaos, (*self.servers, *self.workers), self.ps_replicas > 1)
        return bool(drawn) or any(event.verb in ON_CONNECTIONS for event in events)

    @property
    def chosen_strategy(self) -> StrategyName:
        """The strategy, with "auto" resolved."""
        num_devices = self.communication.get("devices", "").count(",") + 1
        return choose_strategy(self.strategy, self.num_workers, self.num_ps, num_devices)

    @property
    def workers(self) -> tuple[TaskId, ...]:
        """Tasks that run the script."""
        return tuple(TaskId("worker", index) for index in range(self.num_workers))

    @property
    def servers(self) -> tuple[TaskId, ...]:
        """The chief first, then the one that stands by, ps, the evaluator; none when the script trains alone."""
        if self.chosen_strategy in ONE_PROCESS:
            return ()
        evaluators = (TaskId("evaluator", 0),) if self.evaluator else ()
        counts = {"chief": self.num_chiefs, "ps": self.num_ps}
        return (*(TaskId(role, index) for role, num in counts.items() for index in range(num)), *evaluators)


def most_processes() -> int:
    """Workers and ps that this host bears."""
    return max(FEWEST, PER_CORE * len(os.sched_getaffinity(0)))


def check_size(num_workers: int, num_ps: int, num_threads: int = 0) -> None:
    """Refuses more processes, or threads of one, than a host bears: on a shared core processes miss heartbeats
    (``session_timeout_s``), and each has 50 MB of its own before the script makes anything."""
    num_cores, most = len(os.sched_getaffinity(0)), most_processes()
    if num_workers + num_ps > most:
        raise ConfigurationError(
            f"--workers {num_workers} --ps {num_ps} are {num_workers + num_ps} processes on this host with {num_cores} "
            f"cores: expected at most {most} ({PER_CORE} for each core, {FEWEST} on any host). Start the tasks on "
            "several machines (docs/start/machines.md)"
        )
    if num_threads > most:
        raise ConfigurationError(
            f"--threads {num_threads} on this host with {num_cores} cores: expected at most {most}; more threads than "
            "cores only wait for one another, and 0 shares the cores"
        )


def check_threads(job: LocalJob) -> None:
    """Refuses a cluster that this user may not start: gRPC retries for ever where it gets no thread."""
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    needed = _THREADS_OF_LAUNCHER + sum(_THREADS[task.type] for task in (*job.servers, *job.workers))
    needed += _THREADS_OF_PAIR * job.num_workers * max(1, job.num_ps)
    if job.servers and 0 <= most < needed and os.getuid() != 0:  # root has no such limit
        raise ConfigurationError(
            f"this user may have {most} processes and threads, and this job alone needs at least {needed}: raise "
            "`ulimit -u`, or start fewer --workers and --ps"
        )


class RunFolders:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.journal = root / "chief"
        self.chief_file = f"{FILE_PREFIX}{self.journal / FILE_NAME}"
        """Where that one of several chiefs says its address which serves, as ``--chief`` takes it."""
        self.checkpoints = root / "checkpoints"
        self.logs = root / "logs"
        self.certificates = root / "certificates"
        self.resume_mark = root / "resumes"
        """A script that goes on where it was, when the whole job is started again, leaves this file."""

    def report(self, task: TaskId) -> Path:
        """Where a worker writes its report (JSON: steps, examples, loss, metrics) when its script ends."""
        return self.root / f"report-{task.type}-{task.index}.json"


@dataclasses.dataclass(frozen=True)
class Launch:
    command: tuple[str, ...]
    environ: dict[str, str]


def plan_launch(
    job: LocalJob,
    task: TaskId,
    folders: RunFolders,
    environ: Mapping[str, str],
    num_cores: int,
    chief_address: str = _LOCAL,
    master_port: int = 0,
    relayed: tuple[str, str] = ("", ""),
    chief: str = "",
) -> Launch:
    """How to start ``task``.

    Args:
        task: one of ``job.servers`` or ``job.workers``, or a further one that was asked for while training ran.
        environ: the launcher's own environment; its description of another cluster is left out.
        chief_address: where the chief listens; for the chief itself, where it should (again) listen. Of two chiefs each
            listens where it likes, and says so in a file.
        master_port: a free port, for scripts of ``torch.distributed``; 0: there is none.
        relayed: where the task has to listen, and where others reach it; empty: at a port of its choice.
        chief: where the task is to look for the chief, if that is not just ``chief_address``.
    """
    asked = environ.get("OMP_NUM_THREADS", "")
    shared = max(1, num_cores // (job.num_workers + job.num_ps))  # the chief hardly computes
    num_threads = job.num_threads or (int(asked) if asked.isdecimal() else 0) or shared
    variables = {name: value for name, value in environ.items() if name not in (*OF_ONE_TASK, *_OWN, *_OF_A_PERSON)}
    variables |= {"PYTHONUNBUFFERED": "1", "STRATAGEM_NUM_THREADS": str(num_threads)}
    variables = {**heap.ENVIRONMENT, **variables}
    # One process sees for itself how many accelerators it has.
    strategy = job.strategy if job.chosen_strategy in ONE_PROCESS else job.chosen_strategy
    variables |= {"STRATAGEM_STRATEGY": strategy, "STRATAGEM_STALENESS": str(job.staleness)}
    if job.num_threads or "OMP_NUM_THREADS" not in environ:
        variables["OMP_NUM_THREADS"] = str(num_threads)
    if job.servers and (certificates := certificates_of(job, folders)):
        variables["STRATAGEM_TLS"] = certificates
    if job.servers:
        variables["STRATAGEM_CHECKPOINT_ROOTS"] = os.pathsep.join(
            os.path.abspath(root) for root in job.checkpoint_roots.split(os.pathsep) if root
        )
    if job.servers and job.token_file:
        variables["STRATAGEM_TOKEN_FILE"] = str(Path(job.token_file).resolve())
    if task.type in ("worker", "evaluator"):
        variables["STRATAGEM_REPORT_FILE"] = str(folders.report(task))
    if task.type == "worker":
        variables["STRATAGEM_RESUME_FILE"] = str(folders.resume_mark)
    command = _command(job, task, folders, chief_address, relayed, chief or chief_address)
    return Launch(command, variables | _place(job, task, chief_address, master_port))


def certificates_of(job: LocalJob, folders: RunFolders) -> str:
    """Folder of the certificates; empty: no TLS."""
    if job.tls == AUTO:
        return str(folders.certificates)
    return str(Path(job.tls).resolve()) if job.tls else ""


def _place(job: LocalJob, task: TaskId, chief_address: str, master_port: int) -> dict[str, str]:
    if task.type == "chief" or not job.servers:
        return {}
    # A task that was started while training ran has a place beyond those of the beginning.
    numbers = {"worker": job.num_workers, "ps": job.num_ps}
    numbers[task.type] = max(numbers.get(task.type, 0), task.index + 1)
    workers, ps = (_LOCAL,) * numbers["worker"], (_LOCAL,) * numbers["ps"]
    cluster = ClusterSpec(chief=(chief_address,), worker=workers, ps=ps, evaluator=(_LOCAL,) if job.evaluator else ())
    told = torchrun_environment(cluster, task)
    if told and master_port:
        told["MASTER_PORT"] = str(master_port)
    return {"TF_CONFIG": emit_tf_config(cluster, task), **told}


def _command(
    job: LocalJob, task: TaskId, folders: RunFolders, chief_address: str, relayed: tuple[str, str], chief: str
) -> tuple[str, ...]:
    checkpoints = str(job.checkpoint_dir or folders.checkpoints)
    flags: dict[str, object] = {"task": task, "log-format": job.log_format}
    if task.type == "chief":
        # Both are the one chief of the cluster; the first one to come does not wait for another.
        flags |= {"task": CHIEF, "bind": _LOCAL if job.num_chiefs > 1 else chief_address}
        flags |= {"standby": True} if job.num_chiefs > 1 and chief_address != _LOCAL else {}
        flags |= {"num-workers": job.num_workers, "num-ps": job.num_ps}
        flags |= {"state-dir": folders.journal, "checkpoint-dir": checkpoints}
        flags |= {"checkpoint-every-s": job.checkpoint_every_s, "ps-replicas": job.ps_replicas}
        flags |= {} if job.checkpoint_dir or job.state_dir else {"no-checkpoints-stay": True}
        flags |= {"web": job.web} if job.web else {}
        flags |= {"min-workers": job.min_workers, "max-workers": job.max_workers}
    elif job.servers:
        bind, advertise = relayed
        flags |= {"chief": chief, **({"advertise": advertise} if advertise else {})}
        flags |= {} if task.type == "evaluator" else {"bind": bind or _LOCAL}
    if task.type in ("ps", "evaluator"):
        flags |= {"checkpoint-dir": checkpoints}
    if task.type == "worker":
        flags |= {name.replace("_", "-"): value for name, value in job.communication.items()}
    if task.type == "ps" and "transport" in job.communication:  # of copies, between ps
        flags["transport"] = job.communication["transport"]
    if task.type in ("ps", "worker") and job.has_relays:
        flags["transport"] = "grpc"
    texts = [f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()]
    if task.type in ("worker", "evaluator"):
        texts += [*("-m",) * job.module, "--", str(job.script), *job.args]
    return (*COMMAND_PREFIX, task.type, *texts)
