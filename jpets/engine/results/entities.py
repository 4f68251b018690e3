"""Entities among labelled tokens, as ``transformers``' token classification pipeline finds them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence, Set
from typing import NamedTuple

import numpy as np

from jpets.engine.results.numbers import softmax
from jpets.spelling import Spelling, Written
from jpets.types import Aggregation, Entity, FloatArray, Tokens

IGNORED = frozenset({"O"})
"""Labels of which no entities are made, where no others are named."""
TAG = re.compile(r"^[BIESLU]-")
"""A prefix that says where in an entity a token stands."""


class _Word(NamedTuple):
    """A token, or the tokens of a word: ``first`` to ``last``, exclusive; ``score`` is that of its ``label``."""

    label: str
    score: float
    first: int
    last: int
    piece: str


def aggregated(
    result: Tokens,
    how: Aggregation = "simple",
    ignored: Set[str] = IGNORED,
    *,
    anew: bool = False,
    cut: bool = False,
) -> tuple[Entity, ...]:
    """The entities of labelled tokens, made in that way, but for labels that are ``ignored``. ``anew``: the result has
    another spelling than the one that its own entities were found by. ``cut``: labels begin behind their first dash, as
    in ``transformers``' pipeline, also where that is no tag's."""
    cut = cut and any("-" in name and not TAG.match(name) for name in result.names)
    if result.spelling is None or (not anew and not cut and (how, ignored) == ("simple", IGNORED)):
        return result.entities
    return entities(softmax(result.logits), result.names, result.spelling, how, ignored, cut=cut)


def of_windows(found: Sequence[Sequence[Entity]]) -> tuple[Entity, ...]:
    """The entities of overlapping windows of a text: of two that overlap the longer one stays, of equally long ones
    that of the higher score, as in ``transformers``' pipeline."""
    kept: list[Entity] = []
    for entity in sorted(
        (each for window in found for each in window), key=lambda each: (each.in_pair, each.start or 0)
    ):
        last = kept[-1] if kept else None
        if last is None or last.in_pair != entity.in_pair or not _begins_in(entity, last):
            kept.append(entity)
        elif _size(entity) > _size(last) or (_size(entity) == _size(last) and entity.score > last.score):
            kept[-1] = entity
    return tuple(kept)


def _begins_in(entity: Entity, other: Entity) -> bool:
    assert entity.start is not None and other.start is not None and other.end is not None
    return other.start <= entity.start < other.end


def _size(entity: Entity) -> int:
    assert entity.start is not None and entity.end is not None
    return entity.end - entity.start


def entities(
    probs: FloatArray,
    labels: Sequence[str],
    spelling: Spelling,
    how: Aggregation = "simple",
    ignored: Set[str] = IGNORED,
    *,
    cut: bool = False,
) -> tuple[Entity, ...]:
    """The entities that tokens with ``probs`` [tokens, labels] spell; those of a label that is ``ignored`` are none.

    ``none``: each token alone, with its whole label. ``simple``: neighbours of one label, of which ``B-`` begins a new
    entity; the score is the mean of its tokens'. ``first``, ``average`` and ``max`` do so with words: a word has the
    label and score of its first token, of the mean of its tokens' probabilities, or of its surest token. These need the
    query's texts; of token ids each token is a word. No entity reaches from one text into the other, nor over tokens
    that belong to none.
    """
    own = spelling.of_text
    at = np.flatnonzero(own >= 0)
    ends = np.flatnonzero((np.diff(at) > 1) | (np.diff(own[at]) != 0)) + 1
    found: list[Entity] = []
    for run in np.split(at, ends) if len(at) else []:
        words = _words(run, probs, labels, spelling.written, how)
        groups = [[word] for word in words] if how == "none" else _grouped(words)
        found += [_entity(group, spelling, whole=how == "none", cut=cut) for group in groups]
    return tuple(each for each in found if each.label not in ignored)


def _words(
    run: np.ndarray, probs: FloatArray, labels: Sequence[str], written: Written | None, how: Aggregation
) -> list[_Word]:
    tokens = run.tolist()
    if how in ("none", "simple") or written is None:
        groups = [[token] for token in tokens]
    else:
        groups = []
        for token in tokens:
            if groups and written.inside[token]:
                groups[-1].append(token)
            else:
                groups.append([token])
    found = []
    for group in groups:
        some = probs[group]
        own = some.mean(0) if how == "average" else some[some.max(-1).argmax() if how == "max" else 0]
        best = int(own.argmax())
        piece = "" if written is None else _piece(group, written, how)
        found.append(_Word(labels[best], float(own[best]), group[0], group[-1] + 1, piece))
    return found


def _piece(group: Sequence[int], written: Written, how: Aggregation) -> str:
    pieces = [written.pieces[token] for token in group]
    return pieces[0] if how in ("none", "simple") else written.joined(pieces)


def _grouped(words: Sequence[_Word]) -> list[list[_Word]]:
    groups: list[list[_Word]] = []
    last = ""
    for word in words:
        begins, name = word.label.startswith("B-"), _name(word.label)
        if groups and name == last and not begins:
            groups[-1].append(word)
        else:
            groups.append([word])
        last = name
    return groups


def _name(label: str) -> str:
    """What neighbours must have in common."""
    return label[2:] if label.startswith(("B-", "I-")) else label


def _entity(group: Sequence[_Word], spelling: Spelling, *, whole: bool, cut: bool) -> Entity:
    """``whole``: a token alone, whose label stays as it is. ``cut``: of another one's label what follows the first
    dash, which need not be a tag's."""
    first, last = group[0].first, group[-1].last
    label = group[0].label
    if not whole:
        label = label.split("-", 1)[-1] if cut else TAG.sub("", label, count=1)
    score = float(np.mean([word.score for word in group]))
    found = Entity(label, score, (first, last), in_pair=bool(spelling.of_text[first] == 1))
    if (written := spelling.written) is None:
        return found
    start, end = int(written.offsets[first, 0]), int(written.offsets[last - 1, 1])
    pieces = [word.piece for word in group]
    word = pieces[0] if whole else written.joined(pieces)
    text = written.texts[int(found.in_pair)][start:end]
    return dataclasses.replace(found, start=start, end=end, text=text, word=word)
