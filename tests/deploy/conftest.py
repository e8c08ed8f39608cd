"""One image of this tree for all tests of a session; compose projects, desks to submit from, a registry."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.containers import Project, built_image, copy_tree, need_engine, wait_for
from tests.deploy.desk import Desk, answers


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the working tree as a clone would be."""
    folder = tmp_path_factory.mktemp("clone")
    copy_tree(folder)
    return folder


@pytest.fixture(scope="session")
def image(clone: Path) -> Iterator[str]:
    """The image of this tree, built as a user builds it; its tag goes with the session."""
    need_engine()
    with built_image(clone) as name:
        yield name


@pytest.fixture
def project(clone: Path, image: str) -> Iterator[Callable[..., Project]]:
    """Makes projects: ``project(overlays, environ)``; they end with the test."""
    made: list[Project] = []

    def make(*overlays: str, **environ: Any) -> Project:
        name = f"stratagem-test-{os.getpid()}-{len(made)}"
        made.append(Project(name, clone, image, overlays, environ))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    for job in desk.jobs():
        desk.stratagem("jobs", "cancel", job["id"], code=None)
        desk.stratagem("jobs", "remove", job["id"], code=None)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """Debian's docker-registry on a free port of loopback."""
    program = shutil.which("docker-registry")
    if program is None:
        assert not os.environ.get("TEST_DOCKER"), "TEST_DOCKER is set, but there is no docker-registry"
        pytest.skip("there is no docker-registry: apt-get install docker-registry")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(tmp_path / "registry")}},
        "http": {"addr": address},
    }
    (tmp_path / "registry.yml").write_text(yaml.safe_dump(config))
    with (tmp_path / "registry.log").open("w") as log:
        process = subprocess.Popen([program, "serve", str(tmp_path / "registry.yml")], stdout=log, stderr=log)
    try:
        wait_for(lambda: answers(f"http://{address}/v2/"), "the registry", (tmp_path / "registry.log").read_text)
        yield address
    finally:
        process.terminate()
        process.wait(60)
