"""Static shapes: buckets (tokens and attention groups) and variants (the classes that there is room for)."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from jpets.deltas import class_method
from jpets.deltas.protocol import ClassKey, Kind

MAX_GROUPS = 3
FULL = 8
HEAVY_RUNS = (32, 64, 128)
"""Tokens that one step over a heavy class may cover."""
SETUP_TOKENS = 50
"""Tokens with a heavy product as long as every step's fixed work for its weights (mask, CPU: 48 to 62)."""
LONE = sys.maxsize
LONE_LENGTHS = (128, 64)
"""Longest text that usually comes alone, and that comes so for several rows."""
STEPS = (16, 32, 64, 128, 256, 512)
"""Lengths of padded rows, below the longest allowed."""
LONE_STEPS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""The same for a row alone, with padding that no other row shares: with ``STEPS`` a lone text would compute up to twice
its tokens."""
MIXTURES = (
    ((16, 32), (128, 128), (LONE, LONE)),
    ((32, 32), (64, 64), (128, 128)),
    ((36, 64),),
    ((12, 32),),
)
"""Row mixtures of the menu's packed shapes, as (tokens, length): that many tokens for each row of up to that length.
Attention computes every row of a group, present or not, so one shape for all lengths is half as fast for short texts as
a shape made for them. The first mixture takes any length."""
SEGMENT = 32
SEGMENT_SETUP = 16
"""Tokens with thin products as long as fetching a task's matrices for a segment (adapter of 64, CPU)."""
KNOWN_CLASSES = 4096
"""Classes of which the kind is kept: a plan asks for it hundreds of times."""
LEVELS = (1, 2, 3, 4, 6, FULL)
"""Room that a variant gives a light class, in eighths of the bucket."""


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """``tokens`` packed tokens; ``groups`` ((N, L), ...) rows of at most L tokens, ascending in L."""

    tokens: int
    groups: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        lengths = [length for _, length in self.groups]
        if not 1 <= len(self.groups) <= MAX_GROUPS or lengths != sorted(set(lengths)):
            raise ValueError(f"a bucket has one to {MAX_GROUPS} groups of rising length, got {self.groups}")

    @functools.cached_property
    def rectangular(self) -> bool:
        """T = N L in one group: the tokens are padded rows already, and nothing is gathered."""
        return len(self.groups) == 1 and self.tokens == self.groups[0][0] * self.groups[0][1]

    @functools.cached_property
    def rows(self) -> int:
        return sum(n for n, _ in self.groups)

    @property
    def longest(self) -> int:
        return self.groups[-1][1]

    @functools.cached_property
    def segment(self) -> int:
        """Tokens of one segment of a light class in a packed bucket: 32, or a group's length where that wastes less."""
        sizes = {min(SEGMENT, self.longest)} | {length for _, length in self.groups if length <= 2 * SEGMENT}
        return min(sorted(sizes), key=lambda size: self._segments(size) * (SEGMENT_SETUP + size))

    def run(self, most: int) -> int:
        """Tokens that one step over a heavy class covers, about ``most``; whole rows if rows have equal lengths."""
        if self.rectangular:
            most = self.longest * (most // self.longest) if self.longest <= most else min(self.longest, 128)
        return min(most, self.tokens)

    def most_segments(self) -> int:
        """Segments (rectangular: rows) that any batch in this bucket can need."""
        return self.rows if self.rectangular else self._segments(self.segment)

    def _segments(self, size: int) -> int:
        full = sum(n * -(-length // size) for n, length in self.groups)
        return min(full, self.rows + self.tokens // size)

    def most_runs(self, most: int) -> int:
        """Runs of about ``most`` tokens that any batch in this bucket can need: a span of rows never needs more than
        its rows would alone."""
        return self._segments(self.run(most))

    def run_room(self, most: int, level: int) -> int:
        """Runs of about ``most`` tokens that ``level`` eighths of a bucket hold."""
        return -(-self.most_runs(most) * level // FULL)

    @functools.cached_property
    def rooms(self) -> npt.NDArray[np.int32]:
        """What each of ``LEVELS`` holds: ``capacity`` [levels]."""
        return np.array([capacity(self, level) for level in LEVELS], np.int32)

    def holds(self, lengths: npt.NDArray[np.integer]) -> bool:
        """Whether rows of these lengths fit: each in the shortest group that is long enough, and all in ``tokens``.

        A row never borrows a place in a longer group: its bits would then change with its companions.
        """
        if len(lengths) == 0 or len(lengths) > self.rows:
            return False
        if not self.rectangular and int(lengths.sum()) > self.tokens:
            return False
        if len(self.groups) == 1:
            return int(lengths.max()) <= self.longest
        taken = np.bincount(self.group_of(lengths), minlength=len(self.groups) + 1).tolist()
        return not taken[-1] and all(count <= n for count, (n, _) in zip(taken, self.groups, strict=False))

    def group_of(self, lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
        """Each row's group; the number of groups for a row that is too long."""
        return np.searchsorted(self._longest, lengths)

    @functools.cached_property
    def _longest(self) -> npt.NDArray[np.int32]:
        """Each group's longest row."""
        return np.array([length for _, length in self.groups], np.int32)

    def __str__(self) -> str:
        return f"{self.tokens}:" + "+".join(f"{n}x{length}" for n, length in self.groups)


@dataclasses.dataclass(frozen=True, order=True)
class Trunk:
    """The embeddings and the first ``layers`` layers, computed once, in ``bucket``, for rows of one text whose tasks do
    not differ there."""

    bucket: Bucket
    layers: int

    def mean(self, layers: int, below: float, above: float) -> float:
        """Of what all ``layers`` would take ``below``, in the trunk's bucket, and ``above`` it: each layer as much."""
        share = self.layers / layers
        return share * below + (1 - share) * above

    def __str__(self) -> str:
        return f"{self.layers} layers in {self.bucket}"


BUCKET = re.compile(r"(?:(\d{1,7}):)?(\d{1,5}x\d{1,5}(?:\+\d{1,5}x\d{1,5}){0,2})")


def parse_bucket(text: str) -> Bucket:
    """``1024:32x32+8x128`` (packed tokens: rows x length, ...), or ``8x32`` for eight padded rows of 32 tokens.

    Raises ``ValueError``.
    """
    found = BUCKET.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"a bucket is like 8x32 or 1024:32x32+8x128, got {text!r}")
    pairs = [tuple(map(int, pair.split("x"))) for pair in found[2].split("+")]
    groups = tuple((n, length) for n, length in pairs)
    tokens = int(found[1]) if found[1] else sum(n * length for n, length in groups)
    if tokens < 1 or min(min(pair) for pair in pairs) < 1:
        raise ValueError(f"a bucket has at least one token, row and length, got {text!r}")
    return Bucket(tokens, groups)


@dataclasses.dataclass(frozen=True)
class Variant:
    """Room for classes: ``light`` class -> eighths of the bucket; ``others`` are there or not (heavy, bias, head).

    ``run`` is how many tokens one step over a heavy class covers; long ones pay where many rows of one task meet. Where
    every row has a delta that replaces weights, a mask (``replaced``), the shared products of its sites are left out.

    ``runs``: eighths of the bucket's most runs for heavy classes that need no more. All of these runs are computed,
    taken or not, by operators that do not loop over those that are there.
    """

    light: tuple[tuple[ClassKey, int], ...] = ()
    others: tuple[ClassKey, ...] = ()
    run: int = HEAVY_RUNS[0]
    replaced: bool = False
    runs: tuple[tuple[ClassKey, int], ...] = ()

    def level(self, key: ClassKey) -> int:
        return self._levels.get(key, 0)

    @functools.cached_property
    def _levels(self) -> Mapping[ClassKey, int]:
        return dict.fromkeys(self.others, FULL) | dict(self.light) | dict(self.runs)

    def covers(self, needs: Mapping[ClassKey, int]) -> bool:
        """Whether all rows with these needs can run; where products are left out, only some of them can."""
        return not self.replaced and self.has_room(needs)

    def has_room(self, needs: Mapping[ClassKey, int]) -> bool:
        return all(self.level(key) >= level for key, level in needs.items())

    def classes(self) -> tuple[ClassKey, ...]:
        return (*(key for key, _ in self.light), *self.others)

    def least_slots(self) -> Mapping[ClassKey, int]:
        """Slots with which any row can run, for measurements: where products are left out, a row must have weights of
        its own."""
        return {key: 1 for key in self.classes() if replaces_weights(key)} if self.replaced else {}

    def has(self, kind: Kind) -> bool:
        return any(class_method(key.method).kind == kind for key in self.classes())

    def __str__(self) -> str:
        names = [f"{key}@{level}" for key, level in self.light]
        names += [f"{key}@{level}" if (level := self.level(key)) < FULL else str(key) for key in self.others]
        run = f" run {self.run}" if self.run != HEAVY_RUNS[0] else ""
        return (",".join(names) or "bare") + run + (" replaced" if self.replaced else "")


@functools.lru_cache(KNOWN_CLASSES)
def windowed(key: ClassKey) -> bool:
    """Classes that see a window of the batch, and so come in levels: light ones, and heads that read tokens."""
    method = class_method(key.method)
    return method.kind == "light" or (method.kind == "head" and key.option("reads") == "tokens")


def make_variant(needs: Mapping[ClassKey, int], run: int = HEAVY_RUNS[0], *, replaced: bool = False) -> Variant:
    """The tightest variant for ``needs`` (class -> level)."""
    light = tuple(sorted((key, level) for key, level in needs.items() if windowed(key)))
    others = tuple(sorted(key for key in needs if not windowed(key)))
    runs = tuple((key, needs[key]) for key in others if needs[key] < FULL)
    return Variant(light, others, run, replaced, runs)


@functools.lru_cache(KNOWN_CLASSES)
def replaces_weights(key: ClassKey) -> bool:
    """Whether rows of this class need no shared product where it acts."""
    method = class_method(key.method)
    return method.kind == "heavy" and method.step == "weight"


def widest(classes: Iterable[ClassKey], *, heavy: bool) -> Variant:
    """Room for any mixture of ``classes``, of the light ones alone unless ``heavy``."""
    return make_variant({key: FULL for key in classes if heavy or class_method(key.method).kind != "heavy"})


def capacity(bucket: Bucket, level: int) -> int:
    """Segments (rectangular: rows) that ``level`` eighths of a bucket hold."""
    return -(-bucket.most_segments() * level // FULL)


def bucket_menu(max_length: int, max_tokens: int, max_rows: int) -> tuple[Bucket, ...]:
    """The fixed menu: rectangular single rows for lone queries, packed buckets for mixtures of short and long ones.

    ``max_tokens`` is at least ``max_length``.
    """
    lengths = [length for length in LONE_STEPS if length < max_length] + [max_length]
    singles = [Bucket(length, ((1, length),)) for length in lengths]
    steps = [size for power in range(6, 20) for size in (2**power, 3 * 2 ** (power - 1)) if size < max_tokens]
    packed = [
        packed_bucket(mixture, size, max_length, max_rows)
        for size in sorted({*steps, max_tokens})
        for mixture in MIXTURES
    ]
    filled = [bucket for bucket in packed if bucket.tokens <= sum(n * length for n, length in bucket.groups)]
    return tuple(dict.fromkeys([*singles, *filled]))


def steady_menu(max_length: int, max_tokens: int, max_rows: int | None = None) -> tuple[Bucket, ...]:
    """Rectangular buckets of about ``max_tokens`` tokens and at most ``max_rows`` rows, one for each step of length:
    for the policy ``steady``."""
    lengths = [length for length in STEPS if length < max_length] + [max_length]
    most = max_tokens if max_rows is None else max_rows
    rows = [(max(1, min(most, max_tokens // length)), length) for length in lengths]
    return tuple(Bucket(n * length, ((n, length),)) for n, length in rows)


EACH_ROWS = 5
"""Rows of one text up to which there is a shape for each number: a group of students drops one at a time."""


def lone_buckets(rows: int, longest: int) -> list[Bucket]:
    """Padded rows for one text alone: one row, for lengths up to ``LONE_LENGTHS``, then up to ``rows`` of it at once,
    for shorter ones."""
    powers = (2**power for power in range(rows.bit_length()) if 2**power < rows)
    sizes = sorted({rows, *range(1, min(rows, EACH_ROWS + 1)), *powers})
    lengths = [[length for length in LONE_STEPS if length <= min(longest, most)] for most in LONE_LENGTHS]
    return [Bucket(n * length, ((n, length),)) for n in sizes for length in lengths[n > 1]]


def core_programs(menu: Sequence[Bucket], light: Variant, heavy: Variant) -> list[tuple[Bucket, Variant]]:
    """What must be ready before the first query: the smallest part of the menu that takes any batch without much waste.

    Heavy variants take longest to compile, so they get only two buckets: the second alone holds any single query.
    """
    longest = max(b.longest for b in menu)
    mixed = {b.tokens: b for b in sorted(menu, key=lambda b: (b.longest, b.rows))}
    *_, largest = sorted((b for b in menu if b.longest == longest), key=lambda b: (b.tokens, b.rows))
    packed = list(dict.fromkeys([*(mixed[tokens] for tokens in (128, 512) if tokens in mixed), largest]))
    singles = [b for b in menu if b.rows == 1 and b.rectangular and b.longest in (32, 128, longest)]
    chosen = [(b, light) for b in [*singles, *packed]]
    return list(dict.fromkeys([*chosen, *((b, heavy) for b in dict.fromkeys([packed[0], largest]))]))


def packed_bucket(mixture: Sequence[tuple[int, int]], tokens: int, max_length: int, max_rows: int) -> Bucket:
    """``tokens`` tokens with room for rows of the lengths of ``mixture``: one row for each of its numbers of tokens."""
    groups: dict[int, int] = {}
    for per_row, length in mixture:
        rows = max(1, min(max_rows, tokens // per_row))
        cut = min(length, tokens, max_length)
        groups[cut] = max(rows, groups.get(cut, 0))
    return Bucket(tokens, tuple((n, length) for length, n in sorted(groups.items())))
