"""The settings of a checkpoint's configuration: which are read, which cannot matter, and which are refused."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from jpets.errors import InvalidTask, JpetsError
from jpets.files import read_bounded

NEUTRAL: tuple[object, ...] = (None, False, "", [], {})
"""What an option that is off looks like."""
MAX_BYTES = 1 << 20
MOST = 1 << 20
"""Largest rank, and number of virtual tokens."""
LARGEST = 1e30
"""What arithmetic in f32 has room for."""
TypeOrTypes = type | tuple[type, ...]


def names(text: str) -> frozenset[str]:
    """The names of options in a text."""
    return frozenset(text.split())


def read_json(path: Path, problem: type[JpetsError] = InvalidTask, most: int = MAX_BYTES) -> dict[str, Any]:
    """A JSON object of at most ``most`` bytes from a checkpoint's folder. Raises ``problem``."""
    try:
        found = json.loads(read_bounded(path, most))
    except FileNotFoundError as error:
        raise problem(f"expected {path.name} in the folder, found none") from error
    except (ValueError, RecursionError) as error:
        raise problem(f"{path.name} must be a JSON document of at most {most} bytes; save it again") from error
    if not isinstance(found, dict):
        raise problem(f"{path.name} must hold a JSON object, found {type(found).__name__}")
    return found


def read_optional(path: Path, problem: type[JpetsError] = InvalidTask, most: int = MAX_BYTES) -> dict[str, Any]:
    """``read_json``; of a file that is not there nothing."""
    return read_json(path, problem, most) if path.is_file() else {}


def unsupported(settings: Mapping[str, Any], known: Collection[str], kind: str) -> Iterator[str]:
    """A problem for each option outside ``known`` that is not off: unknown options are never ignored."""
    for name, value in settings.items():
        if name not in known and not any(type(value) is type(off) and value == off for off in NEUTRAL):
            yield f"{name}: {json.dumps(value)[:80]} is not supported for {kind}"


def expect_count(settings: Mapping[str, Any], name: str, default: int | None, problems: list[str]) -> Any:
    """``settings[name]``, or ``default`` where it is absent, null or, as a problem, an impossible size."""
    value = expect(settings, name, int, default, problems)
    if value is not None and not 1 <= value <= MOST:
        problems.append(f"{name}: expected a whole number from 1 to {MOST}, found {json.dumps(value)[:80]}")
        return default
    return value


def expect_number(settings: Mapping[str, Any], name: str, default: float, problems: list[str]) -> Any:
    """``settings[name]``, or ``default`` where it is absent, null or, as a problem, no finite number."""
    value = settings.get(name)
    if value is None:
        return default
    if not is_number(value):
        problems.append(f"{name}: expected a number, found {json.dumps(value)[:80]}")
        return default
    return value


def expect_list(settings: Mapping[str, Any], name: str, kind: type, default: list[Any], problems: list[str]) -> Any:
    """``settings[name]``, or ``default`` where it is absent, null or, as a problem, no list of ``kind``."""
    value = expect(settings, name, list, default, problems)
    if not all(type(each) is kind for each in value):
        problems.append(f"{name}: expected a list of {kind.__name__}, found {json.dumps(value)[:80]}")
        return default
    return value


def is_number(value: Any) -> bool:
    """Whether it is a finite number: JSON has whole numbers of any size, and some write infinity."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


def expect(settings: Mapping[str, Any], name: str, kind: TypeOrTypes, default: Any, problems: list[str]) -> Any:
    """``settings[name]``, or ``default`` where it is absent, null or, as a problem, of another type."""
    value = settings.get(name)
    if value is None:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join(each.__name__ for each in kinds)
        problems.append(f"{name}: expected {expected}, found {json.dumps(value)[:80]}")
        return default
    return value
