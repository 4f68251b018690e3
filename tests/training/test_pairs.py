"""Pairs of texts, from which embeddings are trained: rows, losses, scores, and a run that learns."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import shallow

from jpets.errors import InvalidInput
from jpets.model.encoder import random_params, split
from jpets.tokenizing import TextEncoder
from jpets.training.batches import gather
from jpets.training.data import Columns, Example, label_column, read_examples
from jpets.training.heads import new_head
from jpets.training.labels import make_rows
from jpets.training.losses import SHARPNESS, Labels, pair_losses
from jpets.training.methods import direct_recipe
from jpets.training.metrics import scores
from jpets.training.plan import TrainingPlan
from jpets.training.run import train
from jpets.training.together import Member, train_together
from jpets.types import Preprocessing

RULE = Preprocessing(max_length=16, truncation=True)
HEAD = new_head("embedding", "single-label", 0, 64)


def rows_of(examples: list[Example]) -> Any:
    config = shallow().config
    text = TextEncoder(shallow().tokenizer_json, config.vocab_size, config.type_vocab_size, config.max_positions)
    return make_rows(examples, HEAD, (), text, RULE)


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def test_a_pairs_loss_is_that_of_finding_its_second_text() -> None:
    vectors = np.random.default_rng(0).normal(size=(14, 6)).astype(np.float32)
    numbers = np.array([[0, 1], [2, 3], [4, 1], [2, 5], [6, 5], [7, 0], [8, 9]], np.int32)
    weights = np.array([1, 1, 1, 1, 0, 1, 1], np.float32)
    cosines = SHARPNESS * unit(vectors[:7]) @ unit(vectors[7:]).T
    expected = []
    wrong = {0: (1, 3, 6), 1: (0, 2, 5, 6), 2: (1, 3, 5, 6), 3: (0, 2, 5, 6), 4: (0, 1, 2, 5, 6)}
    wrong |= {5: (0, 1, 2, 3, 6), 6: (0, 1, 2, 3, 5)}
    for row in range(7):
        shown = cosines[row, [row, *wrong[row]]]
        expected.append(np.log(np.exp(shown).sum()) - shown[0])
    found = pair_losses(jnp.asarray(vectors), Labels(jnp.asarray(numbers), jnp.asarray(weights)))
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-4)


def test_a_rated_pairs_loss_is_its_cosines_error() -> None:
    vectors = np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32)
    rated = np.array([1, -0.5, 0.25], np.float32)
    found = pair_losses(jnp.asarray(vectors), Labels(jnp.asarray(rated), jnp.ones(3)))
    expected = ((unit(vectors[:3]) * unit(vectors[3:])).sum(-1) - rated) ** 2
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5)


def test_both_texts_of_a_pair_are_in_its_batch() -> None:
    rows = rows_of([Example("a library", "to read files", None), Example("one game", "for sound", None)] * 2)
    assert [each.tolist() for each in rows.targets] == [[0, 1], [2, 3], [0, 1], [2, 3]]
    text, labels = gather(rows.take([1, 2]), np.array([1, 0]), 3, 0)
    assert text.ids.shape == (6, 8) and labels.weights.tolist() == [1, 1, 0]
    for at, own in enumerate([rows.tokens[2], rows.tokens[1], rows.tokens[1], rows.seconds[2], rows.seconds[1]]):
        assert text.ids[at, : len(own.ids)].tolist() == own.ids.tolist()


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([Example("a", "b", None), Example("a", None, None)], "row 2: expected a second text"),
        ([Example("a", "b", 0.5), Example("a", "b", None)], "row 2: expected a label in every row or in none"),
        ([Example("a", "b", "alike")], "row 1: expected how alike the texts are, from -1 to 1"),
        ([Example("a", "b", 5)], "row 1: expected how alike"),
        ([Example("a", "b", float("nan"))], "row 1: expected how alike"),
    ],
)
def test_what_are_no_pairs_is_refused(examples: list[Example], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        rows_of(examples)


def test_pairs_are_scored_by_who_is_nearest() -> None:
    first = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]], np.float32)
    second = np.array([[1, 0, 0], [0, 1, 1], [0, 2, 1], [1, 0, 0]], np.float32)
    found = scores(HEAD, (), [*first, *second], pairs((0, 1), (2, 3), (4, 5), (0, 1)))
    # For the second pair, one other text is nearer to the first text; for the third too.
    assert found == {"accuracy_at_1": 0.5, "mean_reciprocal_rank": 0.75}
    rated = scores(HEAD, (), [*first[:3], *second[:3]], [np.float32(each) for each in (1.0, 0.7, 0.4)])
    assert rated["pearson"] == pytest.approx(np.corrcoef([1, 0.5**0.5, 0.2**0.5], [1, 0.7, 0.4])[0, 1])


def test_what_belongs_to_a_first_text_as_well_is_not_before_its_second() -> None:
    """Another second text of the same first, or the first one itself as the second of another pair."""
    first = np.array([[1, 0], [1, 0], [0, 1]], np.float32)
    second = np.array([[1, 1], [2, 1], [1, 0]], np.float32)
    alone = scores(HEAD, (), [*first, *second], pairs((0, 1), (2, 3), (4, 5)))
    assert alone["mean_reciprocal_rank"] == pytest.approx((1 / 3 + 1 / 2 + 1 / 3) / 3)
    together = scores(HEAD, (), [*first, *second], pairs((0, 1), (0, 3), (4, 0)))
    assert together["mean_reciprocal_rank"] == pytest.approx((1 + 1 + 1 / 3) / 3)


def pairs(*numbers: tuple[int, int]) -> list[np.ndarray]:
    return [np.array(each, np.int32) for each in numbers]


def test_texts_with_one_vector_are_not_told_apart() -> None:
    """As of texts that are alike up to where they are cut, or of vectors that are all alike or none."""
    numbers = pairs((0, 1), (2, 3), (4, 5))
    for vector in ([1, 2], [0, 0], [np.nan, 1]):
        found = scores(HEAD, (), [np.array(vector, np.float32)] * 6, numbers)
        assert found == {"accuracy_at_1": 0, "mean_reciprocal_rank": pytest.approx(1 / 3)}
    copies = scores(HEAD, (), [np.array([1, 2], np.float32)] * 6, pairs((0, 3), (1, 3), (2, 3)))
    assert copies["accuracy_at_1"] == 1, "copies of the second text are no others"


def test_embeddings_learn_which_texts_belong_together() -> None:
    config = dataclasses.replace(shallow().config, layers=1)
    base = jax.tree.map(np.asarray, random_params(config))
    rng = np.random.default_rng(0)
    words = np.array(["library", "python", "module", "game", "music", "sound", "files", "system", "network", "user"])
    pairs = [rng.permutation(len(words))[:6] for _ in range(32)]
    rows = rows_of([Example(" ".join(words[at[:3]]), " ".join(words[at[3:]]), None) for at in pairs])
    plan = TrainingPlan(epochs=6, batch=16, rate=0.05, dtype="float32")
    outcome = train(split(config), base, direct_recipe("bitfit", {}, config, base), HEAD, rows, plan, held_out=rows)
    assert np.mean(outcome.losses[-2:]) < 0.9 * np.mean(outcome.losses[:2])
    assert outcome.head.tensors == {} and [delta.method for delta in outcome.deltas] == ["bitfit"]


def test_embeddings_trained_together_are_those_trained_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jpets.training.groups.PROGRAMS", 2)  # fewer to compile
    config = dataclasses.replace(shallow().config, layers=1)
    base = jax.tree.map(np.asarray, random_params(config))
    plan = TrainingPlan(epochs=2, batch=4, rate=0.01, dtype="float32")
    pairs = [Example("a library", "a module of many functions for sparse files", None), Example("game", "sound", None)]
    members = [
        Member(direct_recipe("bitfit", {}, config, base, seed), HEAD, rows_of(pairs * count))
        for seed, count in enumerate((3, 4))
    ]
    together = train_together(split(config), base, members, plan)
    for member, found in zip(members, together, strict=True):  # the first member's last batch is not full
        alone = train(split(config), base, member.recipe, HEAD, member.rows, plan)
        np.testing.assert_allclose(found.losses, alone.losses, rtol=1e-4)
        assert found.head.tensors == {}
    rated = Member(members[0].recipe, HEAD, rows_of([Example("a", "b", 0.5)]))
    with pytest.raises(InvalidInput, match="all rated or none"):
        train_together(split(config), base, [members[0], rated], plan)
    nothing = dataclasses.replace(members[0], rows=members[0].rows.take([]))
    with pytest.raises(InvalidInput, match="each have an example"):
        train_together(split(config), base, [members[0], nothing], plan)
    assert train_together(split(config), base, [], plan) == []


def test_pairs_need_no_column_of_labels(tmp_path: Any) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("question,answer\nwhat is it?,a library\n")
    assert (label_column(None, None), label_column("stars", "embedding")) == ("label", "stars")
    columns = Columns("question", "answer", label_column(None, "embedding"))
    assert read_examples(path, columns) == [Example("what is it?", "a library", None)]


def test_a_head_with_a_layer_goes_on_from_its_own_vectors() -> None:
    config = dataclasses.replace(shallow().config, layers=1)
    base = jax.tree.map(np.asarray, random_params(config))
    rng = np.random.default_rng(0)
    layer = {"kernel": rng.normal(0, 0.1, (64, 8)).astype(np.float32), "bias": np.zeros(8, np.float32)}
    head = dataclasses.replace(HEAD, tensors=layer, activation="tanh")
    rows = rows_of([Example("a library", "python module", None), Example("a game", "music sound", None)] * 8)
    plan = TrainingPlan(epochs=4, batch=8, rate=0.05, dtype="float32")
    outcome = train(split(config), base, direct_recipe("bitfit", {}, config, base), head, rows, plan)
    assert outcome.losses[-1] < 0.9 * outcome.losses[0]
    assert np.abs(outcome.head.tensors["kernel"] - layer["kernel"]).max() > 1e-4
