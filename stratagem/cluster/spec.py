"""The cluster: which tasks exist and where they serve. Pure, no I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from stratagem.arguments import check_kind, nearest
from stratagem.cluster.task import TASK_TYPES, TaskId
from stratagem.errors import ClusterSpecError, ConfigurationError
from stratagem.tensorflow_names import WithWaysOut

_SINGLE = ("chief", "evaluator")
_MAX_HOST = 255


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``"host:port"``; an IPv6 host stands in brackets, which are taken off. ClusterSpecError: there
    is no host, or no port between 0 and 65535."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not _is_host(host) or (":" in host and not bracketed) or not _is_port(port):
        shown = address[: 2 * _MAX_HOST]
        raise ClusterSpecError(
            "expected an address like 'host:2222' ('[::1]:2222' for IPv6, '0.0.0.0:2222' to listen on all addresses), "
            f"got {shown!r}"
        )
    return (host[1:-1] if bracketed else host), int(port)


def _is_host(text: str) -> bool:
    """Whether it can be looked up: what raises something else than OSError there is no name."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    is_plain = text.isprintable() and not any(sign.isspace() or sign == "/" for sign in text)
    return 0 < len(text) <= _MAX_HOST and is_plain


def _is_port(text: str) -> bool:
    """Whether it is the number of a port, at most five digits: Python reads no number of thousands."""
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65535


def join_address(host: str, port: int) -> str:
    """The reverse of :func:`split_address`: an IPv6 host gets its brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def refuse_unknown(
    what: str,
    words: Iterable[object],
    known: Collection[str],
    where: str = "",
    error: type[ConfigurationError] = ConfigurationError,
) -> None:
    """Raises ``error`` for the first of ``words`` that is none of the ``known`` ones; offers the nearest that is."""
    for word in words:
        if word not in known:
            raise error(f"unknown {what} {word!r}{where}; {nearest(str(word), known)}")


def nearest_type(word: str) -> str:
    """As :func:`nearest`, of task types; what TensorFlow once called the master is known too."""
    return "a master, which trains, is worker 0 here" if word == "master" else nearest(word, TASK_TYPES)


@dataclasses.dataclass(frozen=True)
class ClusterSpec(WithWaysOut):
    """Addresses of every task, by role, in the order of their indices.

    Port 0 means "a free one": the task takes a free port and registers it with the chief. The chief's own
    address cannot have port 0, because all other tasks must find it. As in TensorFlow, a mapping of roles or a
    ClusterSpec can be passed alone, ``ClusterSpec({"worker": [...]})``; see :meth:`from_mapping`.
    """

    chief: tuple[str, ...] = ()
    """At most one. Without it worker 0 spawns the chief, which takes over worker 0's address."""
    worker: tuple[str, ...] = ()
    ps: tuple[str, ...] = ()
    evaluator: tuple[str, ...] = ()
    """At most one, outside the training cluster."""

    def __post_init__(self) -> None:
        if isinstance(self.chief, Mapping | ClusterSpec):
            given = self.chief
            self.__dict__.update((given if isinstance(given, ClusterSpec) else self.from_mapping(given)).__dict__)
        for role in TASK_TYPES:
            check_kind(getattr(self, role), tuple, list)
            for address in getattr(self, role):
                split_address(address)
        for role in _SINGLE:
            if len(addresses := getattr(self, role)) > 1:
                raise ClusterSpecError(f"expected at most one {role}, got {len(addresses)}: {', '.join(addresses)}")
        if not self.worker:
            have = ", ".join(role for role in TASK_TYPES if getattr(self, role)) or "nothing"
            raise ClusterSpecError(
                f"expected at least one worker, got a cluster of {have}; only workers run the training script, "
                "so add them under 'worker' (the chief is not a replica), or unset TF_CONFIG to train in one process"
            )
        self._check_duplicates()
        if split_address(self.chief_address)[1] == 0:
            owner = "chief:0" if self.chief else "worker:0 (where the chief will serve)"
            raise ClusterSpecError(f"the address of {owner} needs a port other than 0, got {self.chief_address!r}")

    def _check_duplicates(self) -> None:
        owners: dict[str, TaskId] = {}
        for task in self.tasks:
            address = self.address(task)
            owner = owners.setdefault(address, task)
            if owner != task and split_address(address)[1] != 0:
                raise ClusterSpecError(f"{owner} and {task} have the same address {address!r}; give each task its own")

    @classmethod
    def from_mapping(cls, cluster: object) -> ClusterSpec:
        """The cluster written as ``{role: ["host:port", …]}``.

        Raises:
            ClusterSpecError: says what was expected and what was given.
        """
        if not isinstance(cluster, Mapping):
            raise ClusterSpecError(f"expected a cluster like {{'worker': ['host:port']}}, got {cluster!r}")
        roles: dict[str, tuple[str, ...]] = {}
        for role, addresses in cluster.items():
            if role not in TASK_TYPES:
                raise ClusterSpecError(f"unknown role {role!r} in the cluster; {nearest_type(str(role))}")
            if not isinstance(addresses, Sequence) or isinstance(addresses, str | bytes):
                raise ClusterSpecError(f"expected a list of addresses for {role!r}, got {addresses!r}")
            if wrong := [address for address in addresses if not isinstance(address, str)]:
                raise ClusterSpecError(f"expected 'host:port' strings for {role!r}, got {wrong[0]!r}")
            roles[role] = tuple(addresses)
        return cls(**roles)

    def as_dict(self) -> dict[str, list[str]]:
        """``{role: [address, …]}`` without empty roles, as TF_CONFIG writes it."""
        return {role: list(addresses) for role in TASK_TYPES if (addresses := getattr(self, role))}

    @property
    def jobs(self) -> list[str]:
        """Roles that have tasks."""
        return list(self.as_dict())

    def job_tasks(self, job_name: str) -> list[str]:
        """Addresses of the tasks of a role.

        Raises:
            ClusterSpecError: there are none.
        """
        if job_name not in (found := self.as_dict()):
            raise ClusterSpecError(f"expected a role of the cluster ({', '.join(found)}), got {job_name!r}")
        return found[job_name]

    def num_tasks(self, job_name: str) -> int:
        """Number of tasks of a role; errors as :meth:`job_tasks`."""
        return len(self.job_tasks(job_name))

    @property
    def num_workers(self) -> int:
        """Workers in the cluster."""
        return len(self.worker)

    @property
    def num_ps(self) -> int:
        """Parameter servers in the cluster."""
        return len(self.ps)

    @property
    def tasks(self) -> tuple[TaskId, ...]:
        """Every task: chief, workers, ps, evaluator."""
        return tuple(TaskId(role, index) for role in TASK_TYPES for index in range(len(getattr(self, role))))

    @property
    def chief_address(self) -> str:
        """Where the chief serves: its own address, or worker 0's when the cluster names no chief."""
        return self.chief[0] if self.chief else self.worker[0]

    def check_task(self, task: TaskId) -> None:
        """Refuses a task that is not in the cluster (an evaluator's entry is optional).

        Raises:
            ClusterSpecError: names the task and how many of its type there are.
        """
        num_tasks = len(getattr(self, task.type))
        if task.index >= num_tasks and task != TaskId("evaluator", 0):
            raise ClusterSpecError(
                f"task {task} is not in the cluster, which has {num_tasks} of type {task.type!r}"
                + (f" (indices 0 to {num_tasks - 1})" if num_tasks else "")
            )

    def address(self, task: TaskId) -> str:
        """The address that the cluster gives ``task``.

        Raises:
            ClusterSpecError: the task has no entry.
        """
        addresses: tuple[str, ...] = getattr(self, task.type)
        if task.index >= len(addresses):
            raise ClusterSpecError(f"the cluster has no address for {task}")
        return addresses[task.index]

    def bind_address(self, task: TaskId) -> str:
        """Where ``task`` listens: its address, or a free port if the chief has that address or there is none."""
        if task == TaskId("chief", 0):
            return self.chief_address
        if task.index >= len(getattr(self, task.type)):
            return "127.0.0.1:0"
        address = self.address(task)
        if task == TaskId("worker", 0) and not self.chief:
            return f"{address.rpartition(':')[0]}:0"
        return address
