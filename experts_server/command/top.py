"""`experts-server top`: a live view of a server's experts, made of its `/metrics`."""

from __future__ import annotations

import contextlib
import functools
import http.client
import itertools
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from experts_server.command.tables import (
    EndOf,
    can_redraw,
    console_of_any_width,
    fit,
    fit_screen,
    plain_table,
)
from moe_autograd._natural_order import natural_order
from moe_autograd.errors import ServerUnavailableError

Totals = dict[tuple[str, str], float]  # (expert, what) -> total so far

_SHOWN = {
    "experts_calls_total": "calls",
    "experts_failed_calls_total": "failed",
    "experts_tokens_total": "tokens",
    "experts_compute_seconds_sum": "compute_s",
    "experts_compute_seconds_count": "batches",
    "experts_queue_seconds_sum": "queue_s",
    "experts_queue_calls": "waiting",
    "experts_updates": "updates",
}
_OF_EACH_SERVER = "experts_server_ready "


@dataclass
class Reading:
    """One look at the metrics."""

    at: float
    totals: Totals = field(default_factory=dict)

    def of(self, expert: str, what: str) -> float:
        """Return a total; 0 where there is none."""
        return self.totals.get((expert, what), 0.0)


def read(address: str, timeout_s: float = 10.0) -> Reading:
    """Ask `http://ADDRESS/metrics`.

    Raises:
        ServerUnavailableError: nobody answers there, or not with metrics.
    """
    no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on loopback, or next door
    try:
        with no_proxy.open(f"http://{address}/metrics", timeout=timeout_s) as reply:
            totals = _totals_in(reply.read().decode())
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ServerUnavailableError(
            f"metrics at {address}: expected an answer, got {_in_words(error)}. "
            "Is the server started with metrics_listen, and this its address?"
        ) from error
    return Reading(time.monotonic(), totals)


def _totals_in(text: str) -> Totals:
    """Return what is shown of an answer; raises `ValueError` if that is not of a server of experts, or not whole."""
    totals: Totals = {}
    lines = text.splitlines()
    if not any(line.startswith(_OF_EACH_SERVER) for line in lines):
        raise ValueError("no experts_server_ready among its lines")
    shown = [line for line in lines if line.partition("{")[0] in _SHOWN]  # most are of histograms
    for family in text_string_to_metric_families("\n".join([*shown, ""])):
        for sample in family.samples:
            what, expert = _SHOWN.get(sample.name), sample.labels.get("expert")
            if what is not None and expert is not None:
                totals[expert, what] = totals.get((expert, what), 0.0) + sample.value
    return totals


def _in_words(error: Exception) -> str:
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, http.client.RemoteDisconnected):
        return "one that is no HTTP"  # what came instead would move the cursor
    reason = getattr(error, "reason", None)  # `URLError` wraps it
    return repr(getattr(reason, "strerror", None) or str(error))


class _Row(NamedTuple):
    """What an expert did between two readings, and what it had done by the later one."""

    added: dict[str, float]
    total: dict[str, float]
    elapsed_s: float


_COLUMNS: dict[str, Callable[[_Row], str]] = {
    "calls/s": lambda row: f"{row.added['calls'] / row.elapsed_s:,.1f}",
    "tokens/s": lambda row: f"{row.added['tokens'] / row.elapsed_s:,.0f}",
    "busy %": lambda row: f"{100 * row.added['compute_s'] / row.elapsed_s:.0f}",
    "queue ms": lambda row: f"{1000 * row.added['queue_s'] / max(row.added['calls'], 1):.2f}",
    "compute ms": lambda row: f"{1000 * row.added['compute_s'] / max(row.added['batches'], 1):.2f}",
    "waiting": lambda row: f"{row.total['waiting']:.0f}",
    "failed": lambda row: f"{row.total['failed']:.0f}",
    "updates": lambda row: f"{row.total['updates']:,.0f}",
}


def table_of(address: str, before: Reading, now: Reading, max_rows: int | None = None) -> Table:
    """Return what happened between two readings, by expert; where there are too many, the busiest of them."""
    elapsed_s = max(now.at - before.at, 1e-9)
    table = plain_table(f"experts at {address}, last {elapsed_s:.1f} s")
    table.add_column("expert")
    for heading in _COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    names = dict.fromkeys(name for name, _ in now.totals)
    rows = {name: _row_of(name, before, now, elapsed_s) for name in names}
    busiest = sorted(rows, key=lambda name: (-rows[name].added["compute_s"], -rows[name].added["calls"]))
    shown = sorted(busiest[:max_rows], key=natural_order)
    for name in shown:
        table.add_row(EndOf(name), *(show(rows[name]) for show in _COLUMNS.values()))
    if len(shown) < len(rows):
        table.caption = f"the busiest {len(shown)} of {len(rows)}"
    return table


def _row_of(expert: str, before: Reading, now: Reading, elapsed_s: float) -> _Row:
    """Compare the totals; a server that was started anew begins at zero."""
    total = {what: now.of(expert, what) for what in _SHOWN.values()}
    old = {what: before.of(expert, what) for what in total}
    added = {what: new - old[what] if new >= old[what] else new for what, new in total.items()}
    return _Row(added, total, elapsed_s)


def watch(address: str, interval_s: float, num_looks: int | None) -> None:
    """Show the table again and again until Ctrl-C, or `num_looks` times.

    In a pipe and on a dumb terminal, one below the other.

    Raises:
        ServerUnavailableError: nobody answers at the first look, or at the last of `num_looks`.
    """
    console = console_of_any_width()
    with contextlib.suppress(KeyboardInterrupt):
        tables = _tables(address, interval_s, num_looks, console)
        if not can_redraw(console):
            next(tables)  # nothing has happened between two equal readings
            for table in tables:
                console.print(table)
            return
        with Live(next(tables), console=console, auto_refresh=False) as live:
            for table in tables:
                live.update(table, refresh=True)


def _tables(
    address: str, interval_s: float, num_looks: int | None, console: Console
) -> Iterator[Table | Text]:
    """Make the first table at once, and the others as time goes by; while the server is away, a line that says so."""
    before = now = read(address)
    away: ServerUnavailableError | None = None
    for look in itertools.count():
        if away is None and can_redraw(console):
            yield fit_screen(functools.partial(table_of, address, before, now), console)
        elif away is None:
            yield fit(table_of(address, before, now), console.width)
        else:
            yield Text(f"experts at {address}, away for {time.monotonic() - now.at:.1f} s: {away}")
        if look == num_looks:
            return
        time.sleep(interval_s)
        try:
            before, now, away = now, read(address), None
        except ServerUnavailableError as error:  # it may be back at the next look
            if look + 1 == num_looks:
                raise
            away = error
