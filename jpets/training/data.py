"""Labelled texts from CSV, JSON lines, Parquet, plain lines or a folder of the ``datasets`` library, with columns that
the caller names."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jpets.errors import InvalidInput, NotFound

Record = Mapping[str, Any]
LONGEST_FIELD = 16 << 20
"""Bytes of one field or line."""

MOST_ROWS = 5_000_000
"""A few kilobytes of Parquet may hold any number of equal rows."""
MOST_CHARACTERS = 1 << 30
NO_DATASET = "expected a file, or a folder that datasets' save_to_disk wrote"
READ_AT_ONCE = 64
"""Rows of Parquet, each of which may be large though the file is small."""
SHOWN_NAME = 40
"""Characters of a column's name in a message: where the line of names is missing, they are texts."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """Which columns hold what. ``text`` may hold a list of words, ``label`` then one tag for each."""

    text: str = "text"
    text_pair: str | None = None
    label: str | None = "label"


def label_column(given: str | None, head: str | None) -> str | None:
    """The column of labels where none is named: pairs to embed may have none."""
    return given if given is not None or head == "embedding" else "label"


@dataclasses.dataclass(frozen=True)
class Example:
    """``label`` is what the file holds: a name, a number, a list of names (multi-label) or of tags, or nothing."""

    text: str | tuple[str, ...]
    text_pair: str | None = None
    label: Any = None

    @property
    def plain(self) -> str:
        """The text, words joined by spaces."""
        return self.text if isinstance(self.text, str) else " ".join(self.text)


def read_examples(path: Path, columns: Columns) -> list[Example]:
    """All rows of a file. Raises ``InvalidInput`` naming the line and the column, ``NotFound``."""
    if not path.exists():
        raise NotFound(f"{path.name!r} is no file; give a .csv, .tsv, .jsonl, .parquet or .txt file")
    reader = _read_dataset if path.is_dir() else READERS.get(path.suffix.lower())
    if reader is None:
        raise InvalidInput(f"{path.name}: expected a file that ends in one of {sorted(READERS)}")
    found: list[Example] = []
    size = 0
    for number, record in reader(path):
        for name in (columns.text, columns.text_pair, columns.label):
            if name is not None and name not in record:
                found_names = sorted(str(each)[:SHOWN_NAME] for each in record)[:20]
                raise InvalidInput(f"{path.name}, row {number}: expected a column {name!r}, found {found_names}")
        if len(found) == MOST_ROWS:
            raise InvalidInput(f"{path.name}: expected at most {MOST_ROWS} rows, which all lie in memory; give a part")
        example = _example(record, columns, f"{path.name}, row {number}")
        size += len(example.plain) + len(example.text_pair or "")
        if size > MOST_CHARACTERS:
            raise InvalidInput(f"{path.name}: expected at most {MOST_CHARACTERS} characters; give a part")
        found.append(example)
    if not found:
        raise InvalidInput(f"{path.name}: expected at least one row, found none")
    return found


def _example(record: Record, columns: Columns, where: str) -> Example:
    text = record[columns.text]
    if isinstance(text, Sequence) and not isinstance(text, str):
        text = tuple(text)
    words = text if isinstance(text, tuple) else (text,)
    if not all(isinstance(word, str) for word in words) or not "".join(words).strip():
        raise InvalidInput(f"{where}: expected {columns.text!r} to be a text that is not empty, or a list of words")
    pair = record[columns.text_pair] if columns.text_pair is not None else None
    if pair is not None and not isinstance(pair, str):
        raise InvalidInput(f"{where}: expected {columns.text_pair!r} to be a text, found {type(pair).__name__}")
    return Example(text, pair, record[columns.label] if columns.label is not None else None)


def _read_csv(path: Path, delimiter: str = ",") -> Iterator[tuple[int, Record]]:
    csv.field_size_limit(LONGEST_FIELD)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter=delimiter, strict=True)
            names = list(reader.fieldnames or ())
            if twice := sorted({name[:SHOWN_NAME] for name in names if names.count(name) > 1}):
                raise InvalidInput(f"{path.name}: expected each column once, found {twice[:20]} more often")
            for number, row in enumerate(reader, 1):
                if None in row or None in row.values():
                    raise InvalidInput(f"{path.name}, row {number}: expected as many fields as the first line has")
                yield number, row
    except (csv.Error, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path.name}: expected CSV in UTF-8 with a line of column names: {error}") from error


def _read_tsv(path: Path) -> Iterator[tuple[int, Record]]:
    return _read_csv(path, "\t")


def _read_jsonl(path: Path) -> Iterator[tuple[int, Record]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InvalidInput(f"{path.name}, line {number}: expected a JSON object in UTF-8") from error
            if not isinstance(record, dict):
                raise InvalidInput(f"{path.name}, line {number}: expected a JSON object, found {type(record).__name__}")
            yield number, record


def _read_parquet(path: Path) -> Iterator[tuple[int, Record]]:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError as error:
        raise InvalidInput("reading Parquet takes pyarrow; install jpets[train]") from error
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(READ_AT_ONCE):
            for record in batch.to_pylist():
                number += 1
                yield number, record
    except (ArrowException, OSError, ValueError, OverflowError) as error:
        raise InvalidInput(f"{path.name}: expected a Parquet file; it cannot be read after row {number}") from error


def _read_dataset(path: Path) -> Iterator[tuple[int, Record]]:
    """What ``save_to_disk`` wrote; numbers of named classes become their names."""
    try:
        import datasets  # type: ignore[import-untyped, unused-ignore]
    except ModuleNotFoundError as error:
        raise InvalidInput("reading such a folder takes the datasets library; pip install datasets") from error
    _check_names(path)
    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{path.name}: {NO_DATASET}") from error
    for number, record in enumerate(found, 1):
        yield number, {name: _named(found.features[name], value) for name, value in record.items()}


def _check_names(folder: Path) -> None:
    """Raises ``InvalidInput`` where the folder names files outside of it, which the library would read."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(each.name for each in folder.iterdir() if each.is_dir())[:20]
        raise InvalidInput(f"{folder.name}: it holds several splits; give the folder of one of {splits}")
    try:
        names = [each["filename"] for each in json.loads((folder / "state.json").read_bytes())["_data_files"]]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise InvalidInput(f"{folder.name}: {NO_DATASET}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or (folder / name).is_symlink():
            raise InvalidInput(f"{folder.name}: expected names of files in the folder, found {str(name)[:100]!r}")


def _named(feature: Any, value: Any) -> Any:
    """``feature`` says what a column of the ``datasets`` library holds."""
    own = getattr(feature, "feature", None)
    if own is not None and isinstance(value, list):
        return [_named(own, each) for each in value]
    is_class = hasattr(feature, "int2str") and isinstance(value, int) and 0 <= value < feature.num_classes
    return feature.int2str(value) if is_class else value


def _read_lines(path: Path) -> Iterator[tuple[int, Record]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, {"text": line.strip()}
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path.name}: expected a text a line, in UTF-8") from error


READERS: Mapping[str, Callable[[Path], Iterator[tuple[int, Record]]]] = {
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".parquet": _read_parquet,
    ".txt": _read_lines,
}
