"""Vectors of n-grams and their merging, beside one n-gram at a time and plain sums."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpets.config import OUTSIDE_SITES, BackboneConfig
from jpets.errors import InvalidInput
from jpets.model.batch import PackedBatch, Rows
from jpets.model.encoder import Params, random_params, split
from jpets.model.forward import bind_sites, encode
from jpets.model.merging import merged
from jpets.plot.layers import NGramLayers
from jpets.plot.lookup import DOMAIN, Lookup
from jpets.plot.ngrams import Window, keys_of, ngrams
from jpets.plot.table import Table, TableInfo, TableWriter
from pallas_kernels.packed_attention import AttentionGroup

BERT = BackboneConfig("bert", 50, 16, 3, 2, 32, 64)
ROBERTA = dataclasses.replace(BERT, family="roberta", type_vocab_size=0)
TEXTS = [[5, 6, 7, 6, 5, 6], [0], [1, 0, 1], [], [9, 9, 9, 9]]
MOST = 32
"""N-grams that are computed at a time."""
WINDOWS = [Window.of(2), Window.of(3), Window.of(5), Window.of(3, causal=True)]


def layers_of(config: BackboneConfig, window: Window) -> tuple[NGramLayers, Params]:
    own = NGramLayers(config, window, 2)
    params = own.start(random_params(config, 1))
    rng = np.random.default_rng(2)
    noisy = jax.tree.map(lambda leaf: leaf + rng.normal(0, 0.1, leaf.shape).astype(np.float32), params)
    return own, noisy


def packed(texts: list[list[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, text and position of each token."""
    lengths = [len(text) for text in texts]
    ids = np.array([id for text in texts for id in text], np.int32)
    places = np.array([at for length in lengths for at in range(length)], np.int32)
    return ids, np.repeat(np.arange(len(texts)), lengths), places


def summed(own: NGramLayers, params: Params, texts: list[list[int]], values: np.ndarray | None = None) -> np.ndarray:
    """The merged vector of each token, of computed n-grams or of ``values``."""
    ids, text, _ = packed(texts)
    grams = ngrams(ids, text, own.window)
    vectors = jnp.asarray(vectors_of(own, params, grams) if values is None else values)
    rows = jnp.arange(len(ids))
    return np.asarray(merged(vectors, rows, jnp.asarray(text), own.window.places, own.window.before))


def vectors_of(own: NGramLayers, params: Params, grams: np.ndarray) -> np.ndarray:
    """By one program for any number of n-grams."""
    filled = np.zeros((max(MOST, len(grams)), own.window.size), np.int32)
    filled[:, own.window.before] = 1
    filled[: len(grams)] = grams
    return np.asarray(computing(own)(params, filled))[: len(grams)]


@functools.cache
def computing(own: NGramLayers) -> Callable[..., Any]:
    return jax.jit(own.vectors)


@functools.cache
def encoding(config: BackboneConfig) -> Callable[..., Any]:
    def hidden(params: Params, ids: Any, at: Any) -> Any:
        rows = Rows(jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))
        group = AttentionGroup(None, jnp.array([len(ids)]))
        batch = PackedBatch({"ids": ids, "types": jnp.zeros_like(ids)}, at, (group,), None, None, rows)
        return encode(split(config), params, batch)

    return jax.jit(hidden)


def alone(own: NGramLayers, params: Params, tokens: dict[int, int]) -> dict[int, np.ndarray]:
    """The gated vectors of one n-gram by place; ``tokens`` are ids by place. No other place exists for it."""
    at = sorted(tokens)
    ids = jnp.array([tokens[place] for place in at])
    hidden = np.asarray(encoding(own.lower)(params["lower"], ids, jnp.array(at)))
    found = {}
    for place, vector in zip(at, hidden, strict=True):
        if place in own.window.places:
            gate = list(own.window.places).index(place)
            weight, bias = np.asarray(params["gate"]["weight"])[gate], np.asarray(params["gate"]["bias"])[gate]
            found[place] = vector / (1 + np.exp(-(vector @ weight + bias)))
    return found


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_token_is_the_sum_of_its_places_in_the_ngrams_around_it(window: Window) -> None:
    own, params = layers_of(BERT, window)
    expected = []
    for text in TEXTS:
        sums = list(np.zeros((len(text), BERT.hidden_size), np.float32))
        for centre in range(len(text)):
            around = range(centre - window.before, centre + window.after + 1)
            tokens = {place: text[at] for place, at in enumerate(around) if 0 <= at < len(text)}
            for place, vector in alone(own, params, tokens).items():
                sums[centre + place - window.before] = sums[centre + place - window.before] + vector
        expected += sums
    np.testing.assert_allclose(summed(own, params, TEXTS), np.array(expected), atol=2e-5)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_nothing_leaks_from_one_text_into_another(window: Window) -> None:
    own, params = layers_of(BERT, window)
    together = summed(own, params, TEXTS)
    parts = np.split(together, np.cumsum([len(text) for text in TEXTS])[:-1])
    for text, part in zip(TEXTS, parts, strict=True):
        if text:
            np.testing.assert_allclose(summed(own, params, [text]), part, atol=1e-6)


def test_a_causal_token_knows_nothing_of_those_after_it() -> None:
    own, params = layers_of(BERT, Window.of(3, causal=True))
    one, other = summed(own, params, [[5, 6, 7, 8]]), summed(own, params, [[5, 6, 9, 9]])
    np.testing.assert_array_equal(one[:2], other[:2])
    assert (np.abs(one[2:] - other[2:]).max(1) > 1e-3).all()


@pytest.mark.parametrize("config", [BERT, ROBERTA], ids=["bert", "roberta"])
def test_a_table_gives_what_computing_gives(config: BackboneConfig, tmp_path: Path) -> None:
    """With every n-gram in the domain's table the difference is that of 16 bits."""
    window = Window.of(3)
    own, params = layers_of(config, window)
    ids, text, _ = packed(TEXTS)
    grams = ngrams(ids, text, window)
    words = np.zeros((config.vocab_size, 3), np.int64)
    words[:, 1] = np.arange(config.vocab_size) + 1
    info = TableInfo("layers", window, config.hidden_size)
    tables = []
    for some in (words, np.unique(grams, axis=0)):
        writer = TableWriter(tmp_path, info, keys_of(some))
        writer.append(vectors_of(own, params, some))
        tables.append(Table(writer.finish(), info))
    root, domain = tables
    found = Lookup(root, config.vocab_size).of_domain(domain).find(grams)
    assert (found.table == DOMAIN).all()
    computed = summed(own, params, TEXTS)
    np.testing.assert_allclose(summed(own, params, TEXTS, domain.values[found.row]), computed, atol=0.03)
    only_words = Lookup(root, config.vocab_size).find(grams)
    assert set(only_words.level.tolist()) == {1, 2, 3}, "a text of one token, the last ones of texts, and all others"
    assert np.abs(summed(own, params, TEXTS, root.values[only_words.row]) - computed).max() > 0.1


@pytest.mark.parametrize("config", [BERT, ROBERTA], ids=["bert", "roberta"])
def test_the_layers_above_begin_with_merged_vectors_positions_and_types(config: BackboneConfig) -> None:
    """Of padded texts: a place without a token is nobody's neighbour. A padding token that a text spells has a
    position of its own where the family says so."""
    window = Window.of(3)
    own, params = layers_of(config, window)
    ids, text, places = packed(TEXTS)
    vectors = jnp.asarray(vectors_of(own, params, ngrams(ids, text, window)))
    upper = own.start_upper(random_params(config, 1))
    if config.skips_padding:
        upper["padding_position"] = jnp.ones(config.hidden_size)
        places[2] = config.max_positions
    lengths, longest = np.array([len(text) for text in TEXTS]), 8
    at = np.flatnonzero(np.arange(longest) < lengths[:, None])
    rows, positions = np.full(len(TEXTS) * longest, -1), np.zeros(len(TEXTS) * longest, np.int32)
    rows[at], positions[at] = np.arange(len(ids)), places
    batch = PackedBatch(
        {"ids": jnp.asarray(rows), "types": jnp.zeros(len(rows), jnp.int32)},
        jnp.asarray(positions),
        (AttentionGroup(None, jnp.asarray(lengths)),),
        None,
        None,
        Rows(jnp.zeros(len(TEXTS), jnp.int32), jnp.zeros(len(TEXTS), jnp.int32)),
    )
    shape = split(dataclasses.replace(own.upper, table_rows=len(ids)))
    upper["table"] = vectors
    found = shape.bind(upper).embed(batch, bind_sites(shape, upper, batch))
    table = np.concatenate([upper["position"], np.ones((1, config.hidden_size))])
    total = summed(own, params, TEXTS) + table[places] + (upper["token_type"][0] if config.type_vocab_size else 0)
    unit = (total - total.mean(-1, keepdims=True)) / np.sqrt(total.var(-1, keepdims=True) + config.norm_eps)
    expected = unit * upper["embeddings_norm"] + upper["bias"][config.bias_layout()[0, "embeddings_norm"]]
    np.testing.assert_allclose(found[at], expected, atol=1e-5)


def test_both_parts_have_the_layers_of_the_backbone() -> None:
    own, whole = NGramLayers(BERT, Window.of(3), 1), random_params(BERT, 1)
    whole["bias"] = jnp.arange(len(whole["bias"]), dtype=jnp.float32)
    lower, upper = own.start(whole)["lower"], own.start_upper(whole)
    assert len(lower["layers"]) == 1 and len(upper["layers"]) == 2
    np.testing.assert_array_equal(lower["layers"][0]["qkv"], whole["layers"][0]["qkv"])
    np.testing.assert_array_equal(upper["layers"][1]["ffn_in"], whole["layers"][2]["ffn_in"])
    layout = BERT.bias_layout()
    for part, params, first in ((own.lower, lower, 0), (own.upper, upper, 1)):
        for (layer, site), span in part.bias_layout().items():
            place = layer if site in OUTSIDE_SITES else layer + first
            np.testing.assert_array_equal(params["bias"][span], whole["bias"][layout[place, site]])


def test_an_encoder_takes_no_causal_windows() -> None:
    with pytest.raises(InvalidInput, match="both sides"):
        _ = NGramLayers(BERT, Window.of(3, causal=True), 1).upper


def test_some_layers_stay_above() -> None:
    for count in (0, 3, -1):
        with pytest.raises(InvalidInput, match="1 to 2 layers"):
            NGramLayers(BERT, Window.of(3), count)
    with pytest.raises(InvalidInput, match="projects"):
        NGramLayers(dataclasses.replace(BERT, embedding_size=8), Window.of(3), 1)


def test_tables_stand_on_no_others() -> None:
    with pytest.raises(InvalidInput, match="are tables already"):
        NGramLayers(NGramLayers(BERT, Window.of(3), 1).upper, Window.of(3), 1)
