"""From a file's labels to names and targets."""

from __future__ import annotations

import contextlib
import json
import math
import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jpets.errors import InvalidInput
from jpets.tokenizing import TextEncoder, Tokens
from jpets.training.batches import Rows
from jpets.training.data import Example, is_text
from jpets.training.losses import IGNORED
from jpets.training.tokens import encoded
from jpets.types import Head, HeadType, Preprocessing, Problem, Query

SHOWN = 10
CUT_OFF = 1
"""Stands for an answer that was cut off (``Rows.cut``)."""
WHOLE = 2.0**53
"""Floating-point numbers from here on are always whole."""
MOST_NAME_BYTES = 1 << 19
"""Most bytes of a task's labels as JSON: half of a task file's header."""


def kind_of(examples: Sequence[Example]) -> tuple[HeadType, Problem]:
    """The head that labels ask for: fractions are values, lists label sets, one per word tags, ``answer_start``
    answers.

    Raises ``InvalidInput`` for a label among values that is not a number.
    """
    first = examples[0]
    if isinstance(first.label, dict):
        return "question-answering", "single-label"
    if isinstance(first.text, tuple):
        return "token-classification", "single-label"
    if isinstance(first.label, (list, tuple)):
        return "sequence-classification", "multi-label"
    values = [_value(each.label) for each in examples]
    numbers = [value for value in values if value is not None]
    if all(value.is_integer() and abs(value) < WHOLE for value in numbers) or 2 * len(numbers) <= len(values):
        return "sequence-classification", "single-label"
    if None in values:
        row = values.index(None) + 1
        raise InvalidInput(
            f"row {row}: expected a number like most other labels, found {examples[row - 1].label!r}"[:200]
        )
    return "sequence-classification", "regression"


def _value(label: Any) -> float | None:
    """The label as a number, also if it is the text of one, as in a file without types (CSV)."""
    try:
        value = float(label) if isinstance(label, (int, float, str)) else math.nan
    except (ValueError, OverflowError):
        value = math.nan
    return value if math.isfinite(value) else None


def label_names(examples: Sequence[Example], kind: HeadType, problem: Problem) -> tuple[str, ...]:
    """The names that occur, in order. Raises ``InvalidInput`` if there are fewer than two, or more
    than a task file can hold."""
    if problem == "regression" or kind in ("question-answering", "embedding"):
        return ()
    listed = kind == "token-classification" or problem == "multi-label"
    found = sorted({name for row, each in enumerate(examples, 1) for name in _names(each.label, listed, row)})
    kinds = {type(name).__name__ for each in examples for name in (each.label if listed else [each.label])}
    if len(kinds) > 1:
        raise InvalidInput(f"expected labels of one type, found {sorted(kinds)}; write all as texts, or all as numbers")
    numbers = [_value(name) for name in found]
    counts = Counter(numbers)
    if alike := [name for name, value in zip(found, numbers, strict=True) if value is not None and counts[value] > 1]:
        raise InvalidInput(f"expected each number written in one way, found the labels {alike[:SHOWN]}")
    if len(found) < (1 if problem == "multi-label" else 2):
        raise InvalidInput(f"expected at least two labels to tell apart, found {found[:SHOWN]}")
    if (size := len(json.dumps(found))) > MOST_NAME_BYTES:
        raise InvalidInput(
            f"expected names of labels of at most {MOST_NAME_BYTES} bytes in all, found {len(found)} names of {size}; "
            "is this the column of labels?"
        )
    return tuple(found)


def _names(label: Any, listed: bool, row: int) -> list[str]:
    """The names in a row's label. Raises ``InvalidInput`` for anything else, or a list of names if only some rows have
    lists."""
    if listed != isinstance(label, (list, tuple)):
        wanted = "a list of labels" if listed else "one label"
        raise InvalidInput(f"row {row}: expected {wanted}, found {label!r}"[:200])
    names = label if listed else [label]
    for name in names:
        if not isinstance(name, (str, int, float, np.generic)) or not str(name).strip() or not is_text(str(name)):
            raise InvalidInput(f"row {row}: expected a label that is a text or a number, found {name!r}"[:200])
    return [str(name) for name in names]


def make_rows(
    examples: Sequence[Example],
    head: Head,
    names: Sequence[str],
    text: TextEncoder,
    rule: Preprocessing,
    *,
    balanced: bool = False,
) -> Rows:
    """Tokens, targets and weights of a data set; ``balanced`` weighs classes so that all count equally.

    For an embedding head: pairs of texts.

    Raises ``InvalidInput`` naming the first row with a label of a wrong kind or not among ``names``.
    """
    if head.type == "embedding":
        return _pairs(examples, text, rule)
    if head.type == "fill-mask":
        raise InvalidInput("a fill-mask head answers without labels, so that labelled texts do not judge it")
    number_of = {name: at for at, name in enumerate(names)}
    tags = head.type == "token-classification"
    tokens, targets, cut = [], [], []
    for row, example in enumerate(examples, 1):
        with _row_named(row):
            if tags:
                own, target, lost = _tagged(example, number_of, text, rule)
                cut.append(lost)
            elif head.type == "question-answering":
                own, target, lost = _answered(example, text, rule)
                cut.append(lost)
            else:
                own = encoded(text, Query(None, example.plain, example.text_pair), rule)
                target = _target(example.label, head, number_of)
        tokens.append(own)
        targets.append(target)
    weights = np.ones(len(tokens), np.float32)
    if balanced and head.problem == "single-label" and not tags:
        counts = Counter(int(each) for each in targets)
        weights = np.array([len(targets) / (len(counts) * counts[int(each)]) for each in targets], np.float32)
    return Rows(tokens, targets, weights, tags, cut=cut)


@contextlib.contextmanager
def _row_named(row: int) -> Iterator[None]:
    """Adds the row's number to an error."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(f"row {row}: {error.message}") from error


def _pairs(examples: Sequence[Example], text: TextEncoder, rule: Preprocessing) -> Rows:
    """Targets are the similarities of pairs, or, if no pair has one, the numbers of both texts: one a text."""
    rated = [example.label is not None for example in examples]
    if any(rated) and not all(rated):
        raise InvalidInput(f"row {rated.index(not rated[0]) + 1}: expected a label in every row or in none")
    number_of: dict[str, int] = {}
    sides: tuple[list[Tokens], list[Tokens]] = ([], [])
    targets = []
    for row, example in enumerate(examples, 1):
        with _row_named(row):
            if example.text_pair is None:
                raise InvalidInput("expected a second text; name its column by text_pair")
            for side, own in zip(sides, (example.plain, example.text_pair), strict=True):
                side.append(encoded(text, Query(None, own), rule))
            numbers = [number_of.setdefault(own, len(number_of)) for own in (example.plain, example.text_pair)]
            targets.append(np.array(numbers, np.int32) if example.label is None else _likeness(example.label))
    return Rows(sides[0], targets, np.ones(len(targets), np.float32), seconds=sides[1])


def _likeness(label: Any) -> npt.NDArray[Any]:
    try:
        value = float(label)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not -1 <= value <= 1:
        raise InvalidInput(f"expected how alike the texts are, from -1 to 1, as label, found {label!r}"[:200])
    return np.array(value, np.float32)


def _target(label: Any, head: Head, number_of: dict[str, int]) -> npt.NDArray[Any]:
    if head.problem == "regression":
        try:
            values = np.atleast_1d(np.asarray(label, np.float32))
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidInput(f"expected a number as label, found {label!r}"[:200]) from error
        if not all(map(math.isfinite, values)):
            raise InvalidInput(f"expected a finite number as label, found {label!r}"[:200])
        if values.shape != (head.outputs,):
            raise InvalidInput(f"expected {head.outputs} numbers as label, found {label!r}"[:200])
        return values
    if head.problem == "multi-label":
        if not isinstance(label, (list, tuple)):
            raise InvalidInput(f"expected a list of labels, found {label!r}"[:200])
        chosen = np.zeros(len(number_of), np.float32)
        chosen[[_number(each, number_of) for each in label]] = 1
        return chosen
    return np.array(_number(label, number_of), np.int32)


def _number(label: Any, number_of: dict[str, int]) -> int:
    if label is None or str(label) not in number_of:
        raise InvalidInput(f"expected one of {list(number_of)[:SHOWN]} as label, found {label!r}"[:300])
    return number_of[str(label)]


def _answered(example: Example, text: TextEncoder, rule: Preprocessing) -> tuple[Tokens, npt.NDArray[Any], list[int]]:
    """Tokens of question and context, and the answer's first and last token; the first token of all (``[CLS]``) if the
    answer was cut off or there is none, as in SQuAD's models. Also something for an answer that was cut off."""
    label = example.label
    try:
        answer, start = (label[name] for name in ("text", "answer_start"))
        if isinstance(answer, (list, tuple)):
            answer, start = (answer[0], start[0]) if answer else ("", 0)
        begin, end = operator.index(start), operator.index(start) + len(answer)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"expected text and answer_start as label, found {label!r}"[:300]) from error
    if example.text_pair is None or example.text_pair[begin:end] != answer:
        raise InvalidInput("expected a context in text_pair that has the answer at answer_start")
    end -= len(answer) - len(answer.rstrip())  # white space belongs to no token
    tokens = encoded(text, Query(None, example.plain, example.text_pair), rule, passage=True)
    passage = tokens.passage
    assert passage is not None and passage.offsets is not None
    touched = [at for at, (a, b) in enumerate(passage.offsets, passage.start) if a < end and b > begin]
    whole = False
    if touched:
        first, last = (passage.offsets[touched[side] - passage.start] for side in (0, -1))
        before = example.text_pair[begin : int(first[0])]  # gone where a text is cut on the left; or without a token
        whole = int(last[1]) >= end and not any(map(str.isalnum, before))
    lost = [CUT_OFF] if answer.strip() and not whole else []
    return tokens, np.array([touched[0], touched[-1]] if whole else [0, 0], np.int32), lost


def _tagged(
    example: Example, number_of: dict[str, int], text: TextEncoder, rule: Preprocessing
) -> tuple[Tokens, npt.NDArray[Any], list[int]]:
    """Tokens of the words joined by spaces, as in service; the first token of a word has its tag, also where the
    tokenizer leaves out the word's first character. Also the tags of words without tokens, since they were cut off."""
    words, label = example.text, example.label
    if example.text_pair is not None:
        raise InvalidInput("expected no second text beside words with tags; leave text_pair out")
    if not isinstance(words, tuple) or not isinstance(label, (list, tuple)) or len(label) != len(words):
        raise InvalidInput("expected a list of words and a list of as many tags")
    tokens = encoded(text, Query(None, " ".join(words)), rule, passage=True)
    passage = tokens.passage
    assert passage is not None and passage.offsets is not None
    firsts = np.cumsum([0, *(len(word) + 1 for word in words[:-1])]).tolist()
    left = dict.fromkeys(range(len(words)))
    target = np.full(len(tokens.ids), IGNORED, np.int32)
    for at, (begin, _) in enumerate(passage.offsets, passage.start):
        word = bisect_right(firsts, begin) - 1
        if word in left and begin < firsts[word] + len(words[word]):
            del left[word]
            target[at] = _number(label[word], number_of)
    return tokens, target, [_number(label[word], number_of) for word in left]
