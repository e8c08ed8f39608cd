"""Whole jobs on a real cluster: the example's manifests with a pod that goes, and a script that was submitted.

The short ones; `python -m tests.deploy.kubernetes_faults` has the others, and the table.
"""

from __future__ import annotations

import os

import pytest

from tests.deploy.cluster import namespace, need_cluster
from tests.deploy.desk import Desk
from tests.deploy.kubernetes_faults import Fault, outcome_of

pytestmark = pytest.mark.timeout(1200)

TRAIN = """
import torch
import stratagem as sg

strategy = sg.strategy_from_environment()
with strategy.scope():
    model = torch.nn.Linear(2, 1)
model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))


def step(batch):
    optimizer.zero_grad()
    loss = model(batch[0]).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


data = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(16, 2) / 32)
for batch in strategy.distribute_dataset(torch.utils.data.DataLoader(data, batch_size=2)):
    strategy.run(step, args=(batch,))
print("trained with", type(strategy).__name__, "in", sg.run().id)
"""


@pytest.mark.parametrize(
    "fault",
    [
        Fault("renderer", "ps-0", "last checkpoint written", "killed"),
        pytest.param(Fault("overlay one-node", "worker-1", "training", "deleted"), marks=pytest.mark.thorough),
    ],
    ids=["ps-at-the-end", "worker"],
)
def test_a_job_completes_without_a_pod_that_goes(fault: Fault, image: str) -> None:
    need_cluster()
    came = outcome_of(fault, image)
    assert came.waiting == ""
    assert came.updates_lost == 0 and came.steps == 900


@pytest.mark.thorough
def test_a_submitted_script_trains_and_is_removed(desk: Desk, image: str, registry: str) -> None:
    need_cluster()
    (desk.folder / "train.py").write_text(TRAIN)
    where = ["--target=kubernetes", f"--registry={registry}/team", f"--base-image={image}", "--build-network=host"]
    what = ["--workers=1", "--ps=1", "--worker-config=0.4:1", "--ps-config=0.2:1", "--access-mode=ReadWriteOnce"]
    with namespace(f"submit-{os.getpid()}") as space:
        done = desk.stratagem("submit", *where, *what, f"--namespace={space.name}", "--stream-logs", "train.py")
        (job,) = desk.jobs()
        assert f"trained with ParameterServerStrategy in {job['id']}" in done.stdout
        assert (job["state"]["phase"], job["state"]["exit_code"]) == ("succeeded", 0)
        desk.stratagem("jobs", "remove", job["id"])
        space.until(lambda: not space.names(), "nothing is left")
        assert desk.jobs() == []
