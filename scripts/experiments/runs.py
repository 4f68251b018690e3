"""Runs of an experiment in a file of JSON lines: each is written when it ends, and none is run again."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from checkpoints.backbone import Backbone
from experiments.package_tasks import Described
from jpets.training.checkpoints import digest_of

Line = Mapping[str, Any]
Run = TypeVar("Run", bound=tuple[Any, ...])
Each = TypeVar("Each")
Out = Annotated[pathlib.Path, typer.Argument(dir_okay=False, help="JSON lines; what is there is not run again")]
Budget = Annotated[float | None, typer.Option(min=0, help="start no run after so many minutes")]
Packages = Annotated[pathlib.Path | None, typer.Option(exists=True, help="of debian_packages.py")]
console = Console(stderr=True)


@dataclasses.dataclass(frozen=True)
class Runs:
    """The runs of one file.

    ``settings`` are all that decides a score beside what tells runs apart, data and backbones included; ``key`` gives
    the latter of a line. Raises ``typer.BadParameter`` if the file has runs with other settings.
    """

    path: pathlib.Path
    settings: Mapping[str, Any]
    key: Callable[[Line], tuple[Any, ...]]

    def __post_init__(self) -> None:
        for line in read_lines(self.path):
            if line.get("settings") != self.settings:
                raise typer.BadParameter(
                    f"{self.path} holds runs with {line.get('settings')}, these have {self.settings}; give another file"
                )

    def missing(self, wanted: Iterable[Run]) -> list[Run]:
        done = {self.key(line) for line in read_lines(self.path)}
        return [each for each in wanted if each not in done]

    def add(self, line: Line) -> None:
        append_line(self.path, {**line, "settings": self.settings})


def data_settings(packages: Sequence[Described], **backbones: Backbone) -> dict[str, str]:
    """What tells packages and backbones from others of the same name: an index changes, and so do folders."""
    own = {name: backbone.fingerprint for name, backbone in backbones.items()}
    return {"packages": digest_of(packages)[:16], **own}


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The runs that a file holds, without a last line that was cut off."""
    whole = path.read_text().rpartition("\n")[0] if path.is_file() else ""
    return [json.loads(line) for line in whole.splitlines()]


def append_line(path: pathlib.Path, line: Line) -> None:
    """Adds a run, in the place of what a killed process left of a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(line).encode() + b"\n")


def chosen(given: str, known: Sequence[str]) -> list[str]:
    """The names of an option. Raises ``typer.BadParameter``."""
    names = list(known) if given == "all" else given.split(",")
    if unknown := sorted(set(names) - set(known)):
        raise typer.BadParameter(f"expected some of {list(known)}, found {unknown}")
    return names


def within(minutes: float | None, began: float, runs: Iterable[Each]) -> Iterator[Each]:
    """``runs``, each asked for when the one before it has ended, until so long after ``began`` (monotonic)."""
    for run in runs:
        if minutes is not None and time.monotonic() - began > 60 * minutes:
            console.print("the budget is spent; the same command goes on")
            return
        yield run
