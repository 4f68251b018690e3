"""Shape classes of deltas, and their names."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote


@dataclasses.dataclass(frozen=True, order=True)
class ClassKey:
    """Shape class of a delta: all deltas of a class share a bank and the code that reads it.

    ``sites`` pairs each site with its size step (rank, bottleneck, non-zeros; 0 where the method has none);
    ``options`` are settings that change the code (an activation); ``ordinal`` counts a task's deltas of one method.
    """

    method: str
    sites: tuple[tuple[str, int], ...] = ()
    layers: tuple[int, ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    ordinal: int = 0

    def covers(self, other: ClassKey) -> bool:
        """Whether a delta of class ``other`` fits into this class's bank, padded."""
        mine = dict(self.sites)
        return (
            (self.method, self.options, self.ordinal) == (other.method, other.options, other.ordinal)
            and set(other.layers) <= set(self.layers)
            and all(mine.get(site, -1) >= size for site, size in other.sites)
        )

    def volume(self) -> int:
        """Grows with the cost of a row of this class; chooses the tightest of several classes that cover."""
        return len(self.layers) * sum(1 + size for _, size in self.sites)

    def option(self, name: str) -> str:
        return dict(self.options)[name]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ClassKey:
        """The inverse of ``dataclasses.asdict``, also after JSON made lists of its tuples."""
        pairs = {name: tuple((str(a), b) for a, b in data[name]) for name in ("sites", "options")}
        return cls(data["method"], pairs["sites"], tuple(data["layers"]), pairs["options"], data["ordinal"])

    def __str__(self) -> str:
        """A unique name of the class: files and metrics keep figures under it."""
        return self._name

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> Mapping[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def _hash(self) -> int:
        """Kept, as a plan looks classes up hundreds of times; of this process alone, as hashes of texts are."""
        return hash((self.method, self.sites, self.layers, self.options, self.ordinal))

    @functools.cached_property
    def _name(self) -> str:
        sites = "+".join(f"{quote(site, '')}:{size}" if size else quote(site, "") for site, size in self.sites)
        layers = "+".join(_spans(self.layers))
        options = (f"{quote(name, '')}={quote(value, '')}" for name, value in self.options)
        parts = [quote(self.method, ""), sites, *options, f"layers {layers}" if layers else ""]
        return "/".join(filter(None, parts)) + (f"#{self.ordinal}" if self.ordinal else "")


def _spans(numbers: Sequence[int]) -> Iterator[str]:
    """Runs of rising neighbours, as ``0-3`` and ``7``."""
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        first, *rest = (number for _, number in run)
        yield f"{first}-{rest[-1]}" if rest else str(first)
