"""The results of each epoch: kept for the caller of ``fit``, and as lines of a CSV file."""

from __future__ import annotations

import csv
import io
import locale
import logging
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratagem.arguments import checked, warn_once
from stratagem.checkpoint.durable import append, way_out
from stratagem.errors import ConfigurationError
from stratagem.training.callbacks.base import Callback, LogsArgument

logger = logging.getLogger(__name__)


class History(Callback):
    """Keeps the logs of the epochs; ``fit`` returns it."""

    def __init__(self) -> None:
        self.history: dict[str, list[float]] = {}
        """By name in the logs: a value for each epoch."""
        self.epoch: list[int] = []

    def on_train_begin(self, logs: LogsArgument = None) -> None:
        self.history, self.epoch = {}, []

    def on_epoch_end(self, epoch: int, logs: LogsArgument = None) -> None:
        self.epoch.append(epoch)
        logs = {} if logs is None else logs
        for name, value in logs.items():
            try:
                number = float(value)
            except (TypeError, ValueError, RuntimeError, OverflowError):
                raise ConfigurationError(
                    f"logs[{name!r}] is a {type(value).__name__}, put there by a callback, but logs hold one number "
                    "for each name: keep anything else in the callback itself"
                ) from None
            logs[name] = number  # what shows it can read tensors and truth values by this alone
            self.history.setdefault(name, []).append(number)

    on_epoch_missed = on_epoch_end

    def state_dict(self) -> dict[str, Any]:
        return {"history": {name: list(values) for name, values in self.history.items()}, "epoch": list(self.epoch)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history = {name: list(values) for name, values in state["history"].items()}
        self.epoch = list(state["epoch"])


@checked
class CSVLogger(Callback):
    """Writes a line for each epoch, on the lead. The columns are those of the logs; a column that appears
    later, for example with a first validation, is added to the earlier lines. Lines that cannot be written wait.

    Args:
        filename: path of the file, in an existing folder.
        separator: between columns.
        append: appends to an existing file instead of overwriting it.
    """

    def __init__(self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False) -> None:
        if len(separator) != 1:
            raise ConfigurationError(f"expected a separator of one character, got {separator!r}")
        self._path = Path(filename)
        self._separator = separator
        self._append = append
        self._columns: list[str] | None = None
        self._waiting: deque[dict[str, Any]] = deque()
        self._takes_over = False

    def on_train_begin(self, logs: LogsArgument = None) -> None:
        self._columns, self._takes_over = None, False
        self._waiting.clear()
        if self.model.strategy.is_lead and not self._path.parent.is_dir():
            raise ConfigurationError(f"CSVLogger cannot write {self._path}: there is no folder {self._path.parent}")

    def on_epoch_end(self, epoch: int, logs: LogsArgument = None) -> None:
        if not self.model.strategy.is_lead:  # asked each time: a lead may die
            self._takes_over = True
            return
        self._waiting.append({"epoch": epoch, **(logs or {})})
        try:
            while self._waiting:
                self._write(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            advice = way_out(error, "make it writable")
            warn_once(logger, f"no lines in {self._path} at present: {error.strerror}; {advice}, and they go on")

    def _write(self, values: Mapping[str, Any]) -> None:
        if self._columns is None:
            self._columns = self._begin(list(values), values["epoch"])
        if new := [name for name in values if name not in self._columns]:
            self._columns = self._add(new)
        line = io.StringIO(newline="")
        csv.DictWriter(line, self._columns, "NA", delimiter=self._separator).writerow(values)
        append(self._path, line.getvalue().encode(locale.getpreferredencoding(False)))

    def on_epoch_missed(self, epoch: int, logs: LogsArgument = None) -> None:
        if self._columns is not None or not self._append:  # else this process before it may have written it
            self.on_epoch_end(epoch, logs)

    def _begin(self, columns: list[str], epoch: int) -> list[str]:
        """The columns: those of the file that is gone on with, else ``columns``, in a new file."""
        if (self._append or self.model.is_resumed or self._takes_over) and self._path.exists():
            rows = self._read()
            if self.model.is_resumed:  # what was written after the backup comes again
                before = [number for number, row in enumerate(rows) if row[:1] == [str(epoch - 1)]]
                kept = rows[: before[-1] + 1] if before else rows
                if not self._append:  # all of the file is of this training, which may go on in its first epoch
                    kept = [row for row in rows if not "".join(row[:1]).isdecimal() or int(row[0]) < epoch]
                if len(kept) < len(rows):
                    self._replace(kept)
            if rows and rows[0]:
                return rows[0]
        with self._path.open("w", newline="") as file:
            csv.writer(file, delimiter=self._separator).writerow(columns)
        return columns

    def _add(self, names: list[str]) -> list[str]:
        """The columns, of which these are new."""
        header, *rows = self._read()
        self._replace([header + names, *(row + ["NA"] * len(names) for row in rows)])
        return header + names

    def _read(self) -> list[list[str]]:
        with self._path.open(newline="") as file:
            return list(csv.reader(file, delimiter=self._separator))

    def _replace(self, rows: list[list[str]]) -> None:
        draft = self._path.with_name(f".{self._path.name}")
        with draft.open("w", newline="") as file:
            csv.writer(file, delimiter=self._separator).writerows(rows)
        draft.replace(self._path)
