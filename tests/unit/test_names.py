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


def test_what_the_map_says_to_change_is_there() -> None:
    """Names of code in a row of the table of docs/architecture.md stand in the files that the row names."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| (.+) \|$", page.partition("## Where to change")[2], re.MULTILINE)
    tops = ("stratagem", "chief", "ps", "worker")
    code = {path: path.read_text() for top in tops for path in (ROOT / top).rglob("*.py")}
    names, missing = 0, []
    for row in rows:
        files = [
            text for name in re.findall(r"`([\w./]+\.py)`", row) for path, text in code.items() if path.match(name)
        ]
        for name in re.findall(r"`(\w+(?:\.(?!py`|js`)\w+)?)`", row):
            names += 1
            if not any(re.search(rf"\b{name.rpartition('.')[2]}\b", text) for text in files or code.values()):
                missing.append((name, row))
    assert names > 20
    assert missing == []
