"""Answers in the shapes of ``transformers``' pipelines, which Hugging Face's client reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jpets.engine.results.entities import IGNORED, aggregated
from jpets.engine.results.fills import best_fills, tokens_of
from jpets.engine.results.numbers import sigmoid, softmax
from jpets.errors import InvalidInput, Saturated, TooLarge
from jpets.spans import best_spans, no_answer
from jpets.types import (
    Classification,
    Entity,
    Fill,
    Fills,
    FloatArray,
    Query,
    Regression,
    Result,
    Span,
    Task,
    Tokens,
    TruncationStrategy,
)
from serving.protocols.long_texts import entities_of
from serving.protocols.results import all_of, class_names, ranked, scored, shortened, vectors_of
from serving.requests.answers import REPLACED
from serving.requests.windows import Cut

Kind = Literal[
    "text_classification",
    "zero_shot_classification",
    "token_classification",
    "question_answering",
    "feature_extraction",
    "fill_mask",
    "sentence_similarity",
]
TEMPLATE = "This example is {}."
"""The hypothesis of a label, as the pipeline has it by default."""
HOLE = "{}"
MOST_HYPOTHESES = 1 << 22
"""Characters of all labels' hypotheses, which are copies of the template."""
MOST_ANSWERS, LONGEST_ANSWER = 1000, 15
"""To a question, and tokens of one, as the pipeline has them by default."""
KEPT_ANSWERS = 32 * MOST_ANSWERS
"""Different answers that are held while windows are looked at."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """``task`` None is the plain backbone. ``alone``: one text that did not come as a list; ``told`` are parameters.
    ``pairs`` are the texts' second ones, where they do not all have the ``context``."""

    task: Task | None
    texts: Sequence[str]
    context: str | None
    told: Mapping[str, Any]
    alone: bool = True
    pairs: Sequence[str | None] = ()

    @property
    def id(self) -> str | None:
        return None if self.task is None else self.task.id


class Answering(NamedTuple):
    """One of the client's methods: the ``head`` that it needs, the parameters that it ``takes``, the queries that it
    makes, and the answer that it makes of their results."""

    head: str
    takes: frozenset[str]
    queries: Callable[[Asked], list[Query]]
    respond: Callable[..., Any]
    passage: bool | None = None
    """Whether windows are of a question's context, or of a text; None where texts are never cut."""


def _texts(asked: Asked) -> list[Query]:
    truncate, prompt = asked.told.get("truncate"), asked.told.get("prompt_name")
    pairs = asked.pairs or [asked.context] * len(asked.texts)
    return [
        Query(asked.id, text, pair, truncate=truncate, prompt=prompt)
        for text, pair in zip(asked.texts, pairs, strict=True)
    ]


def _classes(asked: Asked, results: Sequence[Result]) -> list[list[dict[str, Any]]]:
    """Of each text the labels and their scores, the best first."""
    found = scored(results)
    return [ranked(class_names(result), _scores(asked, result))[: asked.told.get("top_k")] for result in found]


def _scores(asked: Asked, result: Classification | Regression) -> FloatArray:
    how = asked.told.get("function_to_apply")
    if how is None and isinstance(result, Classification):
        return result.probs
    if how is None:  # the pipeline takes a single output for a probability, unless the model says what it is
        assert asked.task is not None
        return sigmoid(result.logits) if asked.task.head.is_score else result.logits
    return {"sigmoid": sigmoid, "softmax": softmax}[how](result.logits) if how != "none" else result.logits


def _hypotheses(asked: Asked) -> list[Query]:
    """A pair of a text and what a label says of it, for each label. Of a pair that is too long the text is cut, unless
    it is not to be, as in the pipeline. Raises ``InvalidInput``."""
    template = asked.told.get("hypothesis_template", TEMPLATE)
    if (holes := template.count(HOLE)) != 1:
        raise InvalidInput(
            f"parameters.hypothesis_template: expected a text with one {HOLE} for the label, found {holes or 'none'}"
        )
    if not asked.told["candidate_labels"]:
        raise InvalidInput("parameters.candidate_labels: expected at least one label, found none")
    if not asked.alone:
        raise InvalidInput("inputs: expected one text with candidate_labels, found a list; ask for each alone")
    assert asked.task is not None
    _entailment(asked.task)
    labels = asked.told["candidate_labels"]
    if len(template) * len(labels) > MOST_HYPOTHESES:
        raise TooLarge(
            f"parameters.hypothesis_template: {len(labels)} labels in a template of {len(template)} characters make "
            f"more than {MOST_HYPOTHESES} characters; ask for fewer labels, or take a shorter one"
        )
    cut: TruncationStrategy = "only_first"  # a hypothesis that is cut may lack its label
    truncate = asked.told.get("truncate", True)
    return [
        Query(asked.id, asked.texts[0], template.replace(HOLE, label), truncate=truncate, truncation_strategy=cut)
        for label in labels
    ]


def _entailment(task: Task) -> int:
    """The output that says that one text follows from the other. Raises ``InvalidInput``."""
    found = [at for at, name in enumerate(task.labels) if name.lower().startswith("entail")]
    if not found or len(task.labels) < 2:
        raise InvalidInput(
            f"parameters.candidate_labels: labels of one's own need a task with a label entailment, {task.id!r} has "
            f"{list(task.labels)[:8]}"
        )
    return found[0]


def _zero_shot(asked: Asked, results: Sequence[Result]) -> list[dict[str, Any]]:
    """Over all labels the softmax of how far they follow, or with ``multi_label`` for each label alone that of whether
    it does rather than not: as the pipeline has it."""
    found = all_of(results, Classification)
    labels, task = asked.told["candidate_labels"], asked.task
    assert task is not None
    follows = _entailment(task)
    if any(result.names != task.labels for result in found):
        raise Saturated(REPLACED)
    logits = np.stack([result.logits for result in found])
    if asked.told.get("multi_label") or len(labels) == 1:
        against = len(task.labels) - 1 if follows == 0 else 0
        scores = softmax(logits[:, [against, follows]])[:, 1]
    else:
        scores = softmax(logits[:, follows])
    return ranked(labels, scores)


def _tokens(asked: Asked, results: Sequence[Result], windows: Sequence[Cut] = ()) -> Any:
    """Of texts, or of the windows of each: of entities that overlap the longer one stays."""
    tagged = all_of(results, Tokens)
    how = asked.told.get("aggregation_strategy", "simple")
    ignored = frozenset(asked.told.get("ignore_labels", IGNORED))  # there may be far more names than labels
    if not windows:
        each = [_listed(aggregated(result, how, ignored, cut=True), how) for result in tagged]
        return each[0] if asked.alone else each
    left = iter(tagged)
    each = [_listed(entities_of(own, [next(left) for _ in own.tokens], how, ignored, cut=True), how) for own in windows]
    return each[0] if asked.alone else each


def _listed(entities: Sequence[Entity], how: str) -> list[dict[str, Any]]:
    label = "entity" if how == "none" else "entity_group"
    found = []
    for own in entities:
        places = {"index": own.tokens[0]} if how == "none" else {}
        found.append(
            {label: own.label, "score": own.score, **places, "word": own.word, "start": own.start, "end": own.end}
        )
    return found


def _answer(asked: Asked, results: Sequence[Result], windows: Sequence[Cut]) -> Any:
    """The best answer over all windows of the context; with ``top_k`` above 1 up to so many of them. Answers of the
    same words, upper case or not, count as one, with the sum of their scores."""
    (context,) = windows
    count, spans = asked.told.get("top_k", 1), all_of(results, Span)
    if count > MOST_ANSWERS:
        raise InvalidInput(f"parameters.top_k: expected at most {MOST_ANSWERS} answers, found {count}")
    longest, whole = asked.told.get("max_answer_len", LONGEST_ANSWER), asked.told.get("align_to_words", True)
    passages = [tokens.passage for tokens in context.tokens if tokens.passage is not None]
    found: dict[str, dict[str, Any]] = {}
    for span, passage in zip(spans, passages, strict=True):
        for start, end, score in best_spans(span.logits, passage, 2 * count + 10 if whole else count, longest):
            answer = passage.answer(start, end, whole_words=whole)
            assert answer is not None
            none = {"answer": answer.text, "score": 0.0, "start": answer.start, "end": answer.end}
            found.setdefault(answer.text.lower(), none)["score"] += score
        if len(found) > KEPT_ANSWERS:  # there may be a thousand windows
            kept = sorted(found.items(), key=lambda each: -each[1]["score"])[: KEPT_ANSWERS // 2]
            found = dict(kept)
    best = [*found.values()]
    if asked.told.get("handle_impossible_answer"):
        nothing = [no_answer(span.logits, passage) for span, passage in zip(spans, passages, strict=True)]
        best.append({"answer": "", "score": min(1.0, *nothing), "start": 0, "end": 0})
    best = sorted(best, key=lambda each: -each["score"])[:count]
    return best[0] if len(best) == 1 else best


def _embedded(asked: Asked, results: Sequence[Result]) -> list[FloatArray]:
    vectors = vectors_of(results, asked.told.get("normalize"))
    kept, size = asked.told.get("dimensions"), len(vectors[0])
    if kept is not None and kept > size:
        raise InvalidInput(f"dimensions: expected at most {size}, the numbers of a vector, found {kept}")
    return [shortened(vector, kept) for vector in vectors]


def _filled(asked: Asked, results: Sequence[Result]) -> Any:
    """Of a text the words for its mask; for each one's where it has several."""
    filled, targets = all_of(results, Fills), asked.told.get("targets")
    words = None
    if targets is not None:
        words = tokens_of(filled[0].masked.vocabulary, [targets] if isinstance(targets, str) else targets)
    each = [
        [[_fill(one) for one in own] for own in best_fills(result, asked.told.get("top_k"), words)] for result in filled
    ]
    listed = [own[0] if len(own) == 1 else own for own in each]
    return listed[0] if asked.alone else listed


def _fill(one: Fill) -> dict[str, Any]:
    return {"score": one.score, "token": one.token, "token_str": one.text, "sequence": one.sequence}


def _similar(asked: Asked, results: Sequence[Result]) -> list[float]:
    """The cosine of the first text's vector with each of the others'."""
    first, *others = vectors_of(results, unit=True)
    return [float(first @ other) for other in others]


KINDS: Mapping[Kind, Answering] = {
    "text_classification": Answering(
        "sequence-classification", frozenset({"top_k", "function_to_apply", "truncate"}), _texts, _classes
    ),
    "zero_shot_classification": Answering(
        "sequence-classification",
        frozenset({"candidate_labels", "hypothesis_template", "multi_label", "truncate"}),
        _hypotheses,
        _zero_shot,
    ),
    "token_classification": Answering(
        "token-classification",
        frozenset({"aggregation_strategy", "ignore_labels", "stride", "truncate"}),
        _texts,
        _tokens,
        passage=False,
    ),
    "question_answering": Answering(
        "question-answering",
        frozenset(
            {
                "align_to_words",
                "doc_stride",
                "handle_impossible_answer",
                "max_answer_len",
                "max_question_len",
                "max_seq_len",
                "top_k",
            }
        ),
        _texts,
        _answer,
        passage=True,
    ),
    "feature_extraction": Answering(
        "embedding",
        frozenset({"dimensions", "encoding_format", "normalize", "prompt_name", "truncate", "truncation_direction"}),
        _texts,
        _embedded,
    ),
    "fill_mask": Answering("fill-mask", frozenset({"targets", "top_k", "truncate"}), _texts, _filled),
    "sentence_similarity": Answering("embedding", frozenset({"prompt_name", "truncate"}), _texts, _similar),
}
