"""Tables on a terminal or in a pipe: narrow enough for eighty columns, and never cut where nobody looks at them."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

WIDE = 1000  # columns of what is no terminal: a program that reads it gets whole names


def plain_table(title: str) -> Table:
    """Return a table without columns and rows, of lines between head and rows only."""
    return Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )


def console_of_any_width() -> Console:
    """Return stdout: as wide as the terminal, or as what is written."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDE)
