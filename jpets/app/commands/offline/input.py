"""The input of an offline run: one JSON object a line."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import pydantic
import pydantic_core

from jpets.errors import InvalidInput, JpetsError, TooLarge, Unparseable
from serving.http.fields import ModelName, Text

LONGEST_LINE = 16 << 20
"""Bytes of one line that are read; the memory of a run is bounded whatever the input."""
BLOCK = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a line asks for, or ``error``: what is wrong with it. ``number`` counts from 1."""

    number: int
    echo: Mapping[str, Any]
    """What the answer repeats: the line's ``id``, if it has one."""
    text: str = ""
    text_pair: str | None = None
    tasks: tuple[str | None, ...] = ()
    alone: bool = False
    """One answer, not ``results`` by task id."""
    prompt: str | None = None
    error: JpetsError | None = None


@dataclasses.dataclass(frozen=True)
class Contents:
    """A whole input file."""

    digest: str
    lines: int


class _Line(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    task: ModelName | Annotated[list[ModelName], pydantic.Field(min_length=1)] | None = None
    text: Text
    text_pair: Text | None = None
    prompt_name: Text | None = None
    id: Any = None


def contents(file: Path) -> Contents:
    """Reads the file once: its SHA-256 and the count of its lines."""
    digest, lines, last = hashlib.sha256(), 0, b"\n"
    with file.open("rb") as source:
        while block := source.read(BLOCK):
            digest.update(block)
            lines += block.count(b"\n")
            last = block[-1:]
    return Contents(digest.hexdigest(), lines + (last != b"\n"))


def asked(source: BinaryIO, every: tuple[str, ...], *, skip: int = 0) -> Iterator[Asked]:
    """What each line asks for, past the first ``skip`` lines. ``every``: the tasks of a line that names none."""
    for number, line in enumerate(_lines(source), 1):
        if number > skip:
            yield _asked(number, line, every)


def _lines(source: BinaryIO) -> Iterator[bytes | None]:
    """Lines in bounded memory: None for one that is too long."""
    while line := source.readline(LONGEST_LINE):
        whole = line.endswith(b"\n") or len(line) < LONGEST_LINE
        yield line if whole else None
        while not whole:
            line = source.readline(LONGEST_LINE)
            whole = line.endswith(b"\n") or len(line) < LONGEST_LINE


def _asked(number: int, line: bytes | None, every: tuple[str, ...]) -> Asked:
    if line is None:
        return Asked(number, {}, error=TooLarge(f"the line is longer than {LONGEST_LINE} bytes; split its text"))
    try:
        value = pydantic_core.from_json(line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line)
    except ValueError:  # its message may quote the line
        return Asked(number, {}, error=Unparseable("the line is not valid JSON in UTF-8; write one object a line"))
    if not isinstance(value, dict):
        return Asked(number, {}, error=InvalidInput("the line is no JSON object; write one object a line"))
    echo = {"id": value["id"]} if "id" in value else {}
    try:
        json.dumps(echo, allow_nan=False)
    except ValueError:
        return Asked(
            number, {}, error=Unparseable("the line's id holds a number that is not finite, which JSON cannot")
        )
    try:
        found = _Line.model_validate(value)
    except pydantic.ValidationError as error:
        return Asked(number, echo, error=InvalidInput(_told(error)))
    named, alone = "task" in found.model_fields_set, not isinstance(found.task, list)
    tasks = (found.task,) if not isinstance(found.task, list) else tuple(dict.fromkeys(found.task))
    asked_of = tasks if named else every
    return Asked(number, echo, found.text, found.text_pair, asked_of, named and alone, found.prompt_name)


def _told(error: pydantic.ValidationError) -> str:
    """What is wrong, without the values that were found."""
    lines = [
        f"{each['loc'][0] if each['loc'] else 'the line'}: {each['msg'].removeprefix('Value error, ')}"
        for each in error.errors(include_url=False, include_input=False)
    ]
    return "; ".join(dict.fromkeys(lines))
