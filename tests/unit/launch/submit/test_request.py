"""What a request means, which are refused: each row of the automatic table, each refusal of docs/semantics.md."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from stratagem.errors import ConfigurationError
from stratagem.launch.machines import COMMON_MACHINE_CONFIGS, TASK_MACHINES, MachineConfig
from stratagem.launch.submit.request import JobRequest

REGISTRY = {"target": "kubernetes", "docker_image_bucket_name": "registry.example:5000/team"}


@pytest.mark.parametrize(
    ("given", "strategy", "devices"),
    [
        ({}, "one", "cpu"),
        ({"chief_config": "CPU"}, "one", "cpu"),
        ({"chief_config": "T4_1X"}, "one", ""),
        ({"chief_config": "T4_4X"}, "mirrored", ""),
        ({"chief_config": MachineConfig(8, 30, "some-gpu", 2)}, "mirrored", ""),
        ({"worker_count": 1}, "ring", "cpu"),
        ({"worker_count": 2}, "ring", "cpu"),
        ({"worker_count": 2, "worker_config": "V100_4X"}, "ring", ""),
        ({"worker_count": 2, "chief_config": "T4_4X"}, "ring", "cpu"),
        ({"worker_count": 2, "ps_count": 1}, "ps", "cpu"),
        ({"worker_count": 1, "ps_count": 2, "worker_config": "T4_1X"}, "ps", ""),
        ({"chief_config": "T4_4X", "distribution_strategy": "central"}, "central", ""),
        ({"distribution_strategy": "one", "chief_config": "T4_4X"}, "one", ""),
    ],
)
def test_the_automatic_table(given: dict[str, Any], strategy: str, devices: str) -> None:
    request = JobRequest(**given)
    assert (request.chosen_strategy, request.strategy_of_tasks, request.devices) == (strategy, strategy, devices)


def test_a_script_that_makes_its_own_strategy_is_told_none() -> None:
    request = JobRequest(distribution_strategy=None, worker_count=2)
    assert (request.chosen_strategy, request.strategy_of_tasks) == ("ring", "auto")


def test_the_chief_trains_alone_and_coordinates_beside_workers() -> None:
    assert JobRequest(chief_config="T4_1X").trainer == COMMON_MACHINE_CONFIGS["T4_1X"]
    beside = JobRequest(chief_config="T4_1X", worker_count=2)
    assert beside.trainer == COMMON_MACHINE_CONFIGS["CPU"]
    assert (beside.chief.cpu_cores, beside.chief.accelerator_count) == (8, 0)
    assert "1 accelerators are not requested" in beside.warning()
    assert JobRequest(worker_count=2).chief == TASK_MACHINES["chief"]
    assert JobRequest(worker_count=2).warning() == ""


def test_requirements_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "packages").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match=r"requirements_txt to be text, but .*/packages is none"):
        JobRequest(requirements_txt=tmp_path / "packages").requirements  # noqa: B018


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"distribution_strategy": "rings"}, "unknown distribution_strategy 'rings'; did you mean 'ring'"),
        ({"distribution_strategy": "MirroredStrategy"}, "unknown distribution_strategy"),
        ({"worker_count": -1}, "worker_count of at least 0, a whole number, got -1"),
        ({"ps_count": -2, "worker_count": 1}, "ps_count of at least 0, a whole number, got -2"),
        ({"worker_count": 1.5}, "whole number"),
        ({"worker_count": True}, "whole number"),
        ({"entry_point_args": "--epochs 3"}, "entry_point_args to be a list"),
        ({"entry_point_args": ["--epochs", 3]}, "entry_point_args to be a list"),
        ({"requirements_txt": "nowhere.txt"}, "there is no nowhere.txt"),
        ({"requirements_txt": 5}, "requirements_txt as a file or a list of strings, got 5"),
        ({"requirements_txt": ["numpy", 5]}, "a file or a list of strings, got ['numpy', 5]"),
        ({"chief_config": "T4_2X"}, "chief_config: expected a machine like 4:16 (cores, GiB)"),
        ({"worker_config": "cpus"}, "got 'cpus'; did you mean 'CPU'"),
        ({"ps_config": 4}, "expected ps_config to be 'auto', a name"),
        ({"ps_count": 1}, "worker_count of at least 1 with ps_count=1"),
        ({"ps_count": 1, "worker_count": 2, "distribution_strategy": "ring"}, "without parameter servers"),
        (
            {"ps_count": 1, "worker_count": 1, "distribution_strategy": "mirrored"},
            "but the cluster has 1 ps",
        ),
        ({"ps_count": 1, "worker_count": 1, "distribution_strategy": "one"}, "one process"),
        ({"worker_count": 2, "distribution_strategy": "central"}, "one process"),
        ({"worker_count": 1, "distribution_strategy": "ps"}, "at least one ps"),
        ({"distribution_strategy": "ring"}, "worker_count of at least 1"),
        ({"evaluator": True}, "evaluator needs a cluster"),
        ({"staleness": -1.0}, "staleness of at least 0"),
        ({"staleness": math.nan}, "staleness of at least 0"),
        ({"target": "kubernets"}, "unknown target 'kubernets'; did you mean 'kubernetes'"),
        ({"target": "kubernetes"}, "needs docker_image_bucket_name (--registry)"),
        ({**REGISTRY, "docker_image_bucket_name": "https://x"}, "registry like"),
        ({**REGISTRY, "docker_base_image": "a b"}, "docker_base_image to be an image"),
        ({"docker_base_image": "x"}, "leave docker_base_image out"),
        (
            {"docker_image_bucket_name": "x", "docker_build_network": "host"},
            "bucket_name, docker_build_network",
        ),
        ({"kubernetes_namespace": "x"}, "has no meaning for target='local'"),
        ({"kubernetes_storage_class": "x"}, "kubernetes_storage_class='x' has no meaning for target='local'"),
        ({**REGISTRY, "kubernetes_access_mode": "ReadWriteonce"}, "did you mean 'ReadWriteOnce'"),
        ({"job_labels": ["team"]}, "job_labels like"),
    ],
)
def test_what_cannot_work_is_refused_in_words(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        JobRequest(**given)
    assert words in str(caught.value)
