"""The page of a job over real HTTP: its files, its JSON, its stream, and that nobody pays when nobody looks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.resources
import importlib.util
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import aiohttp
import pytest

from stratagem.chief import __main__ as chief_main
from stratagem.chief.membership.session import StopJob
from stratagem.chief.monitoring.status import JobStatus
from stratagem.chief.web import page_watch, serving
from stratagem.chief.web.page_watch import PageWatch
from stratagem.chief.web.serving import serve_page
from stratagem.cluster.config import ChiefConfig
from stratagem.errors import ConfigurationError
from stratagem.launch.status import fetch_status
from stratagem.rpc.logs import PACKAGE
from stratagem.rpc.security import OPEN
from tests.contract.chief.fakes import Chief, Task, chief, cluster, until, watches_of

STATIC = importlib.resources.files("stratagem.chief.web") / "static"


@contextlib.asynccontextmanager
async def page_of(running: Chief) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    config = running.job.config.model_copy(update={"web": "127.0.0.1:0"})
    server = serve_page(config, running.job, OPEN)
    try:
        async with aiohttp.ClientSession(base_url=server.url) as session:
            yield session, server.address
    finally:
        await server.stop()


async def messages(session: aiohttp.ClientSession) -> AsyncGenerator[tuple[str, Any]]:
    """Of one stream."""
    async with session.get("/api/live") as answer:
        assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/event-stream")
        name = ""
        async for line in answer.content:
            if line.startswith(b"event: "):
                name = line[7:].decode().strip()
            elif line.startswith(b"data: "):
                yield name, json.loads(line[6:])


CHANGING = (
    "state_words",
    "heartbeat_age_s",
    "suspicion",
    "waiting_s",
    "measures_age_s",
    "window_s",
    "measures",
    "earlier",
    "exposed",
)
"""What differs between two looks, or is not in the page's."""


def lasting(status: dict[str, Any]) -> dict[str, Any]:
    """What two looks at a job that does nothing have in common; JSON of Python says NaN, the page's says "nan"."""
    found = {key: value for key, value in status.items() if key not in CHANGING}
    tasks = [{key: value for key, value in task.items() if key not in CHANGING} for task in status["tasks"]]
    found["tasks"] = [{**task, "loss": str(task["loss"])} for task in tasks]
    return found


async def test_it_says_what_status_says() -> None:
    async with cluster() as (running, workers, _), page_of(running) as (session, _):
        workers[1].beat(step=7, loss=0.25, has_loss=True, step_s=0.5, exposed_s=0.1, waiting_on="ps:0 to apply")
        workers[0].beat(step=9, loss=float("nan"), has_loss=True)
        async for name, look in messages(session):
            if name == "look" and look["tasks"][2]["step"] == 7 and look["tasks"][1]["step"] == 9:
                break
        status = await asyncio.to_thread(fetch_status, running.address, 10.0)
        expected = lasting(dataclasses.asdict(status))
        async with session.get("/api/status") as answer:
            assert lasting(await answer.json()) == json.loads(json.dumps(expected))
        shown = lasting({**look["job"], "tasks": look["tasks"]})
        assert shown.pop("loss") == "nan" and [task.pop("notes") for task in expected["tasks"]]
        assert shown == json.loads(json.dumps(expected))
        async with session.get("/api/why") as answer:
            assert (await answer.json())["sentence"] == look["verdict"]["sentence"]


async def test_a_stream_begins_with_the_past_and_goes_on_with_news(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_watch, "LIVE_S", 0.05)

    PACKAGE.setLevel(logging.INFO)

    async with cluster() as (running, _, _), page_of(running) as (session, _):
        stream = messages(session)
        name, past = await anext(stream)
        assert name == "past" and past["columns"][0] == "at" and len(past["points"][0]) == len(past["columns"])
        looks, lines = [], []
        async for name, message in stream:
            if name == "look":
                looks.append(message["at"])
            else:
                lines += [line["text"] for line in message["lines"]]
            if len(looks) == 3:
                PACKAGE.getChild("chief").warning("a line of %s", "<b>somebody</b>")
            if any("<b>somebody</b>" in line for line in lines):
                break
        assert looks == sorted(set(looks))
        assert sum("<b>somebody</b>" in line for line in lines) == 1


async def test_tasks_tell_their_log_where_there_is_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_watch, "LIVE_S", 0.05)
    async with chief(num_ps=0) as running, page_of(running) as (session, _):
        tasks = [Task(running.address, f"worker:{index}", f"127.0.0.1:{index + 1}") for index in range(2)]
        for task in tasks:
            await task.welcomed()
            assert task.events[0].welcome.wants_log
            task.beat(lines=[f"{task.task} says <b>something</b>"])
        lines: set[tuple[str, str, str]] = set()
        async for name, message in messages(session):
            if name == "news":
                lines |= {(line["task"], line["level"], line["text"]) for line in message["lines"]}
            if {(task.task, "WARNING", f"{task.task} says <b>something</b>") for task in tasks} <= lines:
                break
        for task in tasks:
            await task.die()
    async with chief(num_ps=0) as running:
        task = await Task(running.address, "worker:0", "127.0.0.1:1").welcomed()
        assert not task.events[0].welcome.wants_log
        task.beat(lines=["nobody asked"])
        task.beat(step=3)
        await until(lambda: running.job.get_status().said[1][0])
        await task.die()


async def test_who_watches_sees_the_job_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_watch, "LIVE_S", 60.0)
    async with chief() as running:
        server = serve_page(running.job.config.model_copy(update={"web": "127.0.0.1:0"}), running.job, OPEN)
        async with aiohttp.ClientSession(base_url=server.url) as session:
            stream = messages(session)
            while (await anext(stream))[0] != "look":
                pass
            running.job.sessions.stopping = StopJob(0, "every worker has finished")
            stopping = asyncio.create_task(server.stop())
            async for name, message in stream:
                if name == "look" and message["job"]["stop_reason"] == "every worker has finished":
                    break
            await stream.aclose()
            await stopping


async def test_the_curves_of_a_chief_that_has_just_taken_over_begin_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They began with its second look, 10 s later."""
    monkeypatch.setattr(page_watch, "LIVE_S", 0.02)
    async with chief() as running:
        watches = watches_of(monkeypatch)
        async with page_of(running):
            await until(lambda: watches and watches[0].num_looks == page_watch.NUM_SOON)
            await asyncio.sleep(0.2)
            assert watches[0].num_looks == page_watch.NUM_SOON


async def test_nobody_pays_when_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_watch, "LIVE_S", 0.02)
    async with chief() as running:
        looks: list[object] = []
        get_status = running.job.get_status

        def look() -> JobStatus:
            looks.append(1)
            return get_status()

        monkeypatch.setattr(running.job, "get_status", look)
        watches = watches_of(monkeypatch)
        async with page_of(running) as (session, _):
            stream = messages(session)
            while len(looks) < 10:
                await anext(stream)
            await stream.aclose()
            await until(lambda: not watches[0]._num_viewers)
            num_looks = len(looks)
            await asyncio.sleep(0.5)
            assert len(looks) <= num_looks + 1


async def test_too_many_pages_are_refused_and_told_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_watch, "MAX_VIEWERS", 1)
    async with chief() as running, page_of(running) as (session, _):
        stream = messages(session)
        await anext(stream)
        async with session.get("/api/live") as answer:
            assert answer.status == 503 and await answer.text() == "1 pages are open already\n"
        async with session.head("/api/live") as answer:
            assert answer.status == 405, "who asks for the head alone would be sent the stream for ever"
        await stream.aclose()


async def test_a_page_that_reads_nothing_is_let_go(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def much(watch: PageWatch) -> AsyncIterator[tuple[str, str]]:
        while True:
            yield "look", "x" * (8 << 20)

    monkeypatch.setattr(serving, "READ_S", 0.3)
    monkeypatch.setattr(PageWatch, "messages", much)
    watches = watches_of(monkeypatch)
    async with chief() as running, page_of(running) as (_, address):
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(b"GET /api/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await until(lambda: watches and watches[0]._num_viewers)
        await until(lambda: not watches[0]._num_viewers)
        came = b""
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(1 << 20):
                came += part
        writer.close()
    assert came.count(b"HTTP/1.1") == 1 and "could not be answered" not in caplog.text


async def test_files_are_served_from_the_package_and_nothing_else_is() -> None:
    async with chief() as running, page_of(running) as (session, address):
        async with session.get("/") as answer:
            html = await answer.text()
        named = re.findall(r'(?:src|href)="(static/[^"]+)"', html)
        assert len(named) >= 5
        for path in named:
            async with session.get(f"/{path}") as answer:
                assert answer.status == 200 and answer.headers["X-Content-Type-Options"] == "nosniff"
                assert await answer.read() == (STATIC / path.removeprefix("static/")).read_bytes()
                tag = answer.headers["ETag"]
            async with session.get(f"/{path}", headers={"If-None-Match": tag}) as answer:
                assert answer.status == 304
        reader, writer = await asyncio.open_connection(*address.split(":"))
        for path in ("/static/../page.py", "/static/%2e%2e/page.py", "/static//etc/passwd", "/static/", "/api"):
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert b"404" in await reader.readline()
            length = 0
            while (line := await reader.readline()) != b"\r\n":
                length = int(line[15:]) if line.lower().startswith(b"content-length:") else length
            assert await reader.readexactly(length) == b"Not Found\n"
        writer.close()
        await writer.wait_closed()


FOREIGN = r"https?://|//cdn|@import|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\("
INLINE = r"<script(?![^>]*src=)|\son\w+=|style=\""


def test_no_file_asks_for_anything_from_elsewhere_or_writes_html() -> None:
    own = [entry for entry in STATIC.iterdir() if entry.is_file()]
    assert len(own) >= 9
    for entry in own:
        text = entry.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(f"{FOREIGN}|{INLINE}", text), entry.name


def test_what_is_missing_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"web needs aiohttp, .* pip install 'stratagem\[web\]'"):
        [*chief_main._http_servers(ChiefConfig(num_workers=1, web="127.0.0.1:0"))]
    with pytest.raises(ConfigurationError, match=r"prometheus_client and aiohttp.*'stratagem\[metrics\]'"):
        [*chief_main._http_servers(ChiefConfig(num_workers=1, metrics_bind="127.0.0.1:0"))]
