"""The status of a running job in a notebook: what the chief's page shows, live in the output of a cell."""

from __future__ import annotations

import html
import sys
import threading
from collections.abc import Mapping
from typing import Any

from stratagem.chief.monitoring.why.reading import reading_of
from stratagem.chief.monitoring.why.verdict import judge
from stratagem.chief.web.snapshot import snapshot
from stratagem.errors import StratagemError
from stratagem.launch.status import chief_from_environment, fetch_status
from stratagem.rpc.security import Security, operator_security

TIMEOUT_S = 5.0
AWAY = 10
"""Looks in vain after which it gives up."""
_COLOURS = {
    **{"forward_s": "#55a87c", "backward_s": "#2f7d5b", "optimizer_s": "#86c5a0", "script_s": "#b3c9a0"},
    **{"data_wait_s": "#e0a13c", "lease_wait_s": "#a58bd6", "rows_wait_s": "#58a8c9"},
    **{"push_s": "#6b8fe3", "wait_s": "#d2656f", "gate_wait_s": "#b65a9b", "meeting_s": "#99a1ad", "save_s": "#b7a24a"},
}


class StatusWidget:
    """Returned by :func:`status_widget`: a notebook shows it as the value of a cell."""

    def __init__(self, chief: str, every_s: float, security: Security) -> None:
        self._chief, self._every_s, self._security = chief, every_s, security
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def look(self) -> dict[str, Any]:
        """What the page of the job shows now, as plain values.

        Raises:
            PeerUnavailableError: the chief does not answer.
        """
        status = fetch_status(self._chief, TIMEOUT_S, self._security)
        reading = reading_of(status)
        return snapshot(status, reading, judge(reading))

    def close(self) -> None:
        """Stops updating; the cell keeps what it shows."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _repr_html_(self) -> str:
        return _text_of(self.look())

    def _ipython_display_(self) -> None:
        display: Any = sys.modules["IPython"].display
        shown = display.display(display.HTML(self._repr_html_()), display_id=True)

        def keep() -> None:
            in_vain = 0
            while in_vain < AWAY and not self._closed.wait(self._every_s):
                try:
                    text, in_vain = self._repr_html_(), 0
                except StratagemError as error:
                    in_vain += 1
                    text = f"<p>{html.escape(str(error))}</p>"
                shown.update(display.HTML(text))

        if self._thread is None and shown is not None:
            self._thread = threading.Thread(target=keep, name="status-widget", daemon=True)
            self._thread.start()


def status_widget(
    chief: str | None = None, *, every_s: float = 1.0, tls: str = "", token_file: str = "", insecure: bool = False
) -> StatusWidget:
    """The status of a running job in a notebook: the verdict, where each worker's step time goes, every task. It
    updates until the job is over, the kernel ends, or ``close()``.

    Args:
        chief: its host:port; None: the chief of TF_CONFIG or STRATAGEM_CHIEF.
        every_s: seconds between two updates.
        tls: folder with ca.crt and the operator's certificate; empty: no TLS.
        token_file: file with the token of the job; empty: none.
        insecure: send the token unencrypted beyond this machine.

    Raises:
        ClusterSpecError: no chief is named.
        ConfigurationError: certificates or token cannot be used.
    """
    return StatusWidget(chief_from_environment(chief), every_s, operator_security(tls, token_file, insecure))


def _text_of(look: Mapping[str, Any]) -> str:
    job, verdict = look["job"], look["verdict"]
    state = job["stop_reason"] or ("running" if job["ready"] else f"waiting for {', '.join(job['waiting_for'])}")
    loss = "" if job["loss"] is None else f" · loss {job['loss']:.4f}"
    units = f" · units {job['units_accepted']}/{job['units_planned']}" if job["units_planned"] else ""
    facts = f"{state} · epoch {job['epoch']}{units}{loss}"
    advice = f"<br><small>{html.escape(verdict['advice'])}</small>" if verdict["advice"] else ""
    longest = max([sum(worker["phases"].values()) for worker in look["workers"]], default=1.0)
    bars = "".join(_bar(worker["task"], worker["phases"], longest) for worker in look["workers"])
    rows = "".join(
        f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in _cells(task))}</tr>" for task in look["tasks"]
    )
    return (
        f"<div><p><small>{html.escape(facts)}</small><br><b>{html.escape(verdict['sentence'])}</b>{advice}</p>"
        f"<table>{bars}</table><table><tr><th>task<th>state<th>step<th>waiting on</tr>{rows}</table></div>"
    )


def _cells(task: Mapping[str, Any]) -> tuple[object, ...]:
    waiting = f"{task['waiting_on']} ({task['waiting_s']:.1f} s)" if task["waiting_on"] else "–"
    return task["task"], task["state"], task["step"], waiting


def _bar(task: str, phases: Mapping[str, float], longest: float) -> str:
    parts = "".join(
        f'<i title="{name.removesuffix("_s").replace("_", " ")}: {1e3 * phases[name]:.1f} ms" style="display:'
        f'inline-block;height:1em;width:{100 * phases[name] / longest:.2f}%;background:{colour}"></i>'
        for name, colour in _COLOURS.items()
        if name in phases
    )
    whole = f"{1e3 * sum(phases.values()):.1f} ms a step"
    return f'<tr><td>{html.escape(task)}</td><td style="width:24em;text-align:left">{parts}</td><td>{whole}</td></tr>'
