"""The programs that the traffic came to have, for the next start to begin with."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from jpets.deltas.protocol import ClassKey
from jpets.engine.programs.program import Program, ProgramKey, key_from_json, key_to_json
from jpets.engine.programs.shared_file import SharedFile

MOST = 64
ENOUGH = 256
"""Batches of a process after which it forgets the programs of earlier starts that none of them had."""
KEEP_SECONDS = 60.0
"""Seconds between two writes: a process that is killed forgets what came since the last."""


class RememberedPrograms:
    """A JSON file, which several servers of one cache folder add to. Programs of other classes are left out where it is
    read: tasks come and go. So are those that cannot be read: programs only make batches faster."""

    def __init__(self, path: pathlib.Path) -> None:
        self._file = SharedFile(path, "programs of the last start", _parsed, _written)
        self._known: set[ProgramKey] = set()
        """Those that this process read or wrote."""

    def read(self, classes: Iterable[ClassKey]) -> list[ProgramKey]:
        """Programs of these classes, the latest used first."""
        known = frozenset(classes)
        keys = [key for key in self._file.read() or () if known.issuperset(key.variant.classes())]
        self._known.update(keys)
        return keys

    def write(self, programs: Iterable[Program], core: Iterable[ProgramKey]) -> None:
        """Keeps the programs that had batches, but for those of ``core``, which every start has; after them what other
        processes wrote, and earlier starts until this one has had enough batches."""
        always, programs = frozenset(core), list(programs)
        used = [program for program in programs if program.followed and program.key not in always]
        latest = [program.key for program in sorted(used, key=lambda program: -program.last_used)]
        self._known.update(latest)
        forgotten = self._known if sum(program.followed for program in programs) >= ENOUGH else set(latest)

        def merged(stored: list[ProgramKey] | None) -> list[ProgramKey]:
            return [*latest, *(key for key in stored or () if key not in forgotten)][:MOST]

        self._file.update(merged)


def _parsed(text: str) -> list[ProgramKey]:
    try:
        return [_key(each) for each in json.loads(text)]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a list of programs: {type(error).__name__} {error}") from error


def _key(document: Any) -> ProgramKey:
    return key_from_json(json.dumps(document))


def _written(keys: Sequence[ProgramKey]) -> str:
    return json.dumps([json.loads(key_to_json(key)) for key in keys])
