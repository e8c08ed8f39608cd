"""Training, evaluating and predicting with single batches, as Keras has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stratagem.arguments import known_arguments
from stratagem.data.nested import num_examples
from stratagem.errors import ConfigurationError
from stratagem.training.callbacks.history import History
from stratagem.training.fit.sources import WEIGHTS_ALONE, Arrays
from stratagem.training.model_state import ModelState


class SingleBatches(ModelState):
    """The methods of a model for one batch, by those for many."""

    fit: Callable[..., History]
    evaluate: Callable[..., Any]
    predict: Callable[..., Any]

    @known_arguments
    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """One step of training on one GLOBAL batch, the same on every worker: a :meth:`fit` of that batch.

        Args:
            x: inputs, as arrays.
            y: targets.
            sample_weight: a weight for each example.
            class_weight: weight of each class; those not named have 1.
            return_dict: as of :meth:`evaluate`, whose result this is like, of the weights before the step.

        Raises:
            ConfigurationError: as of :meth:`fit`; or under parameter servers, whose chief leases batches of a dataset.
        """
        if self.has_servers:
            raise ConfigurationError(
                "train_on_batch is one step of all workers on one batch, and under parameter servers the chief leases "
                "batches of a dataset: use fit, or MultiWorkerMirroredStrategy"
            )
        if sample_weight is not None and y is None:
            raise ConfigurationError(WEIGHTS_ALONE)
        batch = tuple(part for part in (x, y, sample_weight) if part is not None)
        history = self.fit([Arrays(batch).parts], verbose=0, class_weight=class_weight).history
        return as_asked({name: values[-1] for name, values in history.items()}, return_dict)

    @known_arguments
    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False) -> Any:
        """:meth:`evaluate` of one batch."""
        size = num_examples(x)
        return self.evaluate(x, y, batch_size=size, sample_weight=sample_weight, verbose=0, return_dict=return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """:meth:`predict` of one batch."""
        return self.predict(x, batch_size=num_examples(x))


def as_asked(logs: dict[str, float], as_dict: bool) -> Any:
    """A dict by name; else the loss, or a list of the loss and the metrics, as in Keras."""
    values = list(logs.values())
    return logs if as_dict else values[0] if len(values) == 1 else values
