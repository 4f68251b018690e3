"""The texts of Debian packages by area, for tables of n-gram vectors: a root's and those of its domains.

    python -m experiments.area_texts FOLDER

``FOLDER/all.txt`` has every package's text but those that tasks are tested on, ``FOLDER/AREA.txt`` those of an area of
the archive. Needs what ``debian_packages`` names, or ``--packages FILE`` of what that script wrote.
"""

from __future__ import annotations

import pathlib
from collections import defaultdict
from typing import Annotated

import typer

from experiments.package_tasks import known_packages

AREAS = (
    "admin", "devel", "doc", "games", "graphics", "java", "math", "net", "perl", "python", "science", "sound", "text",
    "utils", "web", "x11",
)  # fmt: skip
"""Sections with a thousand packages and more in Debian 12, but for libraries, whose descriptions say little else."""


def main(
    folder: Annotated[pathlib.Path, typer.Argument(file_okay=False)],
    packages: Annotated[pathlib.Path | None, typer.Option(exists=True, help="of debian_packages.py")] = None,
) -> None:
    """Write the texts, one a line."""
    texts: defaultdict[str, list[str]] = defaultdict(list)
    for package in known_packages(packages):
        if package.split == "train":
            texts["all"].append(package.text)
            if package.section in AREAS:
                texts[package.section].append(package.text)
    folder.mkdir(parents=True, exist_ok=True)
    for name, own in texts.items():
        (folder / f"{name}.txt").write_text("".join(f"{text}\n" for text in own), encoding="utf-8")
        typer.echo(f"{name}: {len(own):,} texts")


if __name__ == "__main__":
    typer.run(main)
