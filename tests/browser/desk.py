"""A chief with its page, tasks that say what they are told to, and a browser that looks at it."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from playwright.async_api import Page, async_playwright

from stratagem.chief.web.http_server import HttpServer
from stratagem.chief.web.serving import serve_page
from stratagem.measuring import measures
from stratagem.rpc.security import OPEN
from tests.contract.chief.fakes import Chief, Task, chief

HOSTILE = "<img src=x onerror=hit()><script>hit()</script>"


def chromium() -> str | None:
    """Where it is; None: nowhere."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@contextlib.asynccontextmanager
async def browser_page(url: str, **options: Any) -> AsyncIterator[Page]:
    """The page in a browser of its own; an error in the page, or a look beyond its origin, is an error."""
    async with async_playwright() as driver:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = await driver.chromium.launch(executable_path=chromium(), args=arguments)
        context = await browser.new_context(**options)
        page = await context.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith(url) else problems.append(asked.url))
        await page.goto(url)
        yield page
        await browser.close()
        assert not problems


class Desk:
    """A chief and the server of its page."""

    def __init__(self, running: Chief, server: HttpServer) -> None:
        self.running, self.url = running, server.url
        self._server = server
        self._is_dead = False

    async def kill(self) -> None:
        """As kill -9 of the chief's process does."""
        if not self._is_dead:
            self._is_dead = True
            await self._server.stop()
            await self.running.kill()


@contextlib.asynccontextmanager
async def serving(folder: Path, web: str = "127.0.0.1:0", **config: Any) -> AsyncIterator[Desk]:
    """A chief that keeps a journal in ``folder``, and its page."""
    async with chief(state_dir=str(folder), session_grace_s=60.0, **config) as running:
        settings = running.job.config.model_copy(update={"web": web})
        desk = Desk(running, serve_page(settings, running.job, OPEN))
        try:
            yield desk
        finally:
            await desk.kill()


async def joined(address: str, num_workers: int, num_ps: int) -> list[Task]:
    """Workers and ps that have been welcomed."""
    names = [f"worker:{n}" for n in range(num_workers)] + [f"ps:{n}" for n in range(num_ps)]
    tasks = [Task(address, name) for name in names]
    for task in tasks:
        await task.welcomed()
    return tasks


def say(worker: Task, number: int, step: int, peers: int) -> None:
    """A worker has done so many steps: different ones in different workers."""
    spent = {
        measures.FORWARD: 0.02 * step,
        measures.BACKWARD: 0.036 * step,
        measures.OPTIMIZER: 0.003 * step,
        measures.SCRIPT: 0.001 * step,
        measures.DATA_WAIT: 0.01 * step,
        measures.PUSH: 0.004 * step,
        measures.WAIT: 0.02 * step * (1 + number % 3),
        measures.LEASE_WAIT: 0.001 * step,
        measures.STEPS: step,
    }
    for peer in range(peers):
        name = f"ps:{peer}"
        spent[measures.labelled(measures.PEER_WAIT, name)] = spent[measures.WAIT] / peers
        spent[measures.labelled(measures.SENT, f"{name}/tcp")] = 4e6 * step
        spent[measures.labelled(measures.RECEIVED, f"{name}/tcp")] = 4e6 * step
        spent[measures.labelled(measures.ROUND_TRIP, f"{name}/tcp")] = 2e-4
    notes = {"host": f"host-{number % 8}", "lane|ps:0": f"tcp, because {HOSTILE}"}
    loss = 2.0 * math.exp(-step / 200) + 0.1
    worker.beat(
        {"values": spent, "notes": notes},
        [f"step {step}: {HOSTILE}"] if step % 5 == number % 5 else (),
        step=step,
        examples=32 * step,
        loss=loss,
        has_loss=True,
        step_s=0.1,
        exposed_s=0.025,
        waiting_on=f"{HOSTILE} ps:0" if number == 1 else "",
        waiting_s=2.5 if number == 1 else 0.0,
    )


async def vitals(page: Page) -> dict[str, float]:
    """What the page holds, garbage collected: metrics of Chromium, and its looks and elements."""
    session = await page.context.new_cdp_session(page)
    await session.send("Performance.enable")
    await session.send("HeapProfiler.collectGarbage")
    found = {one["name"]: one["value"] for one in (await session.send("Performance.getMetrics"))["metrics"]}
    await session.detach()
    found["Elements"] = await page.evaluate("document.querySelectorAll('*').length")
    return found | {"Looks": await page.evaluate("Number(document.body.dataset.looks ?? 0)")}
