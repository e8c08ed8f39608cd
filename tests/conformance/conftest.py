"""Gives each law the results of its scenario on each column, and writes the matrix with ``--write-matrix``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.law import LAWS, Law, Scenario
from tests.conformance.matrix import MATRIX, render, ticked
from tests.conformance.outcomes import Launches, in_this_process
from tests.conformance.strategies import COLUMNS, Column

_WANTED = pytest.StashKey[dict[Column, list[Scenario]]]()
_PASSED = pytest.StashKey[set[tuple[Law, Column]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-matrix", action="store_true", help="write docs/conformance.md from what passed")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "law(law): a row of the conformance matrix")
    config.stash[_PASSED] = set()
    if config.getoption("--write-matrix", False) and config.getoption("numprocesses", None):
        raise pytest.UsageError("--write-matrix needs all outcomes in one process: leave -n out")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if (found := _law_and_column(item)) is None or found[1].is_here]
    if config.getoption("--write-matrix", False):  # what is about to be written cannot be compared
        items[:] = [item for item in items if item.path.name != "test_matrix.py"]


def pytest_collection_finish(session: pytest.Session) -> None:
    wanted: dict[Column, list[Scenario]] = {}
    for item in session.items:
        found = _law_and_column(item)
        if found is not None and found[0].scenario is not None:
            scenarios = wanted.setdefault(found[1], [])
            if found[0].scenario not in scenarios:
                scenarios.append(found[0].scenario)
    session.config.stash[_WANTED] = wanted


@pytest.fixture(scope="session")
def launches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, preloaded: None) -> Launches:
    """Real processes; the folder is that of all pytest processes of the session."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if hasattr(request.config, "workerinput") else base
    wanted = request.config.stash[_WANTED]
    return Launches(shared / "conformance", wanted)


@pytest.fixture
def results(request: pytest.FixtureRequest, column: Column, launches: Launches) -> list[Any]:
    """What the scenario of the law returned, of each worker, in worker order."""
    law = request.node.get_closest_marker("law").args[0]
    if column.build is not None:
        outcomes = in_this_process(column, law.scenario)
    else:
        outcomes = launches.outcomes(column, law.scenario)
    errors = [f"worker {at}: {one['error']}: {one['message']}" for at, one in enumerate(outcomes) if "error" in one]
    if errors:
        pytest.fail("\n".join(errors))
    return [one["value"] for one in outcomes]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    found = _law_and_column(item)
    if found is not None:
        passed = item.config.stash[_PASSED]
        if report.when == "call" and report.passed:
            passed.add(found)
        elif report.failed:  # a leak is told after the call
            passed.discard(found)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--write-matrix", False):
        passed = session.config.stash[_PASSED]
        missing = {(law, column) for law in LAWS.values() for column in law.columns if column.is_here} - passed
        if missing:
            pytest.exit(f"the matrix is not written: {len(missing)} of its cells did not pass", returncode=1)
        elsewhere = {column.title for column in COLUMNS if not column.is_here}
        before = {cell for cell in ticked(MATRIX.read_text(encoding="utf-8")) if cell[1] in elsewhere}
        every = before | {(law.text, column.title) for law, column in passed}
        MATRIX.write_text(render(list(LAWS.values()), every), encoding="utf-8")


def _law_and_column(item: pytest.Item) -> tuple[Law, Column] | None:
    marker = item.get_closest_marker("law")
    if marker is None or not isinstance(item, pytest.Function):
        return None
    law: Law = marker.args[0]
    column = item.callspec.params["column"]
    assert isinstance(column, Column)
    return law, column
