"""Whether this Python has what a job needs."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement

from stratagem.errors import ConfigurationError


def check_installed(requirements: str) -> None:
    """Refuses requirements that this Python does not meet: a local job installs nothing.

    Args:
        requirements: text of a requirements file.

    Raises:
        ConfigurationError: names those that are missing.
    """
    missing = []
    for line in requirements.splitlines():
        text = line.split(" #")[0].strip()
        if not text or text.startswith(("#", "-")):
            continue
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # a path or an address: pip knows
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            missing.append(text)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            missing.append(f"{text} (installed: {version})")
    if missing:
        raise ConfigurationError(
            f"a local job runs in this Python, which lacks {', '.join(missing)}: install it with pip first"
        )
