"""Options of the commands that ask a running job's chief."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from stratagem.cli.options import SECONDS, cluster_option, read_cluster_file, variable_option
from stratagem.cluster.identity import CHIEF
from stratagem.cluster.sources import gather, written_cluster
from stratagem.launch.status import chief_from_environment
from stratagem.rpc.security import Security, operator_security


@dataclasses.dataclass(frozen=True)
class Asking:
    chief: str | None
    cluster_file: Path | None
    as_json: bool
    timeout_s: float
    tls: str
    token_file: str
    insecure: bool

    @property
    def address(self) -> str:
        """The chief's address from the flag, the environment or the cluster file. ClusterSpecError: nobody names it; or
        the environment and the cluster file name two."""
        environ = {} if self.chief else os.environ
        written = written_cluster(environ, read_cluster_file(self.cluster_file), str(self.cluster_file))
        return chief_from_environment(self.chief, "" if written is None else written.chief_address)

    @property
    def security(self) -> Security:
        """What to show a chief: from the options, else from the cluster file (``defaults``, which are for everybody).
        ConfigurationError: that has an unknown section or key, or a value of another type."""
        given = {"tls": self.tls or None, "token_file": self.token_file or None, "insecure": self.insecure or None}
        document = {**read_cluster_file(self.cluster_file), "cluster": None, "chief": {}}
        config = gather(None, {}, {"task": CHIEF, **given}, document, str(self.cluster_file))[0].config
        return operator_security(config.tls, config.token_file, config.insecure)


_OPTIONS = (
    click.option("--chief", help="host:port of the chief."),
    cluster_option,
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    click.option("--timeout-s", type=SECONDS, default=5.0, show_default=True, help="Seconds to wait for an answer."),
    variable_option("--tls", default="", help="Folder with ca.crt and the operator's certificate."),
    variable_option("--token-file", default="", help="File with the token of the job."),
    variable_option("--insecure", is_flag=True, help="Allow sending the token unencrypted beyond this machine."),
)


def asking_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options, as its first argument."""

    @functools.wraps(command)
    def asked(**options: Any) -> None:
        asking = Asking(**{field.name: options.pop(field.name) for field in dataclasses.fields(Asking)})
        command(asking, **options)

    for option in reversed(_OPTIONS):
        asked = option(asked)
    return asked
