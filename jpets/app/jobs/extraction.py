"""Extractions from a fully fine-tuned model, measured: what each keeps, what it takes, whether it answers alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy.typing as npt

from checkpoints.backbone import Backbone
from checkpoints.canonical import to_params
from checkpoints.imports.extract import Extraction, extract, losses
from checkpoints.imports.full import FullModel
from checkpoints.imports.heads import Wishes
from checkpoints.imports.imported import Imported
from checkpoints.imports.task import extracted, read_model
from jpets.deltas import merge_deltas
from jpets.errors import InvalidTask
from jpets.model.encoder import split
from jpets.tokenizing import TextEncoder, Tokens
from jpets.training.data import Example
from jpets.training.predict import Predictor, agreement, agreement_by_label, of_texts, varies
from jpets.training.tokens import encoded
from jpets.types import Delta, Preprocessing, Query

AUTO: Sequence[Extraction] = (
    Extraction("bitfit"),
    *(Extraction("lora", rank=rank) for rank in (1, 2, 4, 8, 16, 32, 64)),
    *(Extraction("diff", density=density) for density in (0.001, 0.005, 0.02, 0.05)),
    Extraction("onebit"),
)
"""What ``auto`` tries, that of the fewest bytes first."""

KEPT = 0.5
"""Share of a label's texts on which ``auto`` has to agree: of a rare one few disagreements are many."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """``losses``: canonical name -> share of a tensor's difference that is lost; ``agreement`` None without texts."""

    how: Extraction
    deltas: Sequence[Delta]
    losses: Mapping[str, float]
    agreement: float | None
    least: float | None = None
    """The least agreement on one of the labels that the model gives."""
    texts: int = 0
    varies: bool = False
    """Whether the model's answers to the texts differ: else agreement says nothing."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "extraction": dataclasses.asdict(self.how),
            "agreement": self.agreement,
            "least_agreement": self.least,
            "answers_vary": self.varies,
            "losses": dict(self.losses),
        }

    def fields(self) -> Iterator[tuple[str, object]]:
        yield "extracted", str(self.how)
        if self.agreement is not None:
            told = "" if self.least is None else f", at least {100 * self.least:.1f} % of those with one label"
            if not self.varies:
                told = ", which says nothing: the model answers all of them alike"
            yield "agreement", f"{100 * self.agreement:.1f} % of the answers to {self.texts} texts{told}"

    def agrees(self, wanted: float) -> bool:
        """Whether it answers as the model does, and has lost none of the model's labels."""
        return self.agreement is not None and self.agreement >= wanted and (self.least is None or self.least >= KEPT)


class _Judge:
    """Compares the answers of merged deltas with the full model's."""

    def __init__(self, model: FullModel, backbone: Backbone, texts: Sequence[Example], rule: Preprocessing) -> None:
        text = TextEncoder.of(backbone)
        self._head, self._config, self._params = model.head, backbone.config, dict(backbone.params)
        self._tokens = [
            _tokens(text, example, rule, labels=model.head.type == "token-classification") for example in texts
        ]
        self._predict = Predictor(split(backbone.config), text, model.head)
        self._expected = self._answers(to_params(model.tensors, backbone.config))
        self.varies = bool(texts) and varies(self._expected, self._head)
        self.texts = len(texts)

    def __call__(self, deltas: Sequence[Delta]) -> tuple[float, float | None]:
        """(share of equal answers, the least of one label)"""
        merged = merge_deltas(deltas, self._config, jax.tree.map(jnp.asarray, self._params))
        found = self._answers(merged)
        each = agreement_by_label(self._expected, found, self._head)
        return agreement(self._expected, found, self._head), min(each, default=None) if each is not None else None

    def _answers(self, params: Any) -> Sequence[npt.NDArray[Any]]:
        """The model's answers; of those for tokens, the ones for tokens of the texts."""
        return of_texts(self._predict(params, self._head, self._tokens), self._tokens)


def compare(
    model: FullModel, backbone: Backbone, ways: Sequence[Extraction], texts: Sequence[Example], rule: Preprocessing
) -> list[Candidate]:
    """Each extraction with what it loses; agreement where there are texts."""
    judge = _Judge(model, backbone, texts, rule) if texts else None
    return [_candidate(model, backbone, how, judge) for how in ways]


def smallest(
    model: FullModel, backbone: Backbone, texts: Sequence[Example], rule: Preprocessing, wanted: float
) -> Candidate:
    """The smallest extraction of ``AUTO`` whose answers agree with the model's as ``wanted``.

    Raises ``InvalidTask`` with the best that was found where there is none.
    """
    judge = _Judge(model, backbone, texts, rule)
    if not judge.varies:
        raise InvalidTask(
            f"the model answers all {len(texts)} texts alike, so that agreement says nothing: give texts that it "
            "answers differently, or choose a method"
        )
    best: Candidate | None = None
    for how in sorted(AUTO, key=lambda how: how.stored_bytes(backbone.config)):
        candidate = _candidate(model, backbone, how, judge)
        assert candidate.agreement is not None
        if candidate.agrees(wanted):
            return candidate
        if best is None or best.agreement is None or candidate.agreement > best.agreement:
            best = candidate
    assert best is not None
    raise InvalidTask(
        f"no extraction agrees with the model in {100 * wanted:g} % of the answers; the best is {best.how} with "
        f"{100 * (best.agreement or 0):.1f} %{_least(best)}: ask for less, or serve the model as a backbone of its own"
    )


def _least(candidate: Candidate) -> str:
    return "" if candidate.least is None else f", and {100 * candidate.least:.1f} % of one label's"


def extracted_model(
    folder: Path,
    backbone: Backbone,
    wishes: Wishes,
    how: Extraction | None,
    texts: Sequence[Example],
    wanted: float,
) -> tuple[Imported, Candidate]:
    """A task's parts out of the fully fine-tuned model in ``folder``; without ``how`` the smallest that agrees with it
    on ``texts`` as ``wanted``. Raises ``InvalidTask``."""
    model = read_model(folder, backbone, wishes)
    if how is None:
        chosen = smallest(model, backbone, texts, model.preprocessing, wanted)
    else:
        chosen = compare(model, backbone, [how], texts, model.preprocessing)[0]
    return extracted(model, chosen.deltas), chosen


def _candidate(model: FullModel, backbone: Backbone, how: Extraction, judge: _Judge | None) -> Candidate:
    deltas = extract(model.tensors, backbone, how)
    lost = losses(model.tensors, backbone, deltas)
    if judge is None:
        return Candidate(how, deltas, lost, None)
    return Candidate(how, deltas, lost, *judge(deltas), judge.texts, judge.varies)


def _tokens(text: TextEncoder, example: Example, rule: Preprocessing, *, labels: bool) -> Tokens:
    return encoded(text, Query(None, example.plain, example.text_pair, truncate=True), rule, spelled=labels)
