"""Baselines of a trained task: the usual answer, and a linear head on the frozen backbone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jpets.training.batches import Rows
from jpets.training.linear import FrozenFeatures, Values, can_fit, fitted_rows, linear_head
from jpets.training.metrics import main_score, scores
from jpets.training.prepared import Prepared
from jpets.types import Head

Scores = Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Baselines:
    """Scores on the held-out texts; None if there is no such baseline."""

    majority: Scores | None = None
    """Scores of the answer that is right most often, for any text."""
    frozen: Scores | None = None
    """Scores of a linear head on the frozen backbone; for embeddings, of the bare backbone."""

    def beaten(self, found: Scores) -> bool:
        """Whether ``found`` is better than all of them."""
        own = main_score(found)
        return all(own > main_score(each) for each in (self.majority, self.frozen) if each is not None)


def baselines(made: Prepared, features: FrozenFeatures, seed: int) -> Baselines:
    """The baselines for the head of ``made``; the linear head learns from the same texts, up to ``MOST_TEXTS``. For
    tags it is scored on so many too: features of all tokens of all held-out texts may be more than memory holds."""
    head, judged = made.head, made.judged
    if head.type == "embedding":
        return Baselines(frozen=_scores(made.labels, head, features([*judged.tokens, *judged.seconds]), judged))
    if not can_fit(head):
        return Baselines()
    judged = fitted_rows(judged, seed) if judged.tags else judged
    rows, theirs = fitted_rows(made.rows, seed), features(judged.tokens)
    fitted = linear_head(head, rows, features(rows.tokens), judged, theirs)
    majority, frozen = (_scores(made.labels, each, _answers(each, theirs), judged) for each in (made.usual, fitted))
    return Baselines(majority, frozen)


def _answers(head: Head, features: Sequence[Values]) -> list[Values]:
    return [own @ np.asarray(head.tensors["kernel"]) + np.asarray(head.tensors["bias"]) for own in features]


def _scores(labels: Sequence[str], head: Head, logits: Sequence[Values], judged: Rows) -> Scores:
    return scores(head, labels, logits, judged.targets, cut=judged.cut)
