"""Scores of a task on labelled texts, by scikit-learn and seqeval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
from jaxtyping import Float, Num
from scipy.special import expit

from jpets.errors import InvalidInput
from jpets.passage import Passage
from jpets.spans import best_span, no_answer
from jpets.training.losses import IGNORED, Target
from jpets.types import Head

MAIN = ("rmse", "entity_f1", "f1_micro", "accuracy", "exact", "accuracy_at_1")
"""The main scores: each kind of head has one of them; tags have the first."""


OTHER_TAGS = {"L-": "E-", "U-": "S-"}


def check_can_score() -> None:
    """Raises ``InvalidInput`` where scikit-learn or seqeval is not installed: better before a training than after."""
    if not all(map(find_spec, ("sklearn", "seqeval"))):
        raise InvalidInput("scores take scikit-learn and seqeval; install jpets[train]")


def scores(
    head: Head,
    names: Sequence[str],
    logits: Sequence[Float[np.ndarray, " ..."]],
    targets: Sequence[Num[np.ndarray | np.generic, " ..."]],
    thresholds: Sequence[float] = (),
    cut: Sequence[Sequence[int]] = (),
    passages: Sequence[Passage | None] = (),
) -> dict[str, float]:
    """The usual scores of each kind of head.

    ``cut``: the tags of each text's words that were cut off, which count as answered with no entity; of a text whose
    answer was cut off anything, as no span is right. ``passages``: of questions, where answers may stand.

    Single label: accuracy, macro and (of two labels) binary F1, Matthews. Multi-label: F1 micro and macro, exact match.
    Regression: Pearson and Spearman, of several outputs their mean, and root mean square error; of an output that
    stands for its sigmoid, of that. Tags: accuracy, and F1 of entities. Questions: exact spans. Pairs, with all first
    texts' vectors before all second ones': Pearson and Spearman of their cosines, or how often the second text is
    nearer than all that the first has no pair with, and the mean reciprocal rank among these.

    Raises ``InvalidInput`` as ``check_can_score`` does.
    """
    check_can_score()
    from sklearn import metrics

    if head.type == "embedding":
        return _pair_scores(np.stack(logits), np.asarray(targets))
    if head.type == "question-answering":
        each = zip(logits, targets, cut or [()] * len(targets), passages, strict=True)
        right = [not lost and _is_answer(own, np.asarray(target), place) for own, target, lost, place in each]
        return {"exact": float(np.mean(right))}
    if head.reads_tokens:
        return _tag_scores(names, logits, [np.asarray(own) for own in targets], cut)
    found, truth = np.stack(logits), np.stack(targets)
    if head.is_score:
        found = expit(found)
    if head.problem == "regression":
        return _regression_scores(found, truth)
    if head.problem == "multi-label":
        limits = np.log(np.asarray(thresholds) / (1 - np.asarray(thresholds))) if thresholds else 0.0
        chosen = found >= limits
        exact = {"exact_match": float(metrics.accuracy_score(truth, chosen))}
        if truth.shape[1] == 1:  # scikit-learn would take it for two classes
            alone = float(metrics.f1_score(truth[:, 0], chosen[:, 0], zero_division=0))
            return {"f1_micro": alone, "f1_macro": alone, **exact}
        return {
            "f1_micro": float(metrics.f1_score(truth, chosen, average="micro", zero_division=0)),
            "f1_macro": float(metrics.f1_score(truth, chosen, average="macro", zero_division=0)),
            **exact,
        }
    best = found.argmax(-1)
    alike = len(np.union1d(truth, best)) == 1  # scikit-learn warns of this
    result = {
        "accuracy": float(metrics.accuracy_score(truth, best)),
        "f1_macro": float(metrics.f1_score(truth, best, average="macro", zero_division=0)),
        "matthews": 0.0 if alike else float(metrics.matthews_corrcoef(truth, best)),
    }
    if len(names) == 2:
        result["f1"] = float(metrics.f1_score(truth, best, zero_division=0))
    return result


def main_score(found: Mapping[str, float]) -> float:
    """The score that stands for the others, so that more is better."""
    name = main_name(found)
    return -found[name] if name == "rmse" else found[name]


def main_name(found: Mapping[str, float]) -> str:
    """The name of the score that stands for the others."""
    return next(name for name in MAIN if name in found)


def _regression_scores(found: Float[np.ndarray, "n c"], truth: Float[np.ndarray, "n c"]) -> dict[str, float]:
    from scipy import stats

    error = float(np.sqrt(np.mean((found - truth) ** 2)))
    varying = [(x, y) for x, y in zip(found.T, truth.T, strict=True) if np.ptp(x) > 0 and np.ptp(y) > 0]
    if not varying:  # a correlation with a constant is not defined
        return {"rmse": error}
    # All outputs together would correlate by their sizes, whatever the texts. A constant one tells nothing.
    outputs = found.shape[1]
    return {
        "pearson": float(sum(stats.pearsonr(x, y).statistic for x, y in varying)) / outputs,
        "spearman": float(sum(stats.spearmanr(x, y).statistic for x, y in varying)) / outputs,
        "rmse": error,
    }


def _pair_scores(vectors: npt.NDArray[np.float32], targets: npt.NDArray[Any]) -> dict[str, float]:
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
    first, second = np.split(unit, 2)
    own = (first * second).sum(-1)
    if targets.dtype.kind == "f":
        return _regression_scores(own[:, None], targets[:, None])
    firsts, seconds = targets.T
    different, each = np.unique(seconds, return_index=True)  # every second text once
    candidates = second[each]
    belong: dict[int, list[int]] = {}
    for number, mine in zip(firsts, seconds, strict=True):
        belong.setdefault(int(number), [int(number)]).append(int(mine))
    ranks = np.ones(len(own), int)
    for at, number in enumerate(firsts):
        # Another text that is as near comes first: vectors that are all equal find nothing.
        nearer = ~(candidates @ first[at] < own[at] - 1e-6)
        ranks[at] += int((nearer & ~np.isin(different, belong[int(number)])).sum())
    return {"accuracy_at_1": float((ranks == 1).mean()), "mean_reciprocal_rank": float((1 / ranks).mean())}


def _tag_scores(
    names: Sequence[str],
    logits: Sequence[Float[np.ndarray, " ..."]],
    targets: Sequence[Target],
    cut: Sequence[Sequence[int]],
) -> dict[str, float]:
    from seqeval.metrics import f1_score

    truth, found = [], []
    for own, target, lost in zip(logits, targets, cut or [()] * len(targets), strict=True):
        counted = target != IGNORED
        truth.append([_iob(names[at]) for at in [*target[counted], *lost]])
        found.append([*(_iob(names[at]) for at in own.argmax(-1)[counted]), *["O"] * len(lost)])
    equal = [a == b for x, y in zip(truth, found, strict=True) for a, b in zip(x, y, strict=True)]
    return {"accuracy": float(np.mean(equal)), "entity_f1": float(f1_score(truth, found, zero_division=0))}


def _is_answer(logits: Float[np.ndarray, "tokens 2"], target: Num[np.ndarray, " 2"], passage: Passage | None) -> bool:
    """Whether a server would answer with the ``target``'s first and last token. Of a question that has no answer: that
    none is more probable than the best one, as for Hugging Face's ``handle_impossible_answer``."""
    assert passage is not None
    start, end, score = best_span(np.asarray(logits, np.float32), passage)
    if not target.any():
        return no_answer(np.asarray(logits, np.float32), passage) > score
    return (start, end - 1) == tuple(target.tolist())


def _iob(name: str) -> str:
    """The tag in seqeval's form: a run of equal tags without a prefix is an entity, as in ``find_entities``, and the
    last and only tokens of BILOU are those of IOBES."""
    name = OTHER_TAGS.get(name[:2], name[:2]) + name[2:]
    return name if name == "O" or name[:2] in ("B-", "I-", "E-", "S-") else f"I-{name}"
