"""Which exit code an error of a script becomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratagem.worker.script_runner import run_script


@pytest.mark.parametrize(
    ("error", "code"), [("ConfigurationError", 2), ("ForbiddenError", 2), ("CheckpointError", 1), ("StratagemError", 1)]
)
def test_what_no_restart_can_help_is_exit_code_2(tmp_path: Path, error: str, code: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"from stratagem.errors import {error}\nraise {error}('why')\n")
    outcome = run_script(str(script), [])
    assert outcome.exit_code == code and outcome.message.startswith(f"{error}: why (at ")
