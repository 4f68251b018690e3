"""Baselines of a trained task: the usual answer, and a linear head on the frozen backbone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

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
    """The baselines for the head of ``made``; the linear head learns from the same texts, up to ``MOST_TEXTS``."""
    head, judged = made.head, made.judged
    if head.type == "embedding":
        return Baselines(frozen=_scores(made, head, features([*judged.tokens, *judged.seconds])))
    if not can_fit(head):
        return Baselines()
    rows, theirs = fitted_rows(made.rows, seed), features(judged.tokens)
    fitted = linear_head(head, rows, features(rows.tokens), judged, theirs)
    majority, frozen = (_scores(made, each, _answers(each, theirs)) for each in (made.usual, fitted))
    return Baselines(majority, frozen)


def _answers(head: Head, features: Sequence[Values]) -> list[Values]:
    return [own @ np.asarray(head.tensors["kernel"]) + np.asarray(head.tensors["bias"]) for own in features]


def _scores(made: Prepared, head: Head, logits: Sequence[Values]) -> Scores:
    return scores(head, made.labels, logits, made.judged.targets, cut=made.judged.cut)
