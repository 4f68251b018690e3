"""Pictures and tables of the benchmarks' JSON files.

    python scripts/figures.py docs/results/cpu-2core --out docs/figures --pages

draws one picture for each benchmark of which there are results in the folder (needs matplotlib: ``pip install
jpets[plot]``), and makes the tables of ``docs/benchmarks.md`` and the README anew, from all of ``docs/results``.
"""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer
from results.documents import named, read_documents
from results.page import PAGES, fill_page


def main(
    results: Annotated[pathlib.Path, typer.Argument(exists=True, file_okay=False, help="folder of JSON results")],
    out: Annotated[pathlib.Path | None, typer.Option(file_okay=False, help="folder of the pictures")] = None,
    pages: Annotated[bool, typer.Option("--pages", help="make the pages' tables anew")] = False,
) -> None:
    """Draw every benchmark of which there are results, make the tables of all anew, or both."""
    for page in PAGES if pages else ():
        page.write_text(fill_page(page.read_text()))
        typer.echo(page)
    if out is None:
        return
    from results.pictures import DRAWN, save_picture  # matplotlib

    out.mkdir(parents=True, exist_ok=True)
    documents = read_documents(results)
    for name, draw in DRAWN.items():
        if found := named(documents, name):
            typer.echo(save_picture(draw, found, out / f"{name}.png"))


if __name__ == "__main__":
    typer.run(main)
