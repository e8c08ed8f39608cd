"""`stratagem certs`: the certificate authority of a cluster, and certificates for its tasks."""

from __future__ import annotations

from pathlib import Path

import click

from stratagem.cli.options import FOLDER
from stratagem.cluster.identity import OPERATOR, check_identity, file_stem
from stratagem.errors import ConfigurationError
from stratagem.rpc.tls_files import AUTHORITY_FILE

AUTHORITY_DAYS, TASK_DAYS = 3650, 365
_DAYS = click.IntRange(min=1, max=36_500)


@click.group("certs")
def certs_command() -> None:
    """Make certificates for --tls. Each machine needs ca.crt and the files of its own tasks; ca.key stays at home."""


@certs_command.command("init")
@click.option("--dir", "folder", type=FOLDER, default=Path("certs"), show_default=True, help="Folder to create.")
@click.option("--days", type=_DAYS, default=AUTHORITY_DAYS, show_default=True, help="How long it is valid.")
def init_command(folder: Path, days: int) -> None:
    """Make a certificate authority for one cluster: ca.crt and ca.key."""
    from stratagem.launch.certificates import Authority

    Authority.create(days).save(folder, with_key=True)
    click.echo(f"{folder / AUTHORITY_FILE}: copy it to each machine. ca.key beside it signs certificates, so keep it.")


@certs_command.command("issue")
@click.argument("identities", metavar="TASK...", nargs=-1, required=True)
@click.option("--dir", "folder", type=FOLDER, default=Path("certs"), show_default=True, help="Folder of `certs init`.")
@click.option("--host", "hosts", multiple=True, help="Further host name or address for other tools; may be repeated.")
@click.option("--days", type=_DAYS, default=TASK_DAYS, show_default=True, help="How long they are valid.")
@click.option("--renew", is_flag=True, help="Replace existing certificates; running tasks pick up the new ones.")
def issue_command(identities: tuple[str, ...], folder: Path, hosts: tuple[str, ...], days: int, renew: bool) -> None:
    """Make key and certificate for each TASK.

    Tasks are "chief:0", "ps:0", "worker:1", …; "operator" is who asks for `stratagem status` or uses `stratagem run`.
    """
    if len(set(identities)) != len(identities):
        raise ConfigurationError(f"expected each task once, got {' '.join(identities)}")
    names = [check_identity(identity) for identity in identities]
    from stratagem.launch.certificates import LOCAL_HOSTS, Authority

    authority = Authority.load(folder)
    for name in names:
        authority.issue(name, (*LOCAL_HOSTS, *hosts), folder, days=days, renew=renew)
        whose = "the person at the terminal" if name == OPERATOR else name
        click.echo(f"{folder / file_stem(name)}.crt and .key: for {whose}, {days} days")
