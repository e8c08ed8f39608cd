"""What a worker leaves for its launcher as its script ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratagem.worker.__main__ import REPORT_VARIABLE, _write_report
from stratagem.worker.script_runner import Outcome
from stratagem.worker.step_meter import StepMeter


@pytest.mark.parametrize("exit_code", [0, 1])
@pytest.mark.parametrize("name", ["gone/report.json", "/dev/full"])
def test_a_report_that_cannot_be_written_is_told_and_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, exit_code: int
) -> None:
    monkeypatch.setenv(REPORT_VARIABLE, str(tmp_path / name))
    monkeypatch.setattr("stratagem.worker.__main__.active_meter", StepMeter)
    _write_report(Outcome(exit_code, ""))
    reason = "No space left on device" if name == "/dev/full" else "No such file or directory"
    said = capsys.readouterr().err
    assert said == f"the summary lacks the counts of this task: {tmp_path / name}: {reason}\n"
