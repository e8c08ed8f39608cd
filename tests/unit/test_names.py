"""One word, one meaning: no two classes of the product have the same name, and what the pages name is there."""

from __future__ import annotations

import ast
import collections
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_class_names_are_unique() -> None:
    homes: dict[str, set[str]] = collections.defaultdict(set)
    for top in ("stratagem", "chief", "ps", "worker"):
        for path in (ROOT / top).rglob("*.py"):  # does not follow the links under stratagem/
            if path.parent.name == "generated":
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    homes[node.name].add(str(path.relative_to(ROOT)))
    assert len(homes) > 300
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_files_that_pages_name_are_there() -> None:
    tops = ("stratagem", "chief", "ps", "worker", "tests", "benchmarks", "examples")
    known = [f"/{path.relative_to(ROOT)}" for top in tops for path in (ROOT / top).rglob("*.py")]
    pages = [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md", *(ROOT / "docs" / "design").glob("*.md")]
    named = {(page.name, name) for page in pages for name in re.findall(r"`([\w./]+\.py)`", page.read_text())}
    assert len(named) > 100
    assert {pair for pair in named if not any(path.endswith(f"/{pair[1]}") for path in known)} == set()
