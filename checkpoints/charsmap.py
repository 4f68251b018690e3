"""Replacements of single characters in the one form that ``tokenizers`` applies in one pass: a compiled table.

    bytes of the units u32 | units u32 ... | replacements, a zero byte behind each

The units are a double array over the characters' UTF-8 (as SentencePiece compiles it). A unit's lowest byte is the byte
that leads to it, bit 8 says that a character ends there, and the bits from 10 on are its own place XOR the place from
which its successors are reached: that of a byte b is at this place XOR b, that of the replacement's number at it
itself. Here every node has 256 units of its own, so that nodes do not share any.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np

from jpets.errors import InvalidBackbone

FANOUT = 256
ENDS, IS_NUMBER = 1 << 8, 1 << 31
MOST_UNITS = 1 << 21
"""Places that the bits of a unit can tell apart."""


def compiled(replacements: Mapping[str, str]) -> bytes:
    """The table, as ``Precompiled`` takes it. Keys are single characters, and nothing holds the character zero.

    Raises ``InvalidBackbone`` for more of them than a table can hold.
    """
    keys = sorted(own.encode() for own in replacements)
    nodes = {b"": 0}
    for key in keys:
        for end in range(1, len(key)):
            nodes.setdefault(key[:end], len(nodes))
    numbers = FANOUT * len(nodes)
    size = numbers + FANOUT * -(-len(keys) // FANOUT)  # in whole blocks, so that no search leaves them
    if size > MOST_UNITS:
        raise InvalidBackbone(
            f"expected replacements that fit a table of {MOST_UNITS:,} units, found {len(keys):,} that need {size:,}; "
            "look how the file was made"
        )
    units = np.zeros(size, "<u4")

    def link(key: bytes, onward: int, flags: int) -> None:
        at = FANOUT * nodes[key[:-1]] + key[-1]
        units[at] = key[-1] | flags | (at ^ onward) << 10

    for prefix, node in nodes.items():
        if prefix:
            link(prefix, FANOUT * node, 0)
    texts = bytearray()
    for place, key in enumerate(keys, numbers):
        link(key, place, ENDS)
        units[place] = IS_NUMBER | len(texts)
        texts += replacements[key.decode()].encode() + b"\0"
    return struct.pack("<I", units.nbytes) + units.tobytes() + bytes(texts)
