"""The PET methods by name: jpets' own, and those of installed packages."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence

from jpets.deltas.protocol import Method

GROUP = "jpets.methods"
"""Entry points of this group name classes of methods, as ``shift = "my_package.shift:Shift"`` in a pyproject.toml."""


class Methods(Mapping[str, Method]):
    """``own`` methods, then those of installed packages. The latter are looked up once, when a name is not one of ours
    or all are asked for: their modules import this package, and most programs need none of them.

    Entry points instead of a function to call: so the processes that compile programs find them too.
    """

    def __init__(self, own: Sequence[Method]) -> None:
        self._own = {method.name: method for method in own}

    @functools.cached_property
    def _every(self) -> Mapping[str, Method]:
        found = dict(self._own)
        for point in sorted(importlib.metadata.entry_points(group=GROUP)):
            method = point.load()()
            if not isinstance(method, Method) or method.name != point.name or method.name in found:
                raise TypeError(
                    f"entry point {point.name!r} = {point.value!r}: expected a jpets.deltas.protocol.Method of that "
                    f"name, which no other method has; found {method!r}"
                )
            found[method.name] = method
        return found

    def __getitem__(self, name: str) -> Method:
        return self._own[name] if name in self._own else self._every[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._every)

    def __len__(self) -> int:
        return len(self._every)
