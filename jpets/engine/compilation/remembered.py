"""The programs that the traffic came to have, for the next start to begin with."""

from __future__ import annotations

import json
import logging
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jpets.deltas.protocol import ClassKey
from jpets.engine.programs.program import Program, ProgramKey, key_from_json, key_to_json
from jpets.engine.programs.shared_file import SharedFile

log = logging.getLogger(__name__)

MOST = 64
ENOUGH = 256
"""Batches of a process after which it forgets the programs of earlier starts that none of them had."""
KEEP_SECONDS = 60.0
"""Seconds between two writes: a process that is killed forgets what came since the last."""


class RememberedPrograms:
    """A JSON file, which several servers of one cache folder add to. Programs of other classes are left out where it is
    read: tasks come and go. So is what cannot be read: programs only make batches faster."""

    def __init__(self, path: pathlib.Path) -> None:
        self._file = SharedFile(path, "programs of the last start", _parsed, _written)
        self._unproved: set[ProgramKey] = set()
        """Those that this process began with, until it has had enough batches to tell which its traffic has."""

    def read(
        self, classes: Iterable[ClassKey], allowed: Callable[[ProgramKey], bool] = lambda key: True
    ) -> list[ProgramKey]:
        """Programs of these classes that are ``allowed``, the latest used first."""
        known = frozenset(classes)
        keys = [key for key in self._file.read() or () if known.issuperset(key.variant.classes()) and allowed(key)]
        self._unproved.update(keys)
        return keys

    def write(self, programs: Iterable[Program], core: Iterable[ProgramKey]) -> None:
        """Keeps the programs that had batches, but for those of ``core``, which every start has; after them what other
        processes and earlier starts wrote. Once, when this process has had enough batches, those that it began with and
        none of them had are left out; another process that has them writes them again."""
        always, programs = frozenset(core), list(programs)
        used = [program for program in programs if program.followed and program.key not in always]
        latest = [program.key for program in sorted(used, key=lambda program: -program.last_used)]
        told = sum(program.followed for program in programs) >= ENOUGH
        left_out = self._unproved if told else frozenset[ProgramKey]()

        def merged(stored: list[ProgramKey] | None) -> list[ProgramKey]:
            others = (key for key in stored or () if key not in left_out)
            return list(dict.fromkeys([*latest, *others]))[:MOST]

        if self._file.update(merged) is not None and told:
            self._unproved = set()


def _parsed(text: str) -> list[ProgramKey]:
    documents = json.loads(text)
    if not isinstance(documents, list):
        raise ValueError(f"expected a list of programs, found {type(documents).__name__}")
    return [key for document in documents if (key := _key(document)) is not None]


def _key(document: Any) -> ProgramKey | None:
    """None for one that cannot be read."""
    try:
        key = key_from_json(json.dumps(document))
        hash(key)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        log.warning("a program of the last start is not known: %s", type(error).__name__)
        return None
    return key


def _written(keys: Sequence[ProgramKey]) -> str:
    return json.dumps([json.loads(key_to_json(key)) for key in keys])
