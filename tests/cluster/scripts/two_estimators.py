"""Two Estimators in one script that names no strategy: both train with that of the job."""

from __future__ import annotations

import argparse
from pathlib import Path

from stratagem import Estimator
from tests.cluster.scripts.estimate import input_fn, net_fn

parser = argparse.ArgumentParser()
parser.add_argument("--model-dir", type=Path, required=True)
options = parser.parse_args()
for name in ("first", "second"):
    trained = Estimator(net_fn, options.model_dir / name).train(input_fn, steps=3)
    assert trained.latest_checkpoint(), "train has saved when it returns, whoever saves"
