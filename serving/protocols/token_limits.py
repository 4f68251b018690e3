"""Texts of which a client wants so many tokens to be read and no more."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from jpets.errors import InputTooLong, InvalidInput
from jpets.tokenizing import TextEncoder
from jpets.types import Preprocessing, Query, Side
from serving.http.fields import Int64
from serving.requests.ask import EACH
from serving.requests.context import Context

AT_ONCE = 16
"""Texts that are cut in one go."""
PromptTokens = Literal[-1] | Annotated[Int64, Field(ge=1)]
"""vLLM's ``truncate_prompt_tokens``: so many tokens of a text or a pair are read, special ones included, and what is
beyond is cut. -1: as many as the task takes."""


def bounded(most: PromptTokens | None, truncate: bool | None) -> tuple[bool | None, int | None]:
    """``truncate`` and ``max_length`` of a ``Query``. Raises ``InvalidInput`` where one option cuts texts and the other
    forbids it."""
    if most is None:
        return truncate, None
    if truncate is False:
        raise InvalidInput("truncate_prompt_tokens: texts are cut by it, which truncate: false forbids; leave one out")
    return True, None if most < 0 else most


async def cut_all(
    here: Context, task: str | None, texts: Sequence[str], option: str, most: int, truncate: bool | Side = True
) -> list[str]:
    """Of each text the part that has ``most`` tokens, as ``option`` asks (``cut``). Raises ``InputTooLong``,
    ``OverQuota``."""
    here.asker.allowance.check([Query(task, text) for text in texts])
    encoder = await here.encoder(task)
    found: list[str] = []
    for first in range(0, len(texts), AT_ONCE):  # in between it may be given up, and others have their turn
        some = texts[first : first + AT_ONCE]
        effort = sum(EACH + len(text) for text in some)
        try:
            found += await here.aside.do(effort, partial(_cut_some, encoder, some, most, truncate))
        except InputTooLong as error:
            raise InputTooLong(f"{option}: {error.message}") from error
    return found


def _cut_some(encoder: TextEncoder, texts: Sequence[str], most: int, truncate: bool | Side) -> list[str]:
    return [cut(encoder, text, most, truncate) for text in texts]


def cut(encoder: TextEncoder, text: str, most: int, truncate: bool | Side = True) -> str:
    """The part of a text that has ``most`` tokens; all of it where no model takes as many.

    It is cut on the side that ``truncate`` names, by default the model's. Raises ``InputTooLong`` for a text of more
    tokens that is not to be cut.
    """
    limit = most + encoder.tokenizer.num_special_tokens_to_add(False)
    if limit > encoder.longest or not text.strip():
        return text
    tokens = encoder.encode(Query(None, text, truncate=truncate), Preprocessing(max_length=limit), spelled=True)
    assert tokens.spelling is not None
    if not truncate or len(tokens.ids) < limit or (reach := tokens.spelling.reach()) is None:
        return text
    begin, end = reach
    side = truncate if isinstance(truncate, str) else encoder.side
    return text[begin:] if side == "left" else text[:end]
