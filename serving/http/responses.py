"""JSON answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import orjson
from starlette.responses import JSONResponse


class FastJSONResponse(JSONResponse):
    """Encodes numpy arrays as they are: as Python floats, an embedding takes longer to write than to compute."""

    def render(self, content: Any) -> bytes:
        return _dumped(content)

    @classmethod
    def in_pieces(cls, content: Any) -> Self:
        """The same bytes, written by many short calls: another thread may run between two of them."""
        response = cls(None)
        response.body = b"".join(_pieces(content, LEVELS))
        response.init_headers(None)
        return response


PIECE = 1 << 14
"""Values of a list that are written in one call."""
LEVELS = 4
"""Levels of containers that are written part by part: the response, its list, an item or vector of it, that item's
values."""


def _pieces(content: Any, levels: int) -> Iterator[bytes]:
    if levels and isinstance(content, dict):
        for at, (name, value) in enumerate(content.items()):
            yield (b"," if at else b"{") + orjson.dumps(name) + b":"
            yield from _pieces(value, levels - 1)
        yield b"}" if content else b"{}"
    elif levels and isinstance(content, list) and content and isinstance(content[0], dict | np.ndarray):
        for at, value in enumerate(content):
            yield b"," if at else b"["
            yield from _pieces(value, levels - 1)
        yield b"]"
    elif isinstance(content, (list, np.ndarray)) and len(content) > PIECE:
        for at in range(0, len(content), PIECE):
            yield (b"," if at else b"[") + _dumped(content[at : at + PIECE])[1:-1]
        yield b"]"
    else:
        yield _dumped(content)


def _dumped(content: Any) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
