"""Vectors of n-grams and their merging, beside one n-gram at a time and plain sums."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpets.config import BackboneConfig
from jpets.errors import InvalidInput
from jpets.model.batch import PackedBatch, Rows
from jpets.model.encoder import Params, random_params, split
from jpets.model.forward import encode
from jpets.plot.layers import NGramLayers
from jpets.plot.lookup import DOMAIN, Lookup
from jpets.plot.ngrams import Window, keys_of, ngrams
from jpets.plot.table import Table, TableInfo, TableWriter
from pallas_kernels.packed_attention import AttentionGroup

BERT = BackboneConfig("bert", 50, 16, 3, 2, 32, 64)
ROBERTA = dataclasses.replace(BERT, family="roberta", type_vocab_size=0)
TEXTS = [[5, 6, 7, 6, 5, 6], [0], [1, 0, 1], [], [9, 9, 9, 9]]
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


def merged(own: NGramLayers, params: Params, texts: list[list[int]], values: np.ndarray | None = None) -> np.ndarray:
    ids, text, places = packed(texts)
    grams = ngrams(ids, text, own.window)
    vectors = own.vectors(params, jnp.asarray(grams, jnp.int32)) if values is None else jnp.asarray(values)
    types = jnp.zeros(len(ids), jnp.int32)
    return np.asarray(own.merge(params, vectors, jnp.asarray(text), jnp.asarray(places), types))


def alone(own: NGramLayers, params: Params, tokens: dict[int, int]) -> dict[int, np.ndarray]:
    """The gated vectors of one n-gram by place; ``tokens`` are ids by place. No other place exists for it."""
    at = sorted(tokens)
    ids = jnp.array([tokens[place] for place in at])
    rows = Rows(jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))
    group = AttentionGroup(None, jnp.array([len(at)]))
    batch = PackedBatch({"ids": ids, "types": jnp.zeros_like(ids)}, jnp.array(at), (group,), None, None, rows)
    hidden = np.asarray(encode(split(own.lower), params["lower"], batch))
    found = {}
    for place, vector in zip(at, hidden, strict=True):
        if place in own.window.places:
            gate = list(own.window.places).index(place)
            weight, bias = np.asarray(params["gate"]["weight"])[gate], np.asarray(params["gate"]["bias"])[gate]
            found[place] = vector / (1 + np.exp(-(vector @ weight + bias)))
    return found


@pytest.mark.parametrize("config", [BERT, ROBERTA], ids=["bert", "roberta"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_token_is_the_sum_of_its_places_in_the_ngrams_around_it(config: BackboneConfig, window: Window) -> None:
    own, params = layers_of(config, window)
    expected = []
    for text in TEXTS:
        added = np.asarray(params["merged"]["position"] + params["merged"]["token_type"][0])
        sums = list(added[: len(text)])
        for centre in range(len(text)):
            around = range(centre - window.before, centre + window.after + 1)
            tokens = {place: text[at] for place, at in enumerate(around) if 0 <= at < len(text)}
            for place, vector in alone(own, params, tokens).items():
                sums[centre + place - window.before] = sums[centre + place - window.before] + vector
        expected += sums
    total = np.array(expected)
    unit = (total - total.mean(-1, keepdims=True)) / np.sqrt(total.var(-1, keepdims=True) + config.norm_eps)
    after = unit * np.asarray(params["merged"]["scale"]) + np.asarray(params["merged"]["bias"])
    np.testing.assert_allclose(merged(own, params, TEXTS), after, atol=2e-5)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_nothing_leaks_from_one_text_into_another(window: Window) -> None:
    own, params = layers_of(BERT, window)
    together = merged(own, params, TEXTS)
    parts = np.split(together, np.cumsum([len(text) for text in TEXTS])[:-1])
    for text, part in zip(TEXTS, parts, strict=True):
        if text:
            np.testing.assert_allclose(merged(own, params, [text]), part, atol=1e-6)


def test_a_causal_token_knows_nothing_of_those_after_it() -> None:
    own, params = layers_of(BERT, Window.of(3, causal=True))
    one, other = merged(own, params, [[5, 6, 7, 8]]), merged(own, params, [[5, 6, 9, 9]])
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
        writer.append(np.asarray(own.vectors(params, jnp.asarray(some, jnp.int32))))
        tables.append(Table(writer.finish(), info))
    root, domain = tables
    found = Lookup(root, domain, config.vocab_size).find(grams)
    assert (found.table == DOMAIN).all()
    computed = merged(own, params, TEXTS)
    np.testing.assert_allclose(merged(own, params, TEXTS, domain.values[found.row]), computed, atol=0.03)
    only_words = Lookup(root, None, config.vocab_size).find(grams)
    assert set(only_words.level.tolist()) == {1, 2, 3}, "a text of one token, the last ones of texts, and all others"
    assert np.abs(merged(own, params, TEXTS, root.values[only_words.row]) - computed).max() > 0.1


def test_a_padding_token_that_a_text_spells_has_a_position_of_its_own() -> None:
    own, params = layers_of(ROBERTA, Window.of(3))
    zeros, text = jnp.zeros((2, 3, 16)), jnp.zeros(2, jnp.int32)
    found = own.merge(params, zeros, text, jnp.array([0, ROBERTA.max_positions]), text)
    merged = params["merged"]
    total = np.stack([merged["position"][0], merged["padding_position"]]) + merged["token_type"][0]
    unit = (total - total.mean(-1, keepdims=True)) / np.sqrt(total.var(-1, keepdims=True) + ROBERTA.norm_eps)
    np.testing.assert_allclose(found, unit * merged["scale"] + merged["bias"], atol=1e-5)


def test_some_layers_stay_above() -> None:
    for count in (0, 3, -1):
        with pytest.raises(InvalidInput, match="1 to 2 layers"):
            NGramLayers(BERT, Window.of(3), count)
    with pytest.raises(InvalidInput, match="projects"):
        NGramLayers(dataclasses.replace(BERT, embedding_size=8), Window.of(3), 1)
