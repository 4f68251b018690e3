"""Types of request fields that several protocols share."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, Field, StrictInt, StrictStr


def is_unicode(text: str) -> bool:
    """False for half a surrogate pair, which JSON can spell and no encoding can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def declared_length(header: str) -> int:
    """A ``Content-Length``; a value that is not a number, or needs more than 64 bits, counts as the largest."""
    return int(header) if DIGITS.fullmatch(header) else NO_LENGTH


def _unicode(text: str) -> str:
    if not is_unicode(text):
        raise ValueError("expected valid Unicode, found half of a surrogate pair")
    return text


DIGITS = re.compile(r"\d{1,18}", re.ASCII)
NO_LENGTH = (1 << 63) - 1
Text = Annotated[StrictStr, AfterValidator(_unicode)]
MOST_MODEL = 128
ModelName = Annotated[Text, Field(max_length=MOST_MODEL)]
Side = Literal["left", "right", "Left", "Right"]
"""Of a text that is cut; text-embeddings-inference writes it large, Hugging Face's client small."""
Int64 = Annotated[StrictInt, Field(ge=-(1 << 63), lt=1 << 63)]
"""A whole number that every reader can hold."""
Item = TypeVar("Item")
Many = Annotated[list[Item], Field(fail_fast=True)]
"""A list in which only the first wrong item is reported, not each of a million."""
