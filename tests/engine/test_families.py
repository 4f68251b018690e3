"""Backbones of other families in the engine: texts by their own tokenizers, positions, widths of embeddings."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from hierarchical import opened, write_tables
from one_task import task_logits
from support import ENGINE_BUCKETS, ENGINE_SETTINGS, FIXTURES, dense_answer, make_head, make_task, random_delta, tiny

from checkpoints.backbone import Backbone
from checkpoints.tensors import read_tensors
from jpets.engine.engine import Engine
from jpets.model.encoder import split
from jpets.tokenizing import NO_ROW, TextEncoder
from jpets.training.forward import packed_batch, rectangular_batch
from jpets.training.tokens import packed, rectangle
from jpets.types import Classification, Embedding, Preprocessing, Query

LONG = " ".join(["sparse matrices"] * 40)


@pytest.mark.parametrize("name", ["tiny-roberta", "tiny-electra"])
def test_texts_are_answered(name: str, tmp_path: pathlib.Path) -> None:
    backbone = tiny(name)
    config, tokenizer = backbone.config, tokenizers.Tokenizer.from_str(backbone.tokenizer_json)
    deltas = [random_delta("prompt", config), random_delta("bitfit", config, 1)]
    head = make_head(np.random.default_rng(2), config.hidden_size, 3, two_layers=True)
    task = make_task(backbone, "t", deltas, head)
    with Engine(backbone, [task], ENGINE_SETTINGS, cache_dir=tmp_path, buckets=ENGINE_BUCKETS[1:]) as engine:
        engine.start()
        queries = [Query("t", "a caf\u00e9"), Query("t", LONG, truncate=True), Query(None, LONG, truncate=True)]
        for query, result in zip(queries, engine.infer(queries), strict=True):
            assert query.text is not None
            own, room = (task, 62) if query.task else (None, 64)
            tokenizer.enable_truncation(room)
            ids = np.array(tokenizer.encode(query.text).ids)
            assert result.tokens == len(ids) <= room
            expected = dense_answer(backbone, own, ids)
            if own is None:
                assert isinstance(result, Embedding)
                vector = expected["pooled"] / np.linalg.norm(expected["pooled"])
                np.testing.assert_allclose(result.embedding, vector, atol=1e-4)
            else:
                assert isinstance(result, Classification)
                np.testing.assert_allclose(result.logits, expected["logits"][0], atol=1e-4)


SPELLED = {"tiny-bert": "a [PAD] chess [SEP] [MASK]", "tiny-roberta": "a <pad> chess <pad></s><mask> <pad>"}


def as_the_library_counts(name: str, ids: np.ndarray, first: int = 0) -> Backbone:
    """A backbone with the positions of Hugging Face's RoBERTa for ``ids``, taken from the checkpoint's own table:
    padding has the row of its id, every other token the next row behind the tokens counted before it."""
    backbone = tiny(name)
    pad = backbone.config.padding_id
    counted = (ids != pad).astype(int)
    places = (np.cumsum(counted) + first) * counted + pad
    (table,) = (own for key, own in read_tensors(FIXTURES / name).items() if "position_embeddings" in key)
    position = np.concatenate([np.zeros((first, table.shape[1]), np.float32), table[places]])
    return dataclasses.replace(backbone, params={**backbone.params, "position": position})


@pytest.mark.parametrize("name", SPELLED)
def test_special_tokens_that_a_text_spells(name: str, tmp_path: pathlib.Path) -> None:
    """Special tokens are attended to. RoBERTa's positions skip padding, except behind virtual tokens, which have no
    ids."""
    backbone, text = tiny(name), SPELLED[name]
    config, head = backbone.config, make_head(np.random.default_rng(2), backbone.config.hidden_size, 3)
    deltas = [random_delta("bitfit", config, 1), random_delta("prefix", config), random_delta("prompt", config)]
    tasks = [make_task(backbone, delta.method, [delta], head) for delta in deltas]
    with Engine(backbone, tasks, ENGINE_SETTINGS, cache_dir=tmp_path, buckets=ENGINE_BUCKETS[1:]) as engine:
        engine.start()
        plain, *answers = engine.infer([Query(task.id if task else None, text) for task in (None, *tasks)])
    ids = np.array(tokenizers.Tokenizer.from_str(backbone.tokenizer_json).encode(text).ids)
    roberta = name == "tiny-roberta"
    assert (ids == (1 if roberta else 0)).sum() == (3 if roberta else 1)
    counted = as_the_library_counts(name, ids) if roberta else backbone
    assert isinstance(plain, Embedding)
    vector = dense_answer(counted, None, ids)["pooled"]
    np.testing.assert_allclose(plain.embedding, vector / np.linalg.norm(vector), atol=1e-4)
    behind = as_the_library_counts(name, ids, deltas[1].settings["first_position"]) if roberta else backbone
    for task, result, own in zip(tasks, answers, (counted, behind, backbone), strict=True):
        assert isinstance(result, Classification)
        np.testing.assert_allclose(result.logits, dense_answer(own, task, ids)["logits"][0], atol=1e-4)


def test_training_counts_positions_as_the_engine_does() -> None:
    backbone = tiny("tiny-roberta")
    texts = [np.array(ids, np.int32) for ids in ([0, 9, 1, 8, 2], [0, 1, 1, 7, 2, 5], [0, 3, 2])]
    encoder, rule, pad = TextEncoder.of(backbone), Preprocessing(), backbone.config.max_positions
    tokens = [encoder.encode(Query(None, input_ids=ids.tolist()), rule) for ids in texts]
    rows = rectangle(tokens, 8, 1)
    places = [[0, 1, pad, 2, 3], [0, pad, pad, 1, 2, 3], [0, 1, 2]]
    found = np.asarray(rectangular_batch(rows, "mean", backbone.config).positions).reshape(3, 8)
    assert [own[: len(ids)].tolist() for own, ids in zip(found, texts, strict=True)] == places
    flat = np.asarray(packed_batch(packed(tokens, 16, 8, 1), "mean", backbone.config).positions)
    assert flat[:14].tolist() == [place for own in places for place in own]


def test_training_over_tables_counts_positions_as_the_engine_does(tmp_path: pathlib.Path) -> None:
    """Whose tokens are rows of tables by then, and no ids."""
    backbone = opened(write_tables(tmp_path / "tables", "tiny-roberta"))
    head = make_head(np.random.default_rng(2), backbone.config.hidden_size, 3)
    task = make_task(backbone, "t", [random_delta("bitfit", backbone.config, 1)], head)
    texts = [SPELLED["tiny-roberta"], "a text of the root", "<pad>"]
    with Engine(backbone, [task], ENGINE_SETTINGS, cache_dir=tmp_path / "cache", buckets=ENGINE_BUCKETS[1:]) as engine:
        engine.start()
        served = engine.infer([Query("t", text) for text in texts])
    tokens = [TextEncoder.of(backbone).encode(Query(None, text), task.preprocessing) for text in texts]
    params, encoder = jax.tree.map(jnp.asarray, dict(backbone.params)), split(backbone.config)
    order = sorted(range(len(texts)), key=lambda at: len(tokens[at].ids))
    rising = [tokens[at] for at in order]  # behind the last one there is room, where it has no neighbours
    exact = packed(rising, 40, len(rising[-1].ids), NO_ROW)
    same = range(len(texts))
    for rows, of in ((rectangle(tokens, 16, NO_ROW), same), (packed(tokens, 40, 16, NO_ROW), same), (exact, order)):
        found = task_logits(encoder, params, task.deltas, task.head, rows)
        for own, at in zip(found, of, strict=True):
            expected = served[at]
            assert isinstance(expected, Classification)
            np.testing.assert_allclose(own, expected.logits, atol=1e-4)
