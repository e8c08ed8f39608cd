"""The page in a real browser: right, harmless, bounded, and there again after the chief was away."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("playwright") is None:
    pytest.skip("no playwright in this environment: make test-browser", allow_module_level=True)

from stratagem.chief.web import page_watch
from stratagem.cli.status import row
from stratagem.launch.status import fetch_status
from tests.browser.desk import browser_page, chromium, joined, say, serving, vitals
from tests.contract.chief.fakes import watches_of

pytestmark = [
    pytest.mark.skipif(chromium() is None, reason="no chromium on this machine: apt-get install chromium"),
    pytest.mark.timeout(240),
]
ROWS = "[...document.querySelectorAll('#tasks tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
STATE = "document.querySelector('#state').textContent"
SIZES = "[...document.querySelectorAll('#waits .graph text')].map((text) => text.getBoundingClientRect().height)"
LOOKS = "Number(document.body.dataset.looks ?? 0)"
SECONDS = re.compile(r"[\d.]+ s")


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 200))


async def until(page: Any, expression: str, what: str = "") -> Any:
    """Polls: the page's policy lets nothing be evaluated that waits inside it."""
    deadline = asyncio.get_running_loop().time() + 60
    while not (found := await page.evaluate(expression)):
        assert asyncio.get_running_loop().time() < deadline, what or expression
        await asyncio.sleep(0.05)
    return found


def test_it_shows_what_status_says_and_survives_its_chief(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_watch, "LIVE_S", 0.1)
    watches = watches_of(monkeypatch)

    async def scenario() -> None:
        async with serving(tmp_path, num_workers=2, num_ps=0) as desk:
            first, second = await joined(desk.running.address, 2, 0)
            await first.ready()
            for step in (10, 20):
                say(first, 0, step, 2)
                say(second, 1, 2 * step, 2)
                await asyncio.sleep(0.3)
            async with browser_page(desk.url, viewport={"width": 380, "height": 800}, color_scheme="dark") as page:
                await until(page, f"{LOOKS} > 2 && {ROWS}.length === 3 && {ROWS}[2][3] === '40'")
                await same_cells(page, desk.running.address)
                await harmless(page)
                await usable(page)
                await lets_go(page)
                num_points = await page.evaluate(LOOKS)
                await desk.kill()
                address, web = desk.running.address, desk.url.removeprefix("http://")
                await first.die()
                await second.die()
                await until(page, f"{STATE} === 'the chief does not answer'")
                assert await page.title() == "the chief does not answer · Stratagem"
                await restarted(page, tmp_path, address, web, num_points)

    async def same_cells(page: Any, address: str) -> None:
        """Those of `stratagem status`, but for how many seconds a task is silent or waits: time passes between."""
        deadline = asyncio.get_running_loop().time() + 60
        while True:
            status = await asyncio.to_thread(fetch_status, address, 10.0)
            rows = [[*shown[:9], *shown[10:]] for shown in await page.evaluate(ROWS)]
            told = [
                [cell.replace("-", "–") if cell == "-" else cell.replace("%", " %") for cell in row(task)]
                for task in status.tasks
            ]
            shown_and_told = [[[SECONDS.sub("s", cell) for cell in cells] for cells in each] for each in (rows, told)]
            if shown_and_told[0] == shown_and_told[1]:
                return
            assert asyncio.get_running_loop().time() < deadline, shown_and_told

    async def harmless(page: Any) -> None:
        await until(page, "document.querySelector('#tasks').textContent.includes('<img src=x onerror=hit()>')")
        await until(page, "document.querySelector('#lanes').textContent.includes('<script>hit()</script>')")
        assert await page.evaluate("document.querySelectorAll('img[src=x], main script').length") == 0
        assert (
            await page.evaluate(
                "new Promise((done) => { addEventListener('securitypolicyviolation', () => done('refused'));"
                "const one = document.createElement('script'); one.textContent = 'document.title = 1';"
                "document.body.append(one); one.remove(); })"
            )
            == "refused"
        )

    async def usable(page: Any) -> None:
        assert await page.evaluate("document.documentElement.scrollWidth") == 380, "nothing is wider than the screen"
        assert await page.evaluate("document.documentElement.dataset.theme") == "dark"
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.className") == "skip"
        for _ in range(40):
            await page.keyboard.press("Tab")
            if await page.evaluate("document.activeElement.id") == "theme":
                break
        await page.keyboard.press("Enter")
        assert await page.evaluate("document.documentElement.dataset.theme") == "light"

    async def lets_go(page: Any) -> None:
        """A tab that nobody sees holds no connection: a seventh tab would get none."""
        hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
        hide += "document.dispatchEvent(new Event('visibilitychange'))"
        await page.evaluate(hide % "true")
        deadline = asyncio.get_running_loop().time() + 60
        while watches[-1]._num_viewers:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.05)
        num_looks = await page.evaluate(LOOKS)
        await page.evaluate(hide % "false")
        await until(page, f"{LOOKS} > {num_looks + 2}")

    async def restarted(page: Any, folder: Path, address: str, web: str, num_looks: int) -> None:
        async with serving(folder, web, bind=address, num_workers=2, num_ps=0) as again:
            tasks = await joined(again.running.address, 2, 0)
            await until(
                page, f"{LOOKS} > {num_looks + 3} && document.querySelector('#state').textContent === 'running'"
            )
            text = "document.querySelector('#events').textContent"
            await until(page, f"{text}.includes('the chief was restarted: its epoch is 2')")
            await until(page, f"{text}.includes('the cluster is complete')")
            for task in tasks:
                await task.die()

    run(scenario)


@pytest.mark.thorough
def test_a_hundred_tasks_are_shown_without_lag_and_nothing_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_watch, "LIVE_S", 0.1)
    monkeypatch.setattr(page_watch, "PATIENCE", 0)

    async def scenario() -> None:
        async with serving(tmp_path, num_workers=96, num_ps=4) as desk:
            tasks = await joined(desk.running.address, 96, 0)
            looks: list[Any] = []
            for step in (5, 10):
                for number, task in enumerate(tasks):
                    say(task, number, step, 4)
                await asyncio.sleep(0.5)
            async with browser_page(desk.url, viewport={"width": 1280, "height": 900}) as page:
                await until(page, f"{LOOKS} > 5 && {ROWS}.length === 101")
                heights = await until(page, SIZES)
                assert min(heights) >= 10, "words of the drawing that nobody can read"
                for goal in (20, 60, 100):
                    while await page.evaluate(LOOKS) < goal:
                        for number, task in enumerate(tasks):
                            say(task, number, 10 + goal, 4)
                        await asyncio.sleep(0.3)
                    looks.append(await vitals(page))
                spent_s = (looks[2]["TaskDuration"] - looks[0]["TaskDuration"]) / 80
                print(f"{spent_s:.4f} s of the page's thread a look;", [one["JSHeapUsedSize"] for one in looks])
                assert spent_s < 0.3, "of the second that there is for it"
                assert looks[2]["Elements"] <= looks[1]["Elements"] + 100
                assert looks[2]["JSEventListeners"] == looks[1]["JSEventListeners"]
                assert looks[2]["JSHeapUsedSize"] < looks[1]["JSHeapUsedSize"] + 1e6
            for task in tasks:
                await task.die()

    run(scenario)
