"""Backbones of other families in the engine: texts by their own tokenizers, positions, widths of embeddings."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import tokenizers
from support import ENGINE_BUCKETS, ENGINE_SETTINGS, dense_answer, make_head, make_task, random_delta, tiny

from jpets.engine.engine import Engine
from jpets.types import Classification, Embedding, Query

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
