"""Commands on the pages, of ``jpets`` and of the scripts, are taken with the arguments and options that they have."""

from __future__ import annotations

import importlib
import pathlib
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from jpets.cli import app

ROOT = pathlib.Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
NAME = r"(?:jpets|python -m (?:jpets\.serve|experiments\.\w+|faults\.\w+))"
LINE = re.compile(rf"^(?: {{4}})?(?:PYTHONPATH=\S+ )?({NAME} (?:[^#\n\\]|\\\n)*)", re.MULTILINE)
INLINE = re.compile(rf"`(?:PYTHONPATH=\S+ )?({NAME}(?:\s[^`]*)?)`")
PROSE = re.compile(r"^jpets [a-z]+ (?:thousands|does)\b")
"""Lines that begin with the project's name and are no commands."""


def found_commands(text: str) -> Iterator[tuple[list[str], bool]]:
    """The words of each command, and whether it stands on a line of its own, where it must be whole."""
    for pattern in (LINE, INLINE):
        for match in pattern.finditer(text):
            command = match.group(1).replace("\\\n", " ")
            if "..." not in command and not PROSE.match(command):
                yield shlex.split(command), pattern is LINE


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    if words[0] == "jpets":
        return typer.main.get_command(app), words[1:]
    if words[2] == "jpets.serve":
        return typer.main.get_command(app), ["serve", *words[3:]]
    module = importlib.import_module(words[2])
    if not hasattr(module, "app"):
        own = typer.Typer()
        own.command()(module.main)
        return typer.main.get_command(own), words[3:]
    return typer.main.get_command(module.app), words[3:]


def check(words: list[str], whole: bool = True) -> None:
    """Takes the words apart as the command's parser does; files need not be there."""
    command, words = command_of(words)
    path = []
    while hasattr(command, "commands"):
        if not words:
            return  # the name of a group
        name, *words = words
        path.append(name)
        assert name in command.commands, f"no command: {' '.join(path)}"
        command = command.commands[name]
    if "--help" in words:
        return
    values, left, _ = command.make_parser(typer.Context(command)).parse_args(args=list(words))
    assert not left, f"{' '.join(path)} does not take {left}"
    needed = {param.name for param in command.params if param.param_type_name == "argument" and param.required}
    missing = [name for name in needed if not values.get(name)] if whole else []
    assert not missing, f"{' '.join([*path, *words])} lacks {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_are_taken(page: pathlib.Path) -> None:
    for words, whole in found_commands(page.read_text()):
        check(words, whole)


def test_the_pages_have_commands() -> None:
    found = [whole for page in PAGES for _, whole in found_commands(page.read_text())]
    assert found.count(True) > 30
    assert found.count(False) > 30


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("jpets serve --task topic.safetensors", "No such option: --task"),
        ("python -m jpets.serve --task topic.safetensors", "No such option: --task"),
        ("jpets plot domains", "no command: plot domains"),
        ("jpets plot domain minilm-tables", "lacks"),
        ("jpets doctor minilm", "does not take"),
        ("python -m experiments.area_texts", "lacks"),
        ("python -m experiments.area_domains run F G --task x", "No such option: --task"),
    ],
)
def test_what_a_command_does_not_take_is_found(command: str, error: str) -> None:
    with pytest.raises(Exception, match=error):
        check(command.split())
