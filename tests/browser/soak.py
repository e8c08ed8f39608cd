"""``python -m tests.browser.soak --minutes 60``: what a page that is looked at for long holds, and its chief."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
from pathlib import Path

import click

from stratagem.chief.web import page_watch
from tests.browser.desk import browser_page, joined, say, serving, vitals


@click.command()
@click.option("--minutes", default=60.0, show_default=True)
@click.option("--every-s", default=1.0, show_default=True, help="Between two looks; the page's own pace is 1.")
@click.option("--workers", default=8, show_default=True)
def main(minutes: float, every_s: float, workers: int) -> None:
    """Fails if the page holds more at the end than after a quarter of the time (and a half more), or the process of the
    chief (and a quarter more)."""
    page_watch.LIVE_S = every_s
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(soak(Path(folder), 60 * minutes, workers))


async def soak(folder: Path, duration_s: float, num_workers: int) -> None:
    """Prints, every twentieth of the time, looks, elements and heap."""
    loop = asyncio.get_running_loop()
    async with serving(folder, num_workers=num_workers, num_ps=0) as desk:
        tasks = await joined(desk.running.address, num_workers, 0)
        began, kept = loop.time(), []
        async with browser_page(desk.url) as page:
            for part in range(1, 21):
                while loop.time() < began + duration_s * part / 20:
                    step = int(10 * (loop.time() - began))
                    for number, task in enumerate(tasks):
                        say(task, number, step, 2)
                    await asyncio.sleep(0.5)
                gc.collect()
                resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                kept.append(one := await vitals(page) | {"Resident": resident})
                print(
                    f"{loop.time() - began:.0f} s: {one['Looks']:.0f} looks, {one['Elements']:.0f} elements, "
                    f"{one['JSHeapUsedSize'] / 1e6:.2f} MB; the chief's process has {resident / 1e6:.1f} MB",
                    flush=True,
                )
        for task in tasks:
            await task.die()
    early, late = kept[4], kept[-1]
    assert late["Resident"] < 1.25 * early["Resident"]
    assert late["JSHeapUsedSize"] < 1.5 * early["JSHeapUsedSize"] and late["Elements"] < 1.5 * early["Elements"]


if __name__ == "__main__":
    main()
