"""Tiny backbones whose lower layers are tables, and what their layers compute without tables."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from one_task import task_logits
from support import FIXTURES, tiny

from checkpoints.backbone import Backbone
from checkpoints.canonical import from_params
from checkpoints.native import read_native, write_native
from jpets.config import TableFormat
from jpets.model.encoder import Params, split
from jpets.plot.build import build_table, root_keys, write_layers
from jpets.plot.domains import DomainTables
from jpets.plot.forms import forms_of, write_forms
from jpets.plot.layers import NGramLayers
from jpets.plot.ngrams import Window, keys_of, ngrams
from jpets.plot.tree import FORMS, LAYERS, TABLES, Branch, Tree
from jpets.plot.values import stored
from jpets.tokenizing import NO_ROW, TextEncoder, Tokens
from jpets.training.adapt import Hierarchical
from jpets.training.forward import TextRows
from jpets.types import LoadedBackbone, Preprocessing, Query, Task

Given = str | tuple[str, str]
"""A text, or a pair."""
COUNT = 1
"""Layers that tables stand for."""
MOST = 64
"""Tokens of a text that is computed: all that the smallest of these backbones takes."""
IN_ROOT = ("a text of the root", "the same words")
IN_DOMAIN = ("some text", "other words of the domain", "a", "a text of the root")


@functools.cache
def layers_of(name: str = "tiny-bert", size: int = 3, normal: bool = False) -> NGramLayers:
    whole = tiny(name)
    forms = forms_of(whole.tokenizer_json, whole.config.vocab_size) if normal else None
    return NGramLayers(whole.config, Window.of(size), COUNT, forms)


@functools.cache
def model_of(name: str = "tiny-bert", size: int = 3, seed: int = 1) -> Hierarchical:
    """Parameters that nothing was trained for: every part of them matters."""
    layers, base = layers_of(name, size), dict(tiny(name).params)
    rng = np.random.default_rng(seed)
    noisy = jax.tree.map(
        lambda leaf: np.asarray(leaf + rng.normal(0, 0.05, leaf.shape).astype(np.float32)),
        {"ngrams": layers.start(base), "upper": layers.start_upper(base)},
    )
    noisy["ngrams"]["lower"]["word"] = noisy["upper"]["word"] = np.asarray(base["word"])
    return Hierarchical(noisy["ngrams"], noisy["upper"])


def keys_of_texts(name: str, texts: Sequence[str], layers: NGramLayers) -> np.ndarray:
    rule = Preprocessing(truncation=True)
    given = tokens_of(TextEncoder.of(tiny(name)), texts, rule)
    return np.unique(np.concatenate([keys_of(ngrams(layers.normal(own.ids), None, layers.window)) for own in given]))


def tokens_of(encoder: TextEncoder, texts: Sequence[Given], rule: Preprocessing) -> list[Tokens]:
    return [encoder.encode(query_of(None, text), rule) for text in texts]


def query_of(task: str | None, text: Given) -> Query:
    return Query(task, text) if isinstance(text, str) else Query(task, *text)


def write_tables(
    folder: pathlib.Path,
    name: str = "tiny-bert",
    size: int = 3,
    domains: Sequence[tuple[str, Sequence[str], int]] = (),
    kept_as: TableFormat = "bfloat16",
    normal: bool = False,
) -> pathlib.Path:
    """A backbone's folder. Each domain has a name, texts, and the seed of its n-gram layers. ``normal``: tokens are
    looked up by their normal forms."""
    layers, model = layers_of(name, size, normal), model_of(name, size)
    plot = folder.parent / f"{folder.name}-plot"
    for part in (LAYERS, TABLES):
        (plot / part).mkdir(parents=True)
    words = tiny(name).config.vocab_size

    def branch(ngrams_: Params, keys: np.ndarray) -> Branch:
        digest = write_layers(plot / LAYERS, ngrams_)
        path = build_table(plot / TABLES, layers, ngrams_, digest, keys, kept_as=kept_as, batch=256)
        whole = {"source": str(FIXTURES / name), "fingerprint": tiny(name).fingerprint}
        return Branch(path.stem, digest, {"whole": whole})

    frequent = keys_of_texts(name, IN_ROOT, layers)
    root = branch(model.ngrams, root_keys(frequent, layers.window, words, layers.forms))
    made = {
        own: branch(domain_layers(name, size, seed), keys_of_texts(name, texts, layers)) for own, texts, seed in domains
    }
    forms = None if layers.forms is None else write_forms(plot / FORMS, layers.forms)
    tree = Tree(layers.window, layers.config.hidden_size, COUNT, root, made, kept_as, forms)
    tree.write(plot)
    tensors = from_params(model.upper, layers.upper)
    whole = tiny(name)
    made_backbone = Backbone.of_tensors(
        f"{name}-tables", layers.upper, tensors, whole.tokenizer_json, whole.embeds, tree.vectors
    )
    write_native(made_backbone, folder, plot)
    return folder


def domain_layers(name: str, size: int, seed: int) -> Params:
    """Those of the root for seed 1."""
    return model_of(name, size, seed).ngrams


def opened(folder: pathlib.Path) -> Backbone:
    return read_native(folder)


def computed(
    backbone: LoadedBackbone, name: str, task: Task, texts: Sequence[Given], texts_of_domain: Sequence[str], seed: int
) -> np.ndarray:
    """Logits of texts whose n-grams are computed: by the domain's layers where they are in its table, else by the
    root's, which has ``IN_ROOT`` and each token alone; a missing n-gram by what is left without its farthest
    neighbour."""
    assert isinstance(backbone.tables, DomainTables)
    size = sum(backbone.config.window) + 1
    layers, model = layers_of(name, size, backbone.tables.tree.forms is not None), model_of(name, size)
    window = layers.window
    rule = dataclasses.replace(task.preprocessing, domain=None)
    tokens = tokens_of(TextEncoder.of(tiny(name)), texts, rule)
    given = [layers.normal(one.ids) for one in tokens]
    own = grams_of_texts(name, texts_of_domain, layers) if task.preprocessing.domain else set()
    root = grams_of_texts(name, IN_ROOT, layers)
    known = root | {cut(gram, window, *span) for gram in root for span in window.shorter}
    spans = [(window.before, window.after), *window.shorter]
    ids, types = np.full((len(texts), MOST), NO_ROW), np.zeros((len(texts), MOST), np.int32)
    table = np.zeros((ids.size, size, layers.config.hidden_size), np.float32)
    for row, grams in enumerate(ngrams(one, None, window) for one in given):
        ids[row, : len(grams)] = row * MOST + np.arange(len(grams))
        types[row, : len(grams)] = tokens[row].types
        found = []
        for gram in map(tuple, grams.tolist()):
            shorter = (each for each in (cut(gram, window, *span) for span in spans) if each in known)
            found.append((seed, gram) if gram in own else (1, next(shorter, cut(gram, window, 0, 0))))
        for of in {each for each, _ in found}:
            chosen = np.array([at for at, (each, _) in enumerate(found) if each == of])
            filled = np.array([[0] * window.before + [1] + [0] * window.after] * MOST, np.int32)
            filled[chosen] = [found[at][1] for at in chosen]
            vectors = vectors_of(name, size)(domain_layers(name, size, of), filled)
            table[row * MOST + chosen] = vectors[chosen]
    rows = TextRows(jnp.asarray(ids), jnp.asarray(types), jnp.array([len(one) for one in given]))
    kept_as = backbone.config.table_format
    encoder = split(dataclasses.replace(layers.upper, table_rows=ids.size, table_format=kept_as))
    params = {**jax.tree.map(jnp.asarray, model.upper), "table": jnp.asarray(stored(table, kept_as))}
    return task_logits(encoder, params, task.deltas, task.head, rows)


@functools.cache
def vectors_of(name: str, size: int) -> Callable[[Params, np.ndarray], np.ndarray]:
    compute = jax.jit(layers_of(name, size).vectors)
    return lambda params, grams: np.asarray(compute(jax.tree.map(jnp.asarray, params), grams))


def grams_of_texts(name: str, texts: Sequence[str], layers: NGramLayers) -> set[tuple[int, ...]]:
    given = tokens_of(TextEncoder.of(tiny(name)), texts, Preprocessing(truncation=True))
    return {tuple(gram) for own in given for gram in ngrams(layers.normal(own.ids), None, layers.window).tolist()}


def cut(gram: tuple[int, ...], window: Window, before: int, after: int) -> tuple[int, ...]:
    """A gram with only so many neighbours."""
    kept = range(window.before - before, window.before + after + 1)
    return tuple(id if place in kept else 0 for place, id in enumerate(gram))
