"""From labelled texts to the inputs of a training: a head, names of labels, rows to train on and rows to judge by."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np

from jpets.config import BackboneConfig
from jpets.errors import InvalidInput
from jpets.tokenizing import TextEncoder
from jpets.training.batches import Rows
from jpets.training.data import Example
from jpets.training.heads import at_the_usual_answer, new_head, usual_answer
from jpets.training.holding_out import hold_out
from jpets.training.labels import kind_of, label_names, make_rows
from jpets.training.metrics import check_can_score
from jpets.training.plan import DEFAULT_LENGTH, Training
from jpets.types import Head, LoadedBackbone, Preprocessing, Task

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """``judged`` are held out of ``rows``, or given separately."""

    head: Head
    labels: tuple[str, ...]
    rule: Preprocessing
    rows: Rows
    judged: Rows
    usual: Head
    """A head that always gives the usual answer."""


def prepare(
    config: BackboneConfig,
    text: TextEncoder,
    training: Training,
    examples: Sequence[Example],
    held_out: Sequence[Example] = (),
    start: Task | None = None,
) -> Prepared:
    """A new head of the kind that the labels ask for, or that of ``start``, and the texts' tokens and targets.

    Raises ``InvalidInput``.
    """
    check_can_score()
    known = start.preprocessing if start is not None else Preprocessing()
    rule = dataclasses.replace(
        known,
        max_length=min(_most_tokens(training, config, start), text.longest),
        truncation=True,
        thresholds=None,
        domain=training.domain,
        truncation_strategy=training.truncation_strategy or known.truncation_strategy,
    )
    head, names = _head(training, examples, config, start)
    _check_head(head, training)
    _check_strategy(rule, head, training, examples)
    rows = make_rows(examples, head, names, text, rule, balanced=training.balanced)
    _check_likelihoods(head, rows)
    if held_out:
        judged = make_rows(held_out, head, names, text, rule, balanced=training.balanced)
        _check_likelihoods(head, judged)
    else:
        rows, judged = _split(rows, training)
    learnt = set(_keys(rows))
    if both := sum(key in learnt for key in _keys(judged)):
        log.warning("%d of %d held-out texts are also trained on: scores tell less of others", both, len(judged.tokens))
    if start is None:
        head = at_the_usual_answer(head, rows)
    return Prepared(head, names, rule, rows, judged, usual_answer(head, rows))


def _most_tokens(training: Training, config: BackboneConfig, start: Task | None) -> int:
    if training.max_length is not None:
        return training.max_length
    return DEFAULT_LENGTH if start is None else start.preprocessing.max_length or config.max_positions


def domain_of(training: Training, backbone: LoadedBackbone, start: Task | None = None) -> str | None:
    """The full name of the domain to train in. Raises ``InvalidInput``, ``NotFound``."""
    domain = training.domain
    if domain is None and start is not None:
        domain = start.preprocessing.domain
    if domain is None:
        return None
    if backbone.tables is None:
        raise InvalidInput("domain: expected a backbone that looks tokens up in tables; this one computes all layers")
    return backbone.tables.full_name(domain)


def _head(
    training: Training, examples: Sequence[Example], config: BackboneConfig, start: Task | None
) -> tuple[Head, tuple[str, ...]]:
    if start is not None:
        return start.head, start.labels
    kind, problem = kind_of(examples)
    if training.head is not None:
        kind, problem = training.head, "single-label"
    if training.problem is not None and kind == "sequence-classification":
        problem = training.problem
    names = label_names(examples, kind, problem)
    outputs = len(names) or (2 if kind == "question-answering" else int(np.size(examples[0].label)))
    return new_head(kind, problem, outputs, config.hidden_size, training.pooling, training.plan.seed), names


def _check_head(head: Head, training: Training) -> None:
    """Raises ``InvalidInput`` for options that do not fit the kind of head of the labels or of the earlier task."""
    one_of_several = head.type == "sequence-classification" and head.problem == "single-label"
    found = head.type if head.type != "sequence-classification" else head.problem
    if training.balanced and not one_of_several:
        raise InvalidInput(f"balanced: expected one label a text, whose classes can count alike, found {found}")
    if training.method == "frozen" and head.type == "embedding" and not head.tensors:
        raise InvalidInput("frozen: this embedding head has no numbers of its own, so that nothing would be trained")
    if training.problem not in (None, found):
        raise InvalidInput(f"problem: expected labels of texts for {training.problem}, found {found}")
    if training.head not in (None, found):
        raise InvalidInput(f"head: expected a task with {training.head} to go on from, found {found}")


def _check_likelihoods(head: Head, rows: Rows) -> None:
    """Raises ``InvalidInput`` where an output that stands for its sigmoid is to be another number: the loss of that has
    no end below."""
    if head.is_score and not all(0 <= target.item() <= 1 for target in rows.targets):
        raise InvalidInput("labels: expected probabilities, from 0 to 1, as this task's only output stands for one")


def _check_strategy(rule: Preprocessing, head: Head, training: Training, examples: Sequence[Example]) -> None:
    """Raises ``InvalidInput`` where the second text of a pair is to be cut and there is none: the task would be trained
    on texts that a server refuses."""
    if training.truncation_strategy != "only_second":
        return
    alone = head.type in ("embedding", "token-classification") or all(each.text_pair is None for each in examples)
    if rule.template is not None:
        found = "a template, which makes one text of a pair"
    elif alone:
        found = "texts that are read alone"
    else:
        return
    raise InvalidInput(f"truncation_strategy: only_second cuts the second text of a pair, found {found}; leave it out")


def _split(rows: Rows, training: Training) -> tuple[Rows, Rows]:
    """(to train on, held out), by the seed, copies of a text on one side.

    Raises ``InvalidInput`` if either would be empty.
    """
    count = round(training.held_out * len(rows.tokens))
    if not 0 < count < len(rows.tokens):
        raise InvalidInput(
            f"expected texts to train on and to hold out, found {len(rows.tokens)} and a share of "
            f"{training.held_out:g} to hold out; give more, or a file of others"
        )
    learnt, held_out = hold_out(_keys(rows), count, training.plan.seed)
    return rows.take(learnt), rows.take(held_out)


def _keys(rows: Rows) -> list[bytes]:
    """Equal for rows of equal texts, as they are read."""
    sides = [rows.tokens, rows.seconds] if rows.seconds else [rows.tokens]
    return [b"|".join(own.ids.tobytes() + own.types.tobytes() for own in row) for row in zip(*sides, strict=True)]
