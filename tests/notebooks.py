"""Notebooks of tests, and a program that runs one in a kernel of its own, as Jupyter does."""

from __future__ import annotations

import json

EXECUTE = """
import sys
import nbclient
import nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=float(sys.argv[2])).execute()
print("".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())))
"""
"""Arguments: a notebook's file, and the seconds that one cell may take. Prints what the cells print."""


def notebook_of(*cells: str) -> str:
    """The file of a notebook with these code cells."""
    written = [
        {"cell_type": "code", "id": f"cell-{index}", "metadata": {}, "source": source, "outputs": []}
        | {"execution_count": None}
        for index, source in enumerate(cells)
    ]
    return json.dumps({"cells": written, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
