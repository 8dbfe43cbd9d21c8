"""Tables on a terminal or in a pipe: narrow enough for eighty columns, and never cut where nobody looks at them."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

FOLDED = 12  # columns in which a text that may be folded, or cut, can still be read
WIDE = 1000  # columns of what is no terminal: a program that reads it gets whole names


@dataclass(frozen=True)
class EndOf:
    """A name of which the end is shown where there is no room for all: names that are long differ there."""

    name: str

    def __str__(self) -> str:
        return self.name

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        natural = cell_len(self.name)
        return Measurement(min(natural, FOLDED), natural)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width
        yield Text(self.name if cell_len(self.name) <= room else f"…{self.name[1 - room :]}", no_wrap=True)


def plain_table(title: str) -> Table:
    """Return a table without columns and rows, of lines between head and rows only.

    What is no text of ours goes in as `Text`: of a string rich takes `[fd00::1]` for markup, and `:a:` for an emoji.
    """
    return Table(
        title=Text(title, "table.title"),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )


def fit(table: Table, width: int) -> Table:
    """Take columns away from the right until the others can be read in `width`; the caption says which.

    The first one, which says what a row is about, always stays.
    """
    gone: list[str] = []
    while len(table.columns) > 1 and _readable_width(table) > width:
        gone.insert(0, str(table.columns.pop().header))
    if gone:
        narrow = f"too narrow for: {', '.join(gone)}"
        table.caption = f"{table.caption}; {narrow}" if table.caption else narrow
    return table


def _readable_width(table: Table) -> int:
    return sum(_needed(column) for column in table.columns) + len(table.columns) - 1


def _needed(column: Column) -> int:
    natural = max(cell_len(str(text)) for text in (column.header, *column.cells))
    return natural if column.no_wrap else min(natural, FOLDED)


def console_of_any_width() -> Console:
    """Return stdout: as wide as the terminal, or as what is written."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDE)
