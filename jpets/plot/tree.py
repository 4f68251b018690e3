"""The version tree of a backbone's tables: a root, and domains that refine it (HMI section 5.1).

A folder holds:

    tree.json          what the files beside it are
    tables/*.plot      tables, named by their content
    layers/*.safetensors   the n-gram layers that computed them, named by theirs
    forms/*.forms   the normal forms by which n-grams are looked up, if they are, named by theirs
    holds/*.json   which files stay until the tree is to name them (``jpets.plot.holds``)

Files never change. ``tree.json`` is replaced whole, so a reader sees the old tree or the new one.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import time
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, Self

import numpy as np
from jaxtyping import Int

from jpets.config import TableFormat
from jpets.errors import InvalidTable, NotFound
from jpets.files import STALE_SECONDS, write_atomic
from jpets.plot.forms import SUFFIX as FORMS_SUFFIX
from jpets.plot.forms import read_forms
from jpets.plot.holds import held
from jpets.plot.ngrams import Window
from jpets.plot.table import SUFFIX, TableInfo

FORMAT = 1
TREE, TABLES, LAYERS, FORMS, LOCK = "tree.json", "tables", "layers", "forms", "tree.lock"
LAYERS_SUFFIX = ".safetensors"
NAMED_DIGITS = 12
"""Digits of the digest of its n-gram layers that a domain's full name ends with."""
MOST_NAMED, MOST_SHOWN = 10, 128
"""Most domains, and most characters of one, that a message has."""


@dataclasses.dataclass(frozen=True)
class Branch:
    """The root, or a domain: the name of its ``table``, and the digest of the n-gram ``layers`` that computed it."""

    table: str
    layers: str
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """How it was made: for people."""

    @property
    def files(self) -> Set[str]:
        """The paths of both in a tree's folder."""
        return {f"{TABLES}/{self.table}{SUFFIX}", f"{LAYERS}/{self.layers}{LAYERS_SUFFIX}"}

    def full_name(self, name: str) -> str:
        """``name`` with what tells vectors of other layers apart: tasks that learnt from one are wrong with others."""
        return f"{name}@{self.layers[:NAMED_DIGITS]}"


@dataclasses.dataclass(frozen=True)
class Tree:
    """``width`` is the numbers of a vector, ``count`` the layers that tables stand for; all tables store vectors
    alike, as ``kept_as`` says, and are looked up by the same normal ``forms``: a file's name, None for tokens as they
    are."""

    window: Window
    width: int
    count: int
    root: Branch
    domains: Mapping[str, Branch] = dataclasses.field(default_factory=dict)
    kept_as: TableFormat = "bfloat16"
    forms: str | None = None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises ``NotFound`` where there is none, ``InvalidTable`` for a damaged one."""
        try:
            data = json.loads((folder / TREE).read_bytes())
        except FileNotFoundError as error:
            raise NotFound(f"expected tables ({TREE}) in the backbone's folder, found none; build them") from error
        except OSError as error:
            raise InvalidTable(f"{TREE} cannot be read: {error.strerror}; mend its file or disk") from error
        except ValueError as error:
            raise InvalidTable(f"{TREE} is damaged; build the tables again") from error
        try:
            if data["format"] != FORMAT:
                raise InvalidTable(f"{TREE} must have format {FORMAT}, found {data['format']!r}")
            domains = {str(name): Branch(**own) for name, own in data["domains"].items()}
            window = Window(**data["window"])
            shape = int(data["width"]), int(data["count"])
            kept_as, forms = data.get("kept_as", "bfloat16"), data.get("forms")
            return cls(window, *shape, Branch(**data["root"]), domains, kept_as, forms)
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidTable(f"{TREE} is damaged; build the tables again") from error

    def write(self, folder: Path) -> None:
        """Replaces the tree. Raises ``OutOfSpace``."""
        document = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=2) + "\n"
        write_atomic(folder / TREE, document.encode())

    @classmethod
    def change(cls, folder: Path, change: Callable[[Self], Self]) -> Self:
        """Replaces the tree by ``change`` of it, one process at a time. Tables and layers that it does not name, and
        that nobody holds, are removed once they are a day old: a younger one may be what another process is about to
        name. A process that has one open keeps it."""
        with (folder / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            tree = change(cls.read(folder))
            tree.write(folder)
            named = {folder / name for name in tree.files | held(folder)}
            oldest = time.time() - STALE_SECONDS
            for path in [*(folder / TABLES).glob(f"*{SUFFIX}"), *(folder / LAYERS).glob(f"*{LAYERS_SUFFIX}")]:
                if path not in named and path.stat().st_mtime < oldest:
                    path.unlink(missing_ok=True)
        return tree

    @property
    def files(self) -> Set[str]:
        """The paths in the folder of all that it names."""
        forms = set[str]() if self.forms is None else {f"{FORMS}/{self.forms}{FORMS_SUFFIX}"}
        return forms.union(*(own.files for own in (self.root, *self.domains.values())))

    @property
    def vectors(self) -> str:
        """What decides all vectors of the root: its n-gram layers, and the normal forms of tokens."""
        return self.root.layers if self.forms is None else f"{self.root.layers} {self.forms}"

    @property
    def trunk(self) -> tuple[object, ...]:
        """All but the domains."""
        return self.window, self.width, self.count, self.root, self.kept_as, self.forms

    def branch(self, domain: str) -> Branch:
        """A domain by its name, or by its full name. Raises ``NotFound``."""
        name, marked, layers = domain.partition("@")
        found = self.domains.get(name)
        if found is None:
            raise NotFound(f"there is no domain {name[:MOST_SHOWN]!r}; {self._shown()}")
        if marked and layers != found.layers[:NAMED_DIGITS]:
            raise NotFound(
                f"domain {name!r} has n-gram layers {found.layers[:NAMED_DIGITS]}, expected {layers}: its vectors mean "
                "something else now; train the task again"
            )
        return found

    def _shown(self) -> str:
        some = sorted(self.domains)
        more = f" and {len(some) - MOST_NAMED} more" if len(some) > MOST_NAMED else ""
        return f"there are {some[:MOST_NAMED]}{more}" if some else "there are none"

    def having(self, domain: str, branch: Branch) -> Self:
        """With a domain, instead of one that had its name."""
        return dataclasses.replace(self, domains={**self.domains, domain: branch})

    def without(self, domain: str) -> Self:
        """Raises ``NotFound``."""
        self.branch(domain)
        name = domain.partition("@")[0]
        kept = {other: branch for other, branch in self.domains.items() if other != name}
        return dataclasses.replace(self, domains=kept)

    def read_forms(self, folder: Path, words: int) -> Int[np.ndarray, " w"] | None:
        """The normal forms of a vocabulary of ``words`` tokens. Raises ``InvalidTable``."""
        return None if self.forms is None else read_forms(folder / FORMS, self.forms, words)

    def info(self, branch: Branch) -> TableInfo:
        return TableInfo(branch.layers, self.window, self.width, self.kept_as)


def tree_stamp(folder: Path) -> tuple[int, int] | None:
    """Changes when the tree is replaced; None where there is none."""
    try:
        found = (folder / TREE).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def table_path(folder: Path, branch: Branch) -> Path:
    return folder / TABLES / f"{branch.table}{SUFFIX}"
