"""Several task files and folders of them on one command line: what is wrong with one does not stop the others."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from jpets.app.commands.client.client import NoAnswer
from jpets.app.commands.output import report_error
from jpets.errors import InvalidInput, JpetsError, one_line

T = TypeVar("T")
SUFFIX = ".safetensors"
TaskFiles = Annotated[
    list[Path], typer.Argument(exists=True, metavar="FILE...", help="task files (.safetensors), or folders of them")
]


def task_files(given: Sequence[Path]) -> list[Path]:
    """The files, and those in the folders by name, each once. A folder without any stays, for ``check_file``."""
    found: dict[Path, Path] = {}
    for path in given:
        inside = sorted(each for each in path.glob(f"*{SUFFIX}") if each.is_file()) if path.is_dir() else []
        for file in inside or [path]:
            found.setdefault(file.resolve(), file)
    return list(found.values())


def check_file(path: Path) -> None:
    """Raises ``InvalidInput`` for a folder."""
    if path.is_dir():
        raise InvalidInput(f"expected a task file or a folder of them, found no {SUFFIX} file in it")


def for_each(files: Sequence[Path], work: Callable[[Path], T], tell: Callable[[T], None], at_once: int = 1) -> None:
    """Tells what ``work`` gives of each file, in their order, ``at_once`` of them in threads. While one is told,
    work on only a few more begins. Where it fails, that is reported in a line with the file's name, the others go on,
    and the command ends with exit code 1. Where a server no longer answers no more work begins, what was done by then
    is told, and ``NoAnswer`` ends it."""
    if len(files) == 1:
        check_file(files[0])
        tell(work(files[0]))
        return

    lost: list[NoAnswer] = []

    def checked(file: Path) -> T:
        if lost:
            raise lost[0]
        check_file(file)
        return work(file)

    failed = 0
    with contextlib.closing(_begun(files, checked, at_once)) as begun:
        for file, result in begun:
            try:
                tell(result())
            except NoAnswer as error:
                lost.append(error)
            except (JpetsError, OSError) as error:
                report_error(f"{file}: {one_line(error)}")
                failed += 1
    if lost:
        raise lost[0]
    if failed:
        report_error(f"{failed} of {len(files)} files failed")
        raise typer.Exit(1)


def _begun(
    files: Sequence[Path], work: Callable[[Path], T], at_once: int
) -> Generator[tuple[Path, Callable[[], T]], None, None]:
    """Each file with what waits for its work, or does it. Threads are kept busy, and no more is begun."""
    if at_once == 1:
        yield from ((file, partial(work, file)) for file in files)
        return
    pool, begun = ThreadPoolExecutor(at_once), deque[tuple[Path, Callable[[], T]]]()
    try:
        for file in files:
            begun.append((file, pool.submit(work, file).result))
            if len(begun) > 2 * at_once:
                yield begun.popleft()
        yield from begun
    finally:
        pool.shutdown(cancel_futures=True)
