"""The packages named in pyproject.toml are the folders that exist: a missing one would be absent from the wheel."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
ROLES = ("chief", "ps", "worker")


def _packages_in_folders() -> set[str]:
    found = set()
    for top, name in [(ROOT / "stratagem", "stratagem"), *((ROOT / role, f"stratagem.{role}") for role in ROLES)]:
        for path in top.rglob("*.py"):  # does not follow the links under stratagem/
            found.add(".".join([name, *path.relative_to(top).parts[:-1]]))
    return found


def test_packages_are_the_folders() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(project["tool"]["setuptools"]["packages"]) == _packages_in_folders()


def test_every_package_has_an_init() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for package in project["tool"]["setuptools"]["packages"]:
        assert (ROOT / package.replace(".", "/") / "__init__.py").is_file(), package


def test_the_files_of_the_page_are_data_of_its_package_and_others_have_their_licence() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folder = ROOT / "chief" / "web"
    named = {
        path
        for glob in project["tool"]["setuptools"]["package-data"]["stratagem.chief.web"]
        for path in folder.glob(glob)
    }
    there = {path for path in (folder / "static").rglob("*") if path.is_file()}
    assert there == {path for path in named if path.is_file()}
    for vendored in (folder / "static" / "vendor").iterdir():
        assert "Copyright" in (vendored / "LICENSE").read_text(), vendored


def test_links_show_the_role_folders() -> None:
    for role in ROLES:
        link = ROOT / "stratagem" / role
        assert link.is_symlink() and link.readlink() == Path("..") / role


def test_every_pin_satisfies_its_range() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    names = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *extras["test"], *extras["dev"], *extras["examples"]]:
        requirement = Requirement(text)
        if requirement.name == "stratagem":  # its own extra
            continue
        pin = names[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(pin), f"{text} does not allow the tested {pin}"
