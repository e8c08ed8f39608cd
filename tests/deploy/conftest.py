"""One image of this tree for all tests of a session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.containers import Project, copy_tree, need_engine, run


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
    name = f"stratagem-test:{os.getpid()}"
    environ = {"IMAGE": name, "BUILD_NETWORK": "host"}
    run(["docker", "compose", "build", "--quiet"], folder=clone, environ=environ, timeout_s=600)
    yield name
    run(["docker", "image", "rm", "--force", name], code=None)


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
