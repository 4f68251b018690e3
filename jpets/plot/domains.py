"""The tables of all domains in memory, where tokens are looked up."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Shaped

from jpets.errors import Conflict, EngineFailure, InvalidInput, InvalidTable, JpetsError
from jpets.files import SHORTAGES
from jpets.plot.arena import RANGE_BYTES, Arena
from jpets.plot.lookup import Lookup
from jpets.plot.opened import LevelCounts, OpenDomain, Placed
from jpets.plot.table import Table
from jpets.plot.tree import Branch, Tree, table_path, tree_stamp
from jpets.types import DomainReport

log = logging.getLogger(__name__)

ROOT_NAME = ""
LOOK_SECONDS = 1.0
"""Seconds between looks for a tree that another process wrote."""
OTHER_ROOT = "the root of the tables changed: load the backbone again"
AGAIN_SECONDS = 60.0
"""Seconds after which tables that could not be used are tried again."""


@dataclasses.dataclass(frozen=True)
class _View:
    """What a moment's look-ups use: never changed, so a switch is one assignment."""

    tree: Tree
    opened: Mapping[str | None, OpenDomain]
    """By domain; None is the root alone. A domain without one could not be opened. None at all if the root's file was
    written to while it was open."""
    problems: Mapping[str, str]
    """Why a domain could not be opened, or not in its newest version."""

    @property
    def placed(self) -> Mapping[str, Placed]:
        """By the tables' names."""
        return {placed.table.name: placed for own in self.opened.values() for placed in own.placed}


class DomainTables:
    """The tables of a tree's folder. ``words`` is the size of the vocabulary. Thread-safe.

    Opening reads keys alone; a vector is compared with its digest before a token is sent to it. Raises ``NotFound``,
    ``InvalidTable`` where the root cannot be used, ``OutOfSpace``. A domain whose table is damaged is refused, or stays
    what it was before.
    """

    def __init__(self, folder: Path, words: int, size: int = RANGE_BYTES) -> None:
        self.folder, self._words = folder, words
        self._stamp, self._looks_at = tree_stamp(folder), time.monotonic() + LOOK_SECONDS
        self._again_at, self._patient_until, self._mended_at = math.inf, -math.inf, -math.inf
        tree = Tree.read(folder)
        self._forms = tree.read_forms(folder, words)
        self._arena = Arena(tree.info(tree.root), size)
        self._placed: dict[str, Placed] = {}
        self._lock = threading.Lock()
        """Held while the tree is read again."""
        self._counts = LevelCounts(tree.window.level_names)
        self._view = self._opened(tree, None)
        self._plan_again()

    @property
    def tree(self) -> Tree:
        return self._view.tree

    @property
    def values(self) -> Shaped[np.ndarray, "r p e"]:
        """The vectors of all tables: what a program takes."""
        return self._arena.values

    @property
    def moved(self) -> int:
        """As ``jpets.types.RowSource`` has it."""
        return self._arena.moved

    def full_name(self, domain: str) -> str:
        """As ``jpets.types.RowSource`` has it: by the tree as it is now, also where no text is looked up."""
        if tree_stamp(self.folder) != self._stamp:
            self._take_over()  # or waits for whoever does
        return self._view.tree.branch(domain).full_name(domain.partition("@")[0])

    def opened(self, domain: str | None) -> OpenDomain:
        """As ``jpets.types.RowSource`` has it."""
        self._look()
        found = self._found(domain)
        if found.lookup.is_overwritten:
            self._take_over()
            found = self._found(domain)
            if found.lookup.is_overwritten:
                raise EngineFailure("a table was written to while it was open, and cannot be read again; build it anew")
        return found

    def _found(self, domain: str | None) -> OpenDomain:
        """Raises ``NotFound``, ``EngineFailure``."""
        view, name = self._view, None
        if domain is not None:
            view.tree.branch(domain)
            name = domain.partition("@")[0]
        found = view.opened.get(name)
        if found is None:
            whose = "root" if name is None or None not in view.opened else f"table of domain {name!r}"
            raise EngineFailure(f"the {whose} is damaged or missing; build it again")
        return found

    def reload(self) -> None:
        """Reads the tree again: look-ups that come later use its tables. Raises ``NotFound``, ``InvalidTable``; then
        everything stays as it is."""
        with self._lock:
            self._reload()

    def _reload(self) -> None:
        """Whatever comes of it, the tree was looked at."""
        stamp = tree_stamp(self.folder)
        try:
            self._view = self._opened(Tree.read(self.folder), self._view)
            self._plan_again()
            self._patient_until = -math.inf
        finally:
            self._stamp, self._mended_at = stamp, time.monotonic() + AGAIN_SECONDS

    def check_writable(self) -> None:
        """As ``jpets.types.RowSource`` has it."""
        if not os.access(self.folder, os.W_OK):
            raise InvalidInput(
                "the tables are in a folder that this server may not write to: give it a copy of its own"
            )

    def add(self, domain: str, branch: Mapping[str, Any], *, same_layers: bool = False) -> None:
        """As ``jpets.types.RowSource`` has it."""
        try:
            made = Branch(**branch)
        except TypeError as error:
            raise InvalidTable(f"domain {domain!r} was made by another version of jpets; make it again") from error
        try:
            with self._lock:  # before the tree names it: others take it over as soon as it does
                self._place(self.tree, made)
        except InvalidTable as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in SHORTAGES:
                raise EngineFailure(error.message) from error  # of the server, not of what was made
            raise

        def having(tree: Tree) -> Tree:
            if tree.trunk != self.tree.trunk:
                raise InvalidTable(OTHER_ROOT)
            present = tree.domains.get(domain)
            if same_layers and present is not None and present.layers != made.layers:
                raise Conflict(
                    f"domain {domain!r} has other n-gram layers by now, which tasks may have learnt from: make a table "
                    "for these layers, choose another name, or delete the tasks and the domain first"
                )
            return tree.having(domain, made)

        try:
            Tree.change(self.folder, having)
        except BaseException:
            with self._lock:
                if made.table not in self._view.placed:
                    self._placed.pop(made.table, None)
            raise
        self.reload()
        if made.table not in self._view.placed:
            raise InvalidTable(self._view.problems.get(domain, f"domain {domain!r} was replaced meanwhile"))

    def remove(self, domain: str) -> None:
        """As ``jpets.types.RowSource`` has it."""
        self.check_writable()

        def without(tree: Tree) -> Tree:
            if tree.trunk != self.tree.trunk:
                raise Conflict(OTHER_ROOT)
            return tree.without(domain)

        try:
            Tree.change(self.folder, without)
            self.reload()
        except InvalidTable as error:  # of the server's files, not of the request
            raise EngineFailure(error.message) from error

    def report(self) -> Sequence[DomainReport]:
        """As ``jpets.types.RowSource`` has it."""
        self._look()
        view = self._view
        found = []
        for name, branch in [(ROOT_NAME, view.tree.root), *sorted(view.tree.domains.items())]:
            own = view.opened.get(name or None)
            placed = None if own is None else own.domain if name else own.root
            sizes = (placed.table.entries, placed.table.size) if placed is not None else (0, 0)
            levels, problem = self._counts.of(name), view.problems.get(name)
            if problem is None and placed is not None and placed.table.is_damaged:
                problem = "a part of the table is damaged; build it again"
            found.append(DomainReport(name, branch.full_name(name), *sizes, levels, problem))
        return found

    def _look(self) -> None:
        """Has the tree read again, aside, where it was replaced, where a table was written to, and now and then while
        one cannot be used."""
        now = time.monotonic()
        if now < self._looks_at:
            return
        self._looks_at = now + LOOK_SECONDS
        if self._is_due:
            threading.Thread(target=self._take_over, name="jpets-tables", daemon=True).start()

    @property
    def _is_due(self) -> bool:
        """Whether the tree is to be read again."""
        if time.monotonic() >= self._again_at or tree_stamp(self.folder) != self._stamp:
            return True
        if time.monotonic() < self._patient_until:
            return False
        placed = [own.table for own in [*self._placed.values()]]
        if any(table.is_overwritten for table in placed):
            return True
        return time.monotonic() >= self._mended_at and any(table.is_replaced for table in placed)

    def _plan_again(self) -> None:
        """A table that is missing may come back."""
        self._again_at = time.monotonic() + AGAIN_SECONDS if self._view.problems else math.inf

    def _take_over(self) -> None:
        """Reads a tree that others have written, or whose tables were written to or could not be used, if nobody has
        meanwhile."""
        try:
            with self._lock:
                if self._is_due:
                    self._reload()
        except Exception:  # whatever it was, the next look may be luckier
            self._again_at = self._patient_until = time.monotonic() + AGAIN_SECONDS
            log.exception("the tables were replaced, and the new ones cannot be used")

    def _opened(self, tree: Tree, before: _View | None) -> _View:
        if before is not None and tree.trunk != before.tree.trunk:
            raise InvalidTable(OTHER_ROOT)
        try:
            root = self._place(tree, tree.root)
        except InvalidTable as error:
            known = before.opened.get(None) if before is not None else None
            if before is None or (known is not None and not known.root.table.is_overwritten):
                raise
            log.error("the root of the tables cannot be used any more", extra={"problem": error.message})
            self._placed = {name: own for name, own in self._placed.items() if not own.table.is_overwritten}
            return _View(tree, MappingProxyType({}), MappingProxyType({ROOT_NAME: error.message}))
        alone = Lookup(root.table, self._words, self._forms)
        opened: dict[str | None, OpenDomain] = {None: OpenDomain(alone, root, None, self._counts, ROOT_NAME)}
        problems = dict[str, str]()

        def of_domain(name: str, own: Placed) -> OpenDomain:
            return OpenDomain(alone.of_domain(own.table), root, own, self._counts, name)

        for name, branch in tree.domains.items():
            try:
                opened[name] = of_domain(name, self._place(tree, branch))
            except JpetsError as error:
                problems[name] = error.message
                log.error("the table of a domain cannot be used", extra={"domain": name, "problem": error.message})
                old = before.opened.get(name) if before is not None else None
                if old is None or old.domain is None or old.domain.table.info != tree.info(branch):
                    continue
                if not old.domain.table.is_overwritten:
                    opened[name] = of_domain(name, old.domain)
        view = _View(tree, MappingProxyType(opened), MappingProxyType(problems))
        self._placed = dict(view.placed)
        return view

    def _place(self, tree: Tree, branch: Branch) -> Placed:
        """Raises ``InvalidTable``, ``OutOfSpace``."""
        placed = self._placed.get(branch.table)
        if placed is None or placed.table.is_overwritten or placed.table.is_replaced:  # it is compared anew
            table = self._table(tree, branch)
            self._placed[branch.table] = Placed(table, self._arena.map(table))
        return self._placed[branch.table]

    def _table(self, tree: Tree, branch: Branch) -> Table:
        """Raises ``InvalidTable``."""
        try:
            return Table(table_path(self.folder, branch), tree.info(branch))
        except OSError as error:
            raise InvalidTable(f"the table cannot be read: {error.strerror}") from error
