"""What a task's rule sets around the texts of a query, and where they then stand."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from jpets.errors import InvalidInput
from jpets.passage import Context
from jpets.types import Preprocessing, Query

HOLES = re.compile(r"\{text(?:_pair)?\}")
"""Where a template takes texts."""
Place = tuple[int, int, int]
"""First and last character of a text, and its number."""


def prompted(rule: Preprocessing, query: Query) -> Preprocessing:
    """The rule for a query that names one of its prompts. Raises ``InvalidInput`` for another prompt, and beside token
    ids."""
    if query.prompt is None:
        return rule
    if query.input_ids is not None:
        raise InvalidInput("prompt: expected none beside token ids, which are taken as they are; leave it out")
    prompts = rule.prompts or {}
    if query.prompt not in prompts:
        known = f"one of {[name[:32] for name in sorted(prompts)[:8]]}" if prompts else "none, as there are no prompts"
        raise InvalidInput(f"prompt: expected {known}, found {query.prompt[:64]!r}")
    return dataclasses.replace(rule, prefix=prompts[query.prompt])


def filled(template: str, text: str, pair: str | None) -> str:
    parts = {"{text}": text, "{text_pair}": pair or ""}
    return HOLES.sub(lambda found: parts[found[0]], template)


def prepared(text: str, pair: str | None, rule: Preprocessing) -> tuple[str, str | None]:
    """What a rule makes of a query's texts. Raises ``InvalidInput`` for an empty text, and for a second one that the
    rule's template leaves out."""
    if not text.strip():
        raise InvalidInput("the text is empty; send at least one character that is not white space")
    if rule.template is None:
        return (rule.prefix or "") + text, pair
    if pair and "{text_pair}" not in rule.template:
        raise InvalidInput("the task's template has no place for a second text; send one text")
    return filled(rule.template, text, pair), None


def context_of(text: str, pair: str | None, rule: Preprocessing) -> Context:
    """Where a rule puts the context of a question."""
    if rule.template is None:
        return Context(0, len(rule.prefix or ""), text) if pair is None else Context(1, 0, pair)
    place, found = ("{text}", text) if pair is None or "{text_pair}" not in rule.template else ("{text_pair}", pair)
    return Context(0, len(filled(rule.template.partition(place)[0], text, pair)), found)


def places_of(text: str, pair: str | None, rule: Preprocessing) -> Iterator[Place]:
    """Where a rule puts the query's texts, in the first of what it gives."""
    if rule.template is None:
        at = len(rule.prefix or "")
        yield at, at + len(text), 0
        return
    at = read = 0
    for hole in HOLES.finditer(rule.template):
        own, number = (text, 0) if hole[0] == "{text}" else (pair or "", 1)
        at += hole.start() - read
        yield at, at + len(own), number
        at, read = at + len(own), hole.end()
