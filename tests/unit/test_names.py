"""One word, one meaning: no two classes of the product have the same name."""

from __future__ import annotations

import ast
import collections
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
