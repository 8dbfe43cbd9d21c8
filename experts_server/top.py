"""`experts-server top`: a live view of a server's experts, made of its `/metrics`."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.live import Live
from rich.table import Table

from experts_server.names import natural_order
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
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=timeout_s) as reply:
            text = reply.read().decode()
    except (OSError, ValueError) as error:
        raise ServerUnavailableError(
            f"metrics at {address}: expected an answer, got {error}. Is the server started with metrics_listen?"
        ) from error
    reading = Reading(time.monotonic())
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            what, expert = _SHOWN.get(sample.name), sample.labels.get("expert")
            if what is not None and expert is not None:
                reading.totals[expert, what] = reading.of(expert, what) + sample.value
    return reading


def table_of(address: str, before: Reading, now: Reading) -> Table:
    """Return what happened between two readings, by expert."""
    elapsed_s = max(now.at - before.at, 1e-9)
    table = Table(title=f"experts at {address}, last {elapsed_s:.1f} s")
    headings = (
        "expert",
        "calls/s",
        "tokens/s",
        "busy %",
        "queue ms",
        "compute ms",
        "waiting",
        "failed",
        "updates",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "expert" else "right")
    for expert in sorted({name for name, _ in now.totals}, key=natural_order):
        since = {what: now.of(expert, what) - before.of(expert, what) for what in _SHOWN.values()}
        table.add_row(
            expert,
            f"{since['calls'] / elapsed_s:,.1f}",
            f"{since['tokens'] / elapsed_s:,.0f}",
            f"{100 * since['compute_s'] / elapsed_s:.0f}",
            f"{1000 * since['queue_s'] / max(since['calls'], 1):.2f}",
            f"{1000 * since['compute_s'] / max(since['batches'], 1):.2f}",
            f"{now.of(expert, 'waiting'):.0f}",
            f"{now.of(expert, 'failed'):.0f}",
            f"{now.of(expert, 'updates'):,.0f}",
        )
    return table


def watch(address: str, interval_s: float, num_looks: int | None) -> None:
    """Show the table again and again until Ctrl-C, or `num_looks` times."""
    before = read(address)
    with Live(table_of(address, before, before), console=Console(), auto_refresh=False) as live:
        looks = 0
        while num_looks is None or looks < num_looks:
            time.sleep(interval_s)
            now = read(address)
            live.update(table_of(address, before, now), refresh=True)
            before, looks = now, looks + 1
