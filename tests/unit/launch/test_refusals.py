"""What `stratagem run` refuses before it starts anything, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stratagem.launch.local import only_writer
from tests import forks

# Root has no such limit, and who is nobody can read no module any more: all are loaded before.
LIMITED = """
import os, resource, sys
from stratagem.cli.__main__ import main
from stratagem.cli import roles, run
resource.setrlimit(resource.RLIMIT_NPROC, (int(sys.argv[1]), int(sys.argv[1])))
if os.getuid() == 0:
    os.setuid(65534)
sys.argv = ["stratagem", "run", *sys.argv[2:], "-m", "__hello__"]  # which is in no file
main()
"""


def limited(most: int, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LIMITED, str(most), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(("num_ps", "needed"), [(1, 60), (0, 48)])
def test_a_cluster_that_needs_more_threads_than_this_user_may_have(num_ps: int, needed: int) -> None:
    """It has at most 56 and 43, as measured; with fewer its tasks waited for one another."""
    done = limited(42, "--workers", "2", "--ps", str(num_ps))
    assert done.returncode == 2, done.stderr
    assert f"this user may have 42 processes and threads, and this job alone needs at least {needed}" in done.stderr
    assert "`ulimit -u`" in done.stderr


@pytest.mark.usefixtures("preloaded")
@pytest.mark.thorough
def test_who_keeps_logs_in_a_folder_keeps_them_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    command = [sys.executable, "-m", "stratagem.cli", "run", "--log-dir", str(tmp_path / "logs"), "train.py"]

    def run() -> subprocess.CompletedProcess[str]:
        return forks.run(command, cwd=tmp_path, timeout=120)

    with only_writer(tmp_path / "logs"):
        refused = run()
    assert refused.returncode == 2, refused.stderr
    assert "--log-dir: another `stratagem run` (process " in refused.stderr and "another folder" in refused.stderr
    assert not list((tmp_path / "logs").glob("*.log"))
    assert run().returncode == 0


def test_a_temporary_folder_that_is_full_is_named_and_nothing_stays_there(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "full").mkdir()
    namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*namespace, "mount -t tmpfs none /mnt"], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    words = (
        "mount -t tmpfs -o nr_inodes=3 none full && export TMPDIR=$PWD/full || exit 9; "
        f"{sys.executable} -m stratagem.cli run train.py; code=$?; ls full; exit $code"
    )
    done = subprocess.run([*namespace, words], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert f"cannot create {tmp_path}/full/stratagem-run-" in done.stderr
    assert "for the job's own files: No space left on device; free some space there" in done.stderr
    assert not done.stdout
