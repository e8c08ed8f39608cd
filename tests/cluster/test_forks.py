"""What :mod:`tests.forks` forks, and what it executes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import forks


def test_a_folder_that_torch_names_when_its_compiler_is_loaded_is_no_reason_to_start_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    script = "import os, sys; print('torch' in sys.modules, os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    done = forks.run([sys.executable, "-c", script], timeout=60)
    assert done.stdout.split() == ["True", str(tmp_path)], done.stderr
