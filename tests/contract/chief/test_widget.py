"""The status in a notebook: in a kernel of its own, over real gRPC, updated while other cells run."""

from __future__ import annotations

import asyncio
import re

import nbclient
import nbformat

from tests.contract.chief.fakes import cluster
from tests.notebooks import notebook_of

CELLS = (
    "import time, stratagem as sg\nwidget = sg.status_widget({address!r}, every_s=0.05)\nwidget",
    "def step():\n    return widget.look()['tasks'][1]['step']\n"
    "until = step() + 20\nwhile step() < until:\n    time.sleep(0.05)\nwidget.close()\nprint(until - 10)",
)
HOSTILE = "<script>hit()</script>"


async def test_it_is_shown_and_kept_up_to_date() -> None:
    async with cluster(num_workers=1, num_ps=0) as (running, workers, _):

        async def train() -> None:
            step = 0
            while True:
                step += 1
                workers[0].beat(step=step, waiting_on=HOSTILE, waiting_s=2.0)
                await asyncio.sleep(0.05)

        training = asyncio.create_task(train())
        source = notebook_of(*(cell.replace("{address!r}", repr(running.address)) for cell in CELLS))
        notebook = nbformat.reads(source, as_version=4)  # type: ignore[no-untyped-call]
        client = nbclient.NotebookClient(notebook, timeout=90)
        await client.async_execute()
        training.cancel()
        shown = notebook.cells[0].outputs[0].data["text/html"]
        told = int(notebook.cells[1].outputs[0].text)
        found = re.search(r"<td>worker:0</td><td>live</td><td>(\d+)</td>", shown)
        assert found is not None and int(found[1]) >= told, shown
        assert "<b>no worker has finished a step yet</b>" in shown
        assert "&lt;script&gt;hit()" in shown and "<script" not in shown
