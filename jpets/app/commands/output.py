"""What commands show: tables and JSON on standard output, progress and errors on standard error."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.progress import MofNCompleteColumn, ProgressColumn, TaskID
from rich.table import Table

import jpets
from jpets.app.commands.bars import Bars

PIPE_WIDTH = 1000
"""Columns where output is no terminal: nothing that another program reads is wrapped."""
LARGE = 10_000_000
"""Bytes above which a transfer shows a progress bar."""

JsonOption = Annotated[bool, typer.Option("--json", help="print JSON for programs")]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"jpets {jpets.__version__}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="show the version and end")
]
Report = Callable[[str, int, int], None]
"""Called with (what, done, of how many)."""


def print_json(document: Any) -> None:
    """In ASCII where the terminal or pipe has no UTF-8: escapes are the same JSON."""
    encoding = sys.stdout.encoding or ""
    typer.echo(json.dumps(document, indent=2, ensure_ascii=not encoding.lower().startswith("utf")))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[str] = ()) -> None:
    """``numbers`` are the columns that align right."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(shown(cell) for cell in row))
    _console().print(table)


def print_fields(fields: Iterable[tuple[str, object]]) -> None:
    """A name and a value a line."""
    lines = [(shown(name), shown(value)) for name, value in fields]
    width = max((len(name) for name, _ in lines), default=0)
    for name, value in lines:
        typer.echo(f"{name:<{width}}  {value}")


def report_error(message: str) -> None:
    typer.echo(f"error: {shown(message)}", err=True)


def print_warning(message: str) -> None:
    typer.echo(f"warning: {shown(message)}", err=True)


def shown(value: object) -> str:
    """Text that cannot steer a terminal."""
    return "".join(each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in str(value))


def size(count: int) -> str:
    return decimal(count)


@contextlib.contextmanager
def reporting() -> Iterator[Report]:
    """A function that shows progress as bars, one for each ``what``."""
    with progress_bars(MofNCompleteColumn()) as bars:
        known: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in known:
                known[what] = bars.add_task(what, total=total)
            bars.update(known[what], completed=done, total=total)

        yield report


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """A bar without an end, for work that cannot say how far it is."""
    with progress_bars() as bars:
        bars.add_task(what, total=None)
        yield


def progress_bars(*columns: ProgressColumn, enabled: bool = True) -> Bars:
    """Bars on standard error that go when they are done; a line every ten seconds unless that is a terminal."""
    return Bars(*columns, enabled=enabled)


def _console() -> Console:
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(markup=False, highlight=False, emoji=False, width=width)
