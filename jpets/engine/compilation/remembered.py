"""The programs that the traffic came to have, for the next start to begin with."""

from __future__ import annotations

import json
import logging
import pathlib
from collections.abc import Iterable

from jpets.deltas.protocol import ClassKey
from jpets.engine.programs.program import Program, ProgramKey, key_from_json, key_to_json
from jpets.errors import OutOfSpace
from jpets.files import write_atomic

log = logging.getLogger(__name__)

MOST = 64


class RememberedPrograms:
    """A JSON file. What is damaged or of other classes is left out: programs only make batches faster."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def read(self, classes: Iterable[ClassKey]) -> list[ProgramKey]:
        """Programs of these classes, the latest used first."""
        known = frozenset(classes)
        try:
            keys = [key_from_json(json.dumps(each)) for each in json.loads(self._path.read_text(encoding="utf-8"))]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("the programs of the last start are not known: %s", type(error).__name__)
            return []
        return [key for key in keys if known.issuperset(key.variant.classes())]

    def write(self, programs: Iterable[Program], core: Iterable[ProgramKey]) -> None:
        """Keeps the programs that had batches, but for those of ``core``, which every start has."""
        always = frozenset(core)
        used = [program for program in programs if program.followed and program.key not in always]
        latest = sorted(used, key=lambda program: -program.last_used)[:MOST]
        text = json.dumps([json.loads(key_to_json(program.key)) for program in latest])
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, text.encode())
        except (OSError, OutOfSpace) as error:
            log.warning("the programs of this start could not be remembered: %s", error)
