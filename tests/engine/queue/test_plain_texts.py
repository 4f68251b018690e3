"""Texts without a task are embedded as the backbone's own library embeds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import ENGINE_SETTINGS, FIXTURES, tiny

from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.errors import InputTooLong
from jpets.tokenizing import TextEncoder
from jpets.types import BackboneRef, Embedding, EmbeddingRule, Head, Preprocessing, Query, Result, Task

RULE = EmbeddingRule("cls", False, Preprocessing(16, True, prefix="query: "))
LONG = "a library for reading files " * 5
TOO_LONG = "a library for reading files " * 40


@pytest.fixture(scope="module")
def engine(program_cache: Path) -> Iterator[Engine]:
    """Its backbone is queried by its name too, as a server with several asks the others."""
    backbone = dataclasses.replace(tiny(), embeds=RULE)
    named = Task(backbone.name, BackboneRef.of(backbone), (), Head("embedding", pooling="cls"), (), RULE.preprocessing)
    buckets = [Bucket(128, ((2, 64),))]
    with Engine(backbone, [named], ENGINE_SETTINGS, cache_dir=program_cache, buckets=buckets).start() as started:
        yield started


def embedded(result: Result) -> np.ndarray:
    assert isinstance(result, Embedding), result.error
    return result.embedding


def ids_of(text: str) -> list[int]:
    return TextEncoder.of(tiny()).encode(Query(None, text), Preprocessing()).ids.tolist()


@pytest.mark.parametrize("task", [None, tiny().name])
def test_the_vector_is_the_references(engine: Engine, task: str | None) -> None:
    """The vector of the first token, not normalised."""
    kept = np.load(FIXTURES / "tiny-bert" / "outputs.npz")
    lengths = kept["attention_mask"].sum(1)
    queries = [
        Query(task, input_ids=ids[:n].tolist(), token_type_ids=types[:n].tolist())
        for ids, types, n in zip(kept["input_ids"], kept["token_type_ids"], lengths, strict=True)
    ]
    for result, expected in zip(engine.infer(queries), kept["hidden_states"][-1][:, 0], strict=True):
        np.testing.assert_allclose(embedded(result), expected, atol=1e-4)


@pytest.mark.parametrize("task", [None, tiny().name])
def test_texts_are_cut_where_the_library_cuts_them(engine: Engine, task: str | None) -> None:
    whole = ids_of(f"query: {LONG}")
    assert 16 < len(whole) < engine.text.longest < len(ids_of("library " * 100))
    cut, asked, ids, refused, longer, asked_longer = engine.infer(
        [
            Query(task, LONG),
            Query(task, LONG, truncate=True),
            Query(task, input_ids=[*whole[:15], whole[-1]]),
            Query(task, LONG, truncate=False),
            Query(task, TOO_LONG),
            Query(task, TOO_LONG, truncate=True),
        ]
    )
    assert cut.tokens == asked.tokens == ids.tokens == asked_longer.tokens == 16
    for other in (asked, ids, asked_longer):
        np.testing.assert_allclose(embedded(cut), embedded(other), atol=1e-5)
    assert isinstance(refused.error, InputTooLong) and "the limit is 16" in refused.error.message
    assert isinstance(longer.error, InputTooLong) and "the limit is 64" in longer.error.message


def test_token_ids_are_not_cut(engine: Engine) -> None:
    (result,) = engine.infer([Query(None, input_ids=ids_of(LONG))])
    assert result.tokens == len(ids_of(LONG)) > 16
