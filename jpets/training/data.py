"""Labelled texts from CSV, JSON lines, Parquet, plain lines or a folder of the ``datasets`` library, with columns named
by the caller."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jpets.errors import InvalidInput, NotFound
from jpets.files import read_bounded
from jpets.training.tables import SHOWN, TAB, read_table, text_lines

Record = Mapping[str, Any]
MOST_ROWS = 5_000_000
"""Most rows: a few kilobytes of Parquet may hold any number of equal rows."""
MOST_CHARACTERS = 1 << 30
MOST_STATE_BYTES = 1 << 20
NO_DATASET = "expected a file, or a folder that datasets' save_to_disk wrote"
READ_AT_ONCE = 64
"""Rows of Parquet that are read at once: each may be large though the file is small."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """The names of the columns. ``text`` may hold a list of words, ``label`` then one tag for each."""

    text: str = "text"
    text_pair: str | None = None
    label: str | None = "label"


def label_column(given: str | None, head: str | None) -> str | None:
    """The column of labels if none is named: pairs to embed may have none."""
    return given if given is not None or head == "embedding" else "label"


@dataclasses.dataclass(frozen=True)
class Example:
    """``label`` is as in the file: a name, a number, a list of names (multi-label) or of tags, or nothing."""

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
    for row, record in reader(path, columns):
        where = f"{path.name}, {row}"
        for name in (columns.text, columns.text_pair, columns.label):
            if name is not None and name not in record:
                found_names = sorted(str(each)[:SHOWN] for each in record)[:20]
                raise InvalidInput(f"{where}: expected a column {name!r}, found {found_names}")
        if len(found) == MOST_ROWS:
            raise InvalidInput(f"{path.name}: expected at most {MOST_ROWS} rows, which all lie in memory; give a part")
        example = _example(record, columns, where)
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
    if columns.text_pair is not None and (not isinstance(pair, str) or not pair.strip()):
        found = "an empty one" if isinstance(pair, str) else type(pair).__name__
        raise InvalidInput(f"{where}: expected {columns.text_pair!r} to be a text that is not empty, found {found}")
    if not all(map(is_text, (*words, pair or ""))):
        raise InvalidInput(f"{where}: expected texts in Unicode, found half of a surrogate pair")
    if columns.label is None:
        return Example(text, pair)
    label = record[columns.label]
    for each in label if isinstance(label, (list, tuple)) else (label,):
        if problem := _problem(each):
            raise InvalidInput(f"{where}: expected {columns.label!r} to be a label, found {problem}")
    return Example(text, pair, label)


def contradictions(examples: Sequence[Example]) -> int:
    """The number of rows with a text that an earlier row has with another label."""
    first: dict[tuple[Any, str | None], Any] = {}
    return sum(first.setdefault((each.text, each.text_pair), each.label) != each.label for each in examples)


def is_text(text: str) -> bool:
    """Whether a text can be written: half of a surrogate pair cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _problem(label: Any) -> str | None:
    """Why a label is invalid: it is empty, NaN, or has spaces around it, which would make another label."""
    if label is None or (isinstance(label, str) and not label.strip()):
        return "none"
    if (isinstance(label, float) and math.isnan(label)) or (isinstance(label, str) and label.strip().lower() == "nan"):
        return f"{label!r}, which says that it is missing"
    if isinstance(label, str) and label != label.strip():
        return f"spaces around {label[:SHOWN]!r}"
    return None


def _read_csv(path: Path, columns: Columns) -> Iterator[tuple[str, Record]]:
    return read_table(path, ",", columns.label)


def _read_tsv(path: Path, columns: Columns) -> Iterator[tuple[str, Record]]:
    return read_table(path, TAB, columns.label)


def _read_jsonl(path: Path, columns: Columns) -> Iterator[tuple[str, Record]]:
    del columns
    number = 0
    for line, content in text_lines(path, "JSON lines"):
        if not content.strip():
            continue
        number += 1
        where = f"{path.name}, line {line}"
        try:
            record = json.loads(content, object_pairs_hook=_once)
        except InvalidInput as error:  # before ValueError, as it is a subclass
            raise InvalidInput(f"{where}: {error.message}") from error
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{where}: expected a JSON object in UTF-8") from error
        if not isinstance(record, dict):
            raise InvalidInput(f"{where}: expected a JSON object, found {type(record).__name__}")
        yield f"line {line}, row {number}", record


def _once(pairs: list[tuple[str, Any]]) -> Record:
    """An object in which each name occurs once: of two values, it cannot be known which is meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise InvalidInput(f"expected each name once, found {twice[:SHOWN]!r} more often")
    return found


def _read_parquet(path: Path, columns: Columns) -> Iterator[tuple[str, Record]]:
    del columns
    try:
        from pyarrow import ArrowException, parquet, types
    except ModuleNotFoundError as error:
        raise InvalidInput("reading Parquet takes pyarrow; install jpets[train]") from error
    number = 0
    try:
        fields = parquet.read_schema(path)
        texts = [own.name for own in fields if types.is_string(own.type) or types.is_binary(own.type)]
        file = parquet.ParquetFile(path, read_dictionary=texts)  # equal texts are one until their row is read
        for batch in file.iter_batches(READ_AT_ONCE):
            for at in range(batch.num_rows):
                number += 1
                row = {own.name: column[at].as_py() for own, column in zip(batch.schema, batch.columns, strict=True)}
                yield f"row {number}", row
    except (ArrowException, OSError, ValueError, OverflowError) as error:
        raise InvalidInput(f"{path.name}: expected a Parquet file; it cannot be read after row {number}") from error


def _read_dataset(path: Path, columns: Columns) -> Iterator[tuple[str, Record]]:
    """The rows that ``save_to_disk`` wrote; numbers of named classes become their names."""
    del columns
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
        yield f"row {number}", {name: _named(found.features[name], value) for name, value in record.items()}


def _check_names(folder: Path) -> None:
    """Raises ``InvalidInput`` if the folder names files outside of it, which the library would read."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(each.name for each in folder.iterdir() if each.is_dir())[:20]
        raise InvalidInput(f"{folder.name}: it holds several splits; give the folder of one of {splits}")
    try:
        state = json.loads(read_bounded(folder / "state.json", MOST_STATE_BYTES))
        names = [each["filename"] for each in state["_data_files"]]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise InvalidInput(f"{folder.name}: {NO_DATASET}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or (folder / name).is_symlink():
            raise InvalidInput(f"{folder.name}: expected names of files in the folder, found {str(name)[:100]!r}")


def _named(feature: Any, value: Any) -> Any:
    """The value with class numbers as names; ``feature`` is the column's type in the ``datasets`` library."""
    own = getattr(feature, "feature", None)
    if own is not None and isinstance(value, list):
        return [_named(own, each) for each in value]
    is_class = hasattr(feature, "int2str") and isinstance(value, int) and 0 <= value < feature.num_classes
    return feature.int2str(value) if is_class else value


def _read_lines(path: Path, columns: Columns) -> Iterator[tuple[str, Record]]:
    del columns
    number = 0
    for line, content in text_lines(path, "a text a line,"):
        if content.strip():
            number += 1
            yield f"line {line}, row {number}", {"text": content.strip()}


READERS: Mapping[str, Callable[[Path, Columns], Iterator[tuple[str, Record]]]] = {
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".parquet": _read_parquet,
    ".txt": _read_lines,
}
