"""Callbacks of a worker of parameter servers that was not there when others lived an epoch."""

from __future__ import annotations

from types import SimpleNamespace

from stratagem.training.callbacks import EarlyStopping


def test_a_worker_without_the_best_weights_meets_those_who_load_them() -> None:
    met: list[bool] = []
    stopping = EarlyStopping("loss", restore_best_weights=True)
    strategy = SimpleNamespace(is_lead=False, barrier=lambda: met.append(True))
    stopping.set_model(SimpleNamespace(has_servers=True, strategy=strategy))  # type: ignore[arg-type]
    stopping.on_train_end()
    assert met
