"""Scores of tags, and of heads with an output that stands for its sigmoid."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
import pytest
from seqeval import metrics as seqeval
from support import make_task, shallow, tiny

from jpets.deltas.protocol import NO_LEAD
from jpets.errors import InvalidInput
from jpets.tokenizing import TextEncoder
from jpets.training.data import Example
from jpets.training.forward import TaskOutputs
from jpets.training.heads import at_the_usual_answer, new_head
from jpets.training.labels import make_rows
from jpets.training.linear import linear_head
from jpets.training.losses import IGNORED, Labels, mean_loss
from jpets.training.metrics import scores
from jpets.training.plan import Training
from jpets.training.predict import agreement
from jpets.training.prepared import prepare
from jpets.training.tokens import text_encoder
from jpets.types import Preprocessing

RULE = Preprocessing(max_length=16, truncation=True)


def text() -> TextEncoder:
    return text_encoder(shallow(), NO_LEAD)


@pytest.mark.parametrize(("truth", "found"), [(["B-P", "L-P"], ["B-P", "B-P"]), (["U-P", "O"], ["U-P", "O"])])
def test_tags_of_bilou_are_those_of_iobes(truth: list[str], found: list[str]) -> None:
    names = sorted({*truth, *found})
    head = new_head("token-classification", "single-label", len(names), 64)
    logits = np.eye(len(names), dtype=np.float32)[[names.index(each) for each in found]]
    target = np.array([names.index(each) for each in truth], np.int32)
    other = str.maketrans("LU", "ES")
    expected = seqeval.f1_score([[tag.translate(other) for tag in truth]], [[tag.translate(other) for tag in found]])
    assert scores(head, names, [logits], [target])["entity_f1"] == expected == float(truth == found)


def test_an_output_that_stands_for_its_sigmoid_is_trained_and_scored_so() -> None:
    plain = new_head("sequence-classification", "regression", 1, 4)
    head = dataclasses.replace(plain, relevance="sigmoid")
    logits, truth = np.array([[8.0], [-8.0], [0.0]], np.float32), np.array([[1], [0], [0.5]], np.float32)
    assert (
        scores(head, (), list(logits), list(truth))["rmse"]
        < 1e-3
        < scores(plain, (), list(logits), list(truth))["rmse"]
    )
    labels = Labels(jnp.asarray(truth), jnp.ones(3))
    outputs = TaskOutputs(jnp.zeros((3, 4)), jnp.asarray(logits))
    expected = optax.sigmoid_binary_cross_entropy(jnp.asarray(logits), jnp.asarray(truth)).mean()
    assert float(mean_loss(head, outputs, labels)) == pytest.approx(float(expected))
    rows = make_rows([Example("a", "b", 1), Example("c", "d", 0.5)], head, (), text(), RULE)
    assert at_the_usual_answer(head, rows).tensors["bias"] == pytest.approx(np.log(3), abs=1e-5)
    x = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    many = rows._replace(
        tokens=[rows.tokens[0]] * 200, targets=list((x[:, :1] > 0).astype(np.float32)), weights=np.ones(200, np.float32)
    )
    fitted = linear_head(head, many, list(x), many, list(x))
    answers = [own @ np.asarray(fitted.tensors["kernel"]) + np.asarray(fitted.tensors["bias"]) for own in x]
    assert scores(head, (), answers, many.targets)["rmse"] < 0.4


@pytest.mark.parametrize(("truth", "found"), [(["B-P", "E-P", "O"], ["B-P", "O", "O"]), (["S-P", "O"], ["S-P", "O"])])
def test_entities_are_seqevals(truth: list[str], found: list[str]) -> None:
    names = sorted({*truth, *found})
    head = new_head("token-classification", "single-label", len(names), 64)
    logits = np.eye(len(names), dtype=np.float32)[[names.index(each) for each in found]]
    target = np.array([names.index(each) for each in truth], np.int32)
    assert scores(head, names, [logits], [target])["entity_f1"] == seqeval.f1_score([truth], [found])


def test_several_values_are_scored_one_by_one() -> None:
    """All together they would correlate by their sizes alone, whatever the texts."""
    rng = np.random.default_rng(0)
    head = new_head("sequence-classification", "regression", 2, 4)
    truth = np.array([3, 80]) + rng.normal(size=(50, 2)) * [0.5, 5]
    constant, half = np.tile([3.0, 80.0], (50, 1)), np.stack([truth[:, 0], np.full(50, 80)], 1)
    assert "pearson" not in scores(head, (), list(constant), list(truth))
    assert scores(head, (), list(half), list(truth))["pearson"] == pytest.approx(0.5)
    swapped = scores(head, (), list(-truth), list(truth))
    assert (swapped["pearson"], swapped["spearman"]) == pytest.approx((-1, -1))
    noise = np.array([3, 80]) + rng.normal(size=(50, 2)) * [0.5, 5]
    assert agreement(list(truth), list(2 * truth + 1), head) == pytest.approx(1)
    assert agreement(list(truth), list(noise), head) < 0.5
    assert agreement(list(truth), list(half), head) == agreement(list(truth), list(constant), head) == 0
    assert agreement(list(constant), list(constant), head) == 1


@pytest.mark.parametrize("word", ["\u200efile", "\u00adfile", "\ufefffile"])
def test_a_tag_stays_where_the_tokenizer_leaves_out_a_words_first_character(word: str) -> None:
    head = new_head("token-classification", "single-label", 3, 64)
    example = Example((word, "the", "files"), None, ("B-A", "O", "B-A"))
    rows = make_rows([example], head, ("O", "B-A", "I-A"), text(), RULE)
    assert [each for each in rows.targets[0] if each != IGNORED] == [1, 0, 1] and rows.cut == [[]]


def test_words_without_a_token_have_their_tags_told() -> None:
    head = new_head("token-classification", "single-label", 2, 64)
    example = Example(("\u200e", "file", *["files"] * 20), None, ("B-A", "O", *["O"] * 20))
    rows = make_rows([example], head, ("O", "B-A"), text(), RULE)
    counted = [each for each in rows.targets[0] if each != IGNORED]
    assert set(counted) == {0} and sorted(rows.cut[0]) == [*[0] * (21 - len(counted)), 1]


def test_texts_to_judge_by_are_likelihoods_too() -> None:
    head = dataclasses.replace(new_head("sequence-classification", "regression", 1, 64), relevance="sigmoid")
    start = make_task(tiny(), "own", [], head)
    training, inside = Training("lora"), [Example("a", "b", 1), Example("c", "d", 0.5)]
    prepare(tiny().config, text(), training, inside, inside, start)
    outside = [Example("a", "b", 1), Example("c", "d", 5)]
    for rows, judged in ((inside, outside), (outside, inside)):
        with pytest.raises(InvalidInput, match="labels: expected probabilities, from 0 to 1"):
            prepare(tiny().config, text(), training, rows, judged, start)
