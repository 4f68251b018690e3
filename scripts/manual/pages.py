"""``PYTHONPATH=scripts python -m manual.pages``: writes the reference pages anew. ``scripts/docs`` runs it first."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping

import typer
from results.documents import ROOT
from results.markdown import fill_blocks

from manual import tables
from manual.api import write_api

DOCS = ROOT / "docs"
PAGES: Mapping[pathlib.Path, Mapping[str, Callable[[], str]]] = {
    DOCS / "options.md": {"options": tables.options},
    DOCS / "metrics.md": {"metrics": tables.metrics},
    DOCS / "troubleshooting.md": {"errors": tables.error_codes},
}
"""Pages with tables that follow from the code."""


def fill_page(path: pathlib.Path) -> str:
    return fill_blocks(path.read_text(), {name: make() for name, make in PAGES[path].items()})


def main() -> None:
    for path in PAGES:
        path.write_text(fill_page(path))
    write_api(DOCS / "api")


if __name__ == "__main__":
    typer.run(main)
