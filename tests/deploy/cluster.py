"""A Kubernetes cluster for tests: the one that KUBECONFIG names where TEST_KUBERNETES says that it is one for tests."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import yaml

from stratagem.launch.manifests.pod import Object
from tests.deploy.containers import run


def need_cluster() -> None:
    """Skips the test where nobody has said that the cluster of KUBECONFIG is one for tests."""
    if not os.environ.get("TEST_KUBERNETES"):
        pytest.skip("TEST_KUBERNETES=1 says that the cluster of KUBECONFIG is one for tests")


class Namespace:
    """A namespace that goes with the test.

    Args:
        name: of the namespace.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def kubectl(self, *arguments: str, text: str | None = None, code: int | None = 0) -> str:
        """What kubectl prints."""
        return run(["kubectl", "--namespace", self.name, *arguments], text=text, code=code).stdout

    def apply(self, objects: Sequence[Object]) -> None:
        """Creates or changes objects."""
        self.kubectl("apply", "--filename", "-", text=yaml.safe_dump_all(objects))

    def find(self, kind: str, selector: str = "") -> list[Any]:
        """Objects of a kind."""
        found: list[Any] = json.loads(self.kubectl("get", kind, "--selector", selector, "--output", "json"))["items"]
        return found

    def names(self) -> set[str]:
        """What a job made or left: "kind/name" of each object."""
        kinds = "jobs,pods,services,configmaps,persistentvolumeclaims,serviceaccounts,networkpolicies"
        listed = self.kubectl("get", kinds, "--output", "name").split()
        own = ("configmap/kube-root-ca.crt", "serviceaccount/default")
        return {name for name in listed if name not in own}

    def until(self, holds: Callable[[], bool], what: str, deadline_s: float = 120.0) -> None:
        """Polls until ``holds``; after the deadline fails and says what is there."""
        deadline = time.monotonic() + deadline_s
        while not holds():
            if time.monotonic() > deadline:
                there = self.kubectl("get", "jobs,pods,persistentvolumeclaims", "--output", "wide")
                events = self.kubectl("get", "events", "--sort-by=.lastTimestamp")
                pytest.fail(f"not within {deadline_s:.0f} s: {what}\n{there}\n{events[-4000:]}")
            time.sleep(0.2)


@contextlib.contextmanager
def namespace(name: str) -> Iterator[Namespace]:
    """A new namespace, with a service account in it; deleted at the end, with all that is in it."""
    made = Namespace(name)
    run(["kubectl", "create", "namespace", name])
    try:
        made.until(lambda: bool(made.find("serviceaccounts")), "the namespace has its service account")
        yield made
    finally:
        made.kubectl("delete", "jobs", "--all", "--wait=false")
        made.kubectl("delete", "pods", "--all", "--grace-period=0", "--force")  # their cores are the next test's
        run(["kubectl", "delete", "namespace", name, "--wait=false"])
