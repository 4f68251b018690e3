"""Extractions from a fully fine-tuned model, measured: what each keeps, what it takes, whether it answers alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

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
from jpets.training.predict import Predictor, agreement
from jpets.types import Delta, Preprocessing, Query

AUTO: Sequence[Extraction] = (
    Extraction("bitfit"),
    *(Extraction("lora", rank=rank) for rank in (1, 2, 4, 8, 16, 32, 64)),
    *(Extraction("diff", density=density) for density in (0.001, 0.005, 0.02, 0.05)),
    Extraction("onebit"),
)
"""What ``auto`` tries, the smallest first."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """``losses``: canonical name -> share of a tensor's difference that is lost; ``agreement`` None without texts."""

    how: Extraction
    deltas: Sequence[Delta]
    losses: Mapping[str, float]
    agreement: float | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "extraction": dataclasses.asdict(self.how),
            "agreement": self.agreement,
            "losses": dict(self.losses),
        }

    def fields(self) -> Iterator[tuple[str, object]]:
        yield "extracted", str(self.how)
        if self.agreement is not None:
            yield "agreement", f"{100 * self.agreement:.1f} % of the answers"


class _Judge:
    """Compares the answers of merged deltas with the full model's."""

    def __init__(self, model: FullModel, backbone: Backbone, texts: Sequence[Example], rule: Preprocessing) -> None:
        text = TextEncoder.of(backbone)
        self._head, self._config, self._params = model.head, backbone.config, dict(backbone.params)
        self._tokens = [
            _tokens(text, example, rule, labels=model.head.type == "token-classification") for example in texts
        ]
        self._predict = Predictor(split(backbone.config), text, model.head)
        self._expected = self._predict(to_params(model.tensors, backbone.config), model.head, self._tokens)

    def __call__(self, deltas: Sequence[Delta]) -> float:
        merged = merge_deltas(deltas, self._config, jax.tree.map(jnp.asarray, self._params))
        found = self._predict(merged, self._head, self._tokens)
        return agreement(self._expected, found, self._head, self._tokens)


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
    best: Candidate | None = None
    for how in AUTO:
        candidate = _candidate(model, backbone, how, judge)
        assert candidate.agreement is not None
        if candidate.agreement >= wanted:
            return candidate
        if best is None or best.agreement is None or candidate.agreement > best.agreement:
            best = candidate
    assert best is not None
    raise InvalidTask(
        f"no extraction agrees with the model in {100 * wanted:g} % of the answers; the best is {best.how} with "
        f"{100 * (best.agreement or 0):.1f} %: ask for less, or serve the model as a backbone of its own"
    )


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
    return Candidate(how, deltas, lost, judge(deltas) if judge is not None else None)


def _tokens(text: TextEncoder, example: Example, rule: Preprocessing, *, labels: bool) -> Tokens:
    return text.encode(Query(None, example.plain, example.text_pair, truncate=True), rule, of_text=labels)
