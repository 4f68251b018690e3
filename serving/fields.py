"""Types of request fields that several protocols share."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, StrictStr


def is_unicode(text: str) -> bool:
    """False for half a surrogate pair, which JSON can spell and no encoding can hold."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _unicode(text: str) -> str:
    if not is_unicode(text):
        raise ValueError("expected valid Unicode, found half of a surrogate pair")
    return text


Text = Annotated[StrictStr, AfterValidator(_unicode)]
ModelName = Annotated[Text, Field(max_length=128)]
