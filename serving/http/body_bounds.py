"""How much a JSON body may hold. It is counted in the raw bytes: nothing is built of a body that holds too much."""

from __future__ import annotations

import dataclasses
import functools
from typing import Self

import numpy as np
import numpy.typing as npt

from jpets.errors import TooLarge, Unparseable

Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
FEW = 4096
"""Bytes of a body that is too small to hold much."""
PIECE = 1 << 18
"""Bytes that are scanned together: what is computed of them stays in the processor's cache."""
MOST_DIGITS = 64
"""A power of two. No number here needs so many digits; Python itself refuses to read 4,301."""
BACKSLASH, QUOTE, COMMA, COLON, OPEN, CLOSE = b'\\",:{}'
CASE = 0x20
"""Turns a brace's code into a bracket's."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """``values`` are separated by commas, ``names`` are the keys of objects, ``containers`` lists and objects."""

    values: int = 1 << 19
    names: int = 4096
    containers: int = 4096
    depth: int = 16

    @classmethod
    @functools.cache
    def of(cls, max_inputs: int) -> Self:
        """Room for so many inputs in any protocol: an object of three names each, or a list of ids in three tensors."""
        return cls(names=4 * max_inputs + 256, containers=4 * max_inputs + 256)


def check_bounds(body: bytes, bounds: Bounds) -> None:
    """Raises ``TooLarge`` or ``Unparseable`` naming the bound that is exceeded. It does not check that the body is
    JSON."""
    if len(body) > FEW:
        scan = _Scan(bounds)
        at = 0
        while at < len(body):
            at += scan.read(body[at : at + PIECE])


class _Scan:
    """Reads a body piece by piece."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._values = self._names = self._containers = self._depth = 0
        self._in_string = False
        self._digits: Mask = np.zeros(MOST_DIGITS - 1, np.bool_)
        """Which of the last bytes are digits of numbers."""

    def read(self, piece: bytes) -> int:
        """Counts what ``piece`` holds; returns how many of its bytes were read."""
        if BACKSLASH in piece:  # in strings only, where an escaped quotation mark ends nothing
            piece = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__")
            if piece[-1] == BACKSLASH and len(piece) > 1:
                piece = piece[:-1]
        if self._in_string and QUOTE not in piece:
            self._digits = np.zeros_like(self._digits)
            return len(piece)
        text: Bytes = np.frombuffer(piece, np.uint8)
        free = self._outside_strings(text)
        self._count(text, free)
        self._measure_numbers(text, free)
        return len(piece)

    def _outside_strings(self, text: Bytes) -> Mask:
        quotes = text == QUOTE
        within: Mask = np.logical_xor.accumulate(quotes) ^ self._in_string
        self._in_string = bool(within[-1])
        return ~within

    def _count(self, text: Bytes, free: Mask) -> None:
        bounds, braces = self._bounds, text | CASE
        opened, closed = (braces == OPEN) & free, (braces == CLOSE) & free
        self._check_depth(opened, closed)
        self._values += int(np.count_nonzero((text == COMMA) & free))
        self._names += int(np.count_nonzero((text == COLON) & free))
        self._containers += int(np.count_nonzero(opened))
        for found, most, what in (
            (self._containers, bounds.containers, "lists and objects"),
            (self._names, bounds.names, "names of fields"),
            (self._values, bounds.values, "values"),
        ):
            if found > most:
                raise TooLarge(f"the body has more than {most} {what}; send fewer inputs in one request")

    def _check_depth(self, opened: Mask, closed: Mask) -> None:
        steps = opened.astype(np.int8) - closed
        depths = self._depth + np.cumsum(steps[steps != 0], dtype=np.int64)
        if not len(depths):
            return
        self._depth = int(depths[-1])
        if depths.max() > self._bounds.depth:
            raise Unparseable(f"the body has lists or objects that nest deeper than {self._bounds.depth} levels")
        if depths.min() < 0:
            raise Unparseable("the body is not valid JSON: it closes more lists and objects than it opens")

    def _measure_numbers(self, text: Bytes, free: Mask) -> None:
        digits = np.concatenate([self._digits, (text - ord("0") < 10) & free])
        self._digits = digits[-(MOST_DIGITS - 1) :]
        length = 1
        while length < MOST_DIGITS and len(digits) > length:  # marks where runs of that many digits begin
            digits = digits[:-length] & digits[length:]
            length *= 2
        if digits.any():
            raise Unparseable(f"the body has a number of {MOST_DIGITS} digits or more; the most are {MOST_DIGITS - 1}")
