"""No module of the product imports itself round a circle, in functions and under TYPE_CHECKING neither."""

from __future__ import annotations

import pytest

grimp = pytest.importorskip("grimp", reason="comes with import-linter, which is for development")


def circles(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """What is left when modules that import none of the others, and those that none of them imports, are taken away."""
    left = {module: set(imported) for module, imported in imports.items()}
    while True:
        wanted = set().union(*left.values()) if left else set()
        some = {module for module, imported in left.items() if not imported & left.keys() or module not in wanted}
        if not some:
            return left
        left = {module: imported & left.keys() - some for module, imported in left.items() if module not in some}


def test_a_circle_is_found() -> None:
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set[str]()}
    assert circles(arrows).keys() == {"b", "c"}


def test_there_is_no_circle() -> None:
    graph = grimp.build_graph("stratagem", exclude_type_checking_imports=False, cache_dir=None)
    assert len(graph.modules) > 400
    assert circles({module: graph.find_modules_directly_imported_by(module) for module in graph.modules}) == {}
