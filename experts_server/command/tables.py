"""Tables on a terminal or in a pipe: narrow enough for eighty columns, and never cut where nobody looks at them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
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


def fit_screen(table_of: Callable[[int], Table], console: Console) -> Table:
    """Return the table of as many rows at most as a terminal has lines for, beside all others as they are folded.

    Where there is no line for the first row, its caption goes, and if need be its title.
    """
    room = console.height - 1  # the last one is the cursor's
    num_rows, num_over = room, 0
    while True:
        num_rows = max(1, num_rows - num_over)
        table = fit(table_of(num_rows), console.width)
        num_over = _num_lines(table, console) - room
        if num_over <= 0:
            return table
        if num_rows == 1:
            break
        num_rows = min(num_rows, table.row_count)
    table.caption = None
    if _num_lines(table, console) > room:
        table.title = None
    return table


def _num_lines(table: Table, console: Console) -> int:
    return len(console.render_lines(table, pad=False))


def _readable_width(table: Table) -> int:
    return sum(_needed(column) for column in table.columns) + len(table.columns) - 1


def _needed(column: Column) -> int:
    natural = max(cell_len(str(text)) for text in (column.header, *column.cells))
    return natural if column.no_wrap else min(natural, FOLDED)


def console_of_any_width() -> Console:
    """Return stdout: as wide as the terminal, or as what is written."""
    console = Console()
    if console.is_dumb_terminal:  # rich would take each for one of 80 columns
        return Console(width=shutil.get_terminal_size().columns, height=WIDE)
    return console if console.is_terminal else Console(width=WIDE)


def can_redraw(console: Console) -> bool:
    """Whether a table can take the place of the one before: in a terminal that is not dumb."""
    return console.is_terminal and not console.is_dumb_terminal
