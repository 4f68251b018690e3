"""Rows of CSV and TSV files, and lines of text files: each with its line number, or an error that names the line.

A quotation mark that is never closed, or is closed by a later row's, must not join the rows between them to one text.
"""

from __future__ import annotations

import codecs
import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jpets.errors import InvalidInput

LONGEST_FIELD = 16 << 20
"""Bytes of one field or line."""
MARKS = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32", codecs.BOM_UTF16_LE: "UTF-16",
         codecs.BOM_UTF16_BE: "UTF-16"}  # fmt: skip
"""Byte-order marks of wider encodings; that of UTF-32 begins with that of UTF-16."""
SHOWN = 40
"""Most characters of a name in a message: if the line of names is missing, the names are texts."""
TAB = "\t"


class Row(NamedTuple):
    """Fields of one row, and its lines (from 1)."""

    fields: Sequence[str]
    first: int
    last: int


def text_lines(path: Path, kind: str) -> Iterator[tuple[int, str]]:
    """(number from 1, line with its end) of a file in UTF-8, with or without a byte-order mark.

    Raises ``InvalidInput``, which says that ``kind`` was expected and names the line, for other encodings, for NUL and
    for lines above ``LONGEST_FIELD``.
    """
    with path.open("rb") as file:
        start = file.read(4)
        file.seek(0)
        if found := next((name for mark, name in MARKS.items() if start.startswith(mark)), None):
            raise InvalidInput(f"{path.name}: expected {kind} in UTF-8, found {found}; save it as UTF-8")
        number = 0
        while raw := file.readline(LONGEST_FIELD + 1):
            number += 1
            where = f"{path.name}, line {number}"
            if len(raw) > LONGEST_FIELD:
                raise InvalidInput(f"{where}: expected {kind} with lines of at most {LONGEST_FIELD} bytes")
            if b"\0" in raw:
                raise InvalidInput(f"{where}: expected {kind} in UTF-8, found a NUL byte; save it as UTF-8")
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise InvalidInput(f"{where}: expected {kind} in UTF-8, found other bytes; save it as UTF-8") from error


def read_table(path: Path, delimiter: str, label: str | None) -> Iterator[tuple[str, Mapping[str, str]]]:
    """(place, fields by column) of each row; blank lines are skipped. ``label`` names the column by which rows within a
    text are recognised.

    Raises ``InvalidInput``.
    """
    kind = "TSV" if delimiter == TAB else "CSV"
    plain = delimiter == TAB and not _is_quoted(path, kind)
    rows = _plain_rows(path, kind) if plain else _quoted_rows(path, delimiter, kind)
    names: Sequence[str] = next(rows, Row((), 0, 0)).fields
    if twice := sorted({name[:SHOWN] for name, count in Counter(names).items() if count > 1}):
        raise InvalidInput(f"{path.name}: expected each column once, found {twice[:20]} more often")
    swallowed = _Swallowed(path, delimiter, names, label)
    for number, row in enumerate(rows, 1):
        where = f"line {row.first}, row {number}"
        if len(row.fields) != len(names):
            raise InvalidInput(
                f"{path.name}, {where}: expected as many fields as the first line has, {len(names)}, found "
                f"{len(row.fields)}"
            )
        swallowed.see(row)
        yield where, dict(zip(names, row.fields, strict=True))
    swallowed.check()


def _plain_rows(path: Path, kind: str) -> Iterator[Row]:
    for number, line in text_lines(path, kind):
        if line.strip("\r\n"):
            yield Row(line.rstrip("\r\n").split(TAB), number, number)


def _quoted_rows(path: Path, delimiter: str, kind: str) -> Iterator[Row]:
    csv.field_size_limit(LONGEST_FIELD)
    reader = csv.reader((line for _, line in text_lines(path, kind)), delimiter=delimiter, strict=True)
    last = 0
    try:
        for fields in reader:
            if fields:
                yield Row(fields, last + 1, reader.line_num)
            last = reader.line_num
    except csv.Error as error:
        told = str(error)
        if told == "unexpected end of data":
            told = "a quotation mark opens a field that never ends; write two for each one that is meant"
        raise InvalidInput(
            f"{path.name}, line {last + 1}: expected {kind} in UTF-8 with a line of column names: {told}"
        ) from error


def _is_quoted(path: Path, kind: str) -> bool:
    """Whether quotation marks around a TSV file's fields belong to its format, as in files of spreadsheets, or to the
    texts, as in exports of databases.

    They belong to the texts if every line is a row and a field that begins with one is not a quoted field.
    """
    width, all_quoted = 0, True
    for _, line in text_lines(path, kind):
        if not (own := line.rstrip("\r\n")):
            continue
        fields = own.split(TAB)
        width = width or len(fields)
        if len(fields) != width:
            return True
        all_quoted &= all(map(_is_one, (field for field in fields if field.startswith('"'))))
    return all_quoted


def _is_one(field: str) -> bool:
    """Whether a field is completely quoted: marks around it, and two for each one within it."""
    return len(field) > 1 and field.endswith('"') and '"' not in field[1:-1].replace('""', "")


class _Swallowed:
    """Rows with a text of several lines that look like rows themselves."""

    def __init__(self, path: Path, delimiter: str, names: Sequence[str], label: str | None) -> None:
        self._path, self._delimiter, self._width = path, delimiter, len(names)
        self._label = names.index(label) if label in names else None
        self._labels: set[str] = set()
        self._suspects: list[tuple[Row, set[str]]] = []

    def see(self, row: Row) -> None:
        if self._width < 2:
            return
        if self._label is not None:
            self._labels.add(row.fields[self._label])
        if row.first == row.last:
            return
        parts = [line.rstrip("\r").split(self._delimiter) for line in self._delimiter.join(row.fields).split("\n")]
        if self._label is None:
            if all(len(part) == self._width for part in parts):
                self._suspects.append((row, set()))
            return
        own = "".join(row.fields[: self._label]).count("\n")  # the line with the row's own label
        others = [part for at, part in enumerate(parts) if at != own and len(part) == self._width]
        if others:
            self._suspects.append((row, {part[self._label] for part in others}))

    def check(self) -> None:
        """Raises ``InvalidInput`` for the first of them with a line that has another row's label in the place of the
        label."""
        for row, labels in self._suspects:
            if self._label is None or labels & self._labels:
                raise InvalidInput(
                    f"{self._path.name}, line {row.first}: a quotation mark makes one text of the rows up to line "
                    f"{row.last}; write two for each one that is meant, or take JSON lines"
                )
