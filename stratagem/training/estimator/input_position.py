"""The place in the data as a part of a checkpoint that may be restored with other data."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from stratagem.data.split_dataset import SplitDataset
from stratagem.errors import ConfigurationError

logger = logging.getLogger(__name__)


class InputPosition:
    """Takes and gives back the position of a dataset.

    Args:
        dataset: None: it has none that a checkpoint could keep; parameter servers' chief knows it.
    """

    def __init__(self, dataset: SplitDataset | None) -> None:
        self._dataset = dataset

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"dataset": None if self._dataset is None else self._dataset.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes there; where the data is not what it was, it starts at its beginning."""
        if self._dataset is None or state["dataset"] is None:
            return
        try:
            self._dataset.load_state_dict(state["dataset"])
        except ConfigurationError as error:
            logger.warning("The input starts at its beginning, because it is not what it was: %s", error)
