"""Groups of commands that understand what a user gives and show what a task holds, whatever the terminal's encoding."""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import typer

from jpets.errors import InvalidInput
from jpets.files import user_path
from serving.options.sources import PREFIX, named_by

CACHE_DIR = "--cache-dir"
"""Its variable is read wherever programs are kept."""
Command = TypeVar("Command", bound=Callable[..., Any])


class App(typer.Typer):
    """Its commands get paths without ``~`` and texts in Unicode."""

    def command(self, name: str | None = None, **how: Any) -> Callable[[Command], Command]:
        register = super().command(name, **how)

        def add(function: Command) -> Command:
            register(_as_meant(function))
            return function

        return add


def take_any_encoding() -> None:
    """Standard output and error write what their encoding lacks as escapes: no name or text may end a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def named_by_origin(message: str, arguments: Sequence[str], options: Iterable[str]) -> str:
    """A message about ``--options``. Of ``options``, which may come from the environment, those that are not among the
    ``arguments`` are called by their variables."""
    given = {each.partition("=")[0] for each in arguments}
    variables = {option: f"{PREFIX}{option[2:].replace('-', '_').upper()}" for option in (*options, CACHE_DIR)}
    told = {name: variable for name, variable in variables.items() if os.environ.get(variable) and name not in given}
    return named_by(message, told)


def _as_meant(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def command(**given: Any) -> Any:
        for value in given.values():
            if isinstance(value, typer.Context):
                value.params = {name: _meant(each) for name, each in value.params.items()}
        return function(**{name: _meant(value) for name, value in given.items()})

    return command


def _meant(value: Any) -> Any:
    if isinstance(value, list):
        return [_meant(each) for each in value]
    if isinstance(value, Path):
        return user_path(value)
    return _text(value) if isinstance(value, str) else value


def _text(given: str) -> str:
    """An argument, which is UTF-8 where the locale cannot read it. Raises ``InvalidInput`` where it is not."""
    if given.isascii() or not any("\udc80" <= each <= "\udcff" for each in given):
        return given
    try:
        return os.fsencode(given).decode("utf-8")
    except UnicodeError:
        raise InvalidInput(f"expected an argument in UTF-8, found {os.fsencode(given)[:80]!r}") from None
