"""Words of package descriptions that name packages, as tags B-PKG, I-PKG and O."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

LONGEST = 3
"""Words that may spell one name: "GNOME terminal" is ``gnome-terminal``."""
SIGNS = re.compile(r"[-+.\d]")
AROUND = ".,;:!?()[]{}\"'`"
TAGS = ("B-PKG", "I-PKG", "O")


def plain(word: str) -> str:
    """A word as names are written: in lower case, without the punctuation around it."""
    return word.strip(AROUND).casefold()


class Mentions:
    """Finds names of packages among words.

    Many names are common words as well (``file``, ``make``, ``time``). One that looks like a word, without digit, dash,
    dot or plus, counts where at least half of the descriptions with that word are of packages whose own names hold it:
    "documentation for gkrellm" is gkrellm-doc's, but most descriptions with "file" have nothing to do with ``file``.
    The description of a package counts as one that mentions it, where it says its own name: a text alone does not tell.
    """

    def __init__(self, packages: Iterable[tuple[str, str]]) -> None:
        """``packages`` are (name, description)."""
        every = list(packages)
        names = {name for name, _ in every}
        seen: Counter[str] = Counter()
        related: Counter[str] = Counter()
        for name, text in every:
            parts = {name, *re.split(r"[-+.]", name)}
            for word in {plain(word) for word in text.split()} & names:
                seen[word] += 1
                related[word] += word in parts
        self._names = {
            name
            for name in names
            if re.search("[a-z]", name) and (SIGNS.search(name) or 2 * related[name] >= max(1, seen[name]))
        }

    def tags(self, words: Sequence[str]) -> list[str]:
        """One tag a word; where several names begin at a word, the longest."""
        plains = [plain(word) for word in words]
        found: list[str] = []
        while (at := len(found)) < len(words):
            sizes = range(min(LONGEST, len(words) - at), 0, -1)
            size = next((n for n in sizes if "-".join(plains[at : at + n]) in self._names), 0)
            found += ["B-PKG", *["I-PKG"] * (size - 1)] if size else ["O"]
        return found
