"""Making n-gram layers: adapting a backbone to them by distillation from itself, and training them further on a domain
(HMI sections 3.2.1 and 5.1; SkipBERT).

Axes: n texts of up to L tokens, d hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jpets.config import DType
from jpets.model.encoder import Params, split
from jpets.plot.layers import NGramLayers
from jpets.plot.lookup import OWN
from jpets.plot.ngrams import Window
from jpets.tokenizing import NO_ROW, Tokens
from jpets.training.forward import TextRows, states_of, within
from jpets.training.losses import state_distance
from jpets.training.plan import TrainingPlan
from jpets.training.pretrain import Vocabulary, fit_texts, guess_loss, hide
from jpets.training.run import Keeper, UpdateReport
from jpets.training.tokens import padded_length, rectangle

RATE = 5e-4
"""Learning rate of adapting by default: the layers must learn to do without most of a text."""
CALIBRATING = 128
"""Texts over which the start is calibrated."""
EMBEDDED = ("position", "padding_position", "token_type")
DOMAIN_RATE = 1e-4
"""The same of a domain's layers."""


class Hierarchical(NamedTuple):
    """Parameters of n-gram layers (as ``NGramLayers`` has them) and of the layers above them."""

    ngrams: Params
    upper: Params


def start(layers: NGramLayers, base: Params) -> Hierarchical:
    """Where adapting the backbone of ``base`` begins."""
    return Hierarchical(layers.start(base), layers.start_upper(base))


def adapt(
    layers: NGramLayers,
    base: Params,
    tokens: Sequence[Tokens],
    vocabulary: Vocabulary | None,
    plan: TrainingPlan,
    *,
    guesses: float = 0.0,
    keeper: Keeper | None = None,
    save_every: int = 100,
    pad_id: int = 0,
    report: Callable[[UpdateReport], None] = lambda step: None,
) -> tuple[Hierarchical, list[float]]:
    """(the backbone of ``base`` with its lower layers on n-grams, losses): all layers learn to give the hidden states
    that the whole backbone gives, of the same texts. Word embeddings stay as they are. ``tokens`` with levels are
    computed as a table will hold them: of most n-grams that is less than the whole.

    With ``guesses`` above 0 a share of the tokens is hidden, and so many times the loss of guessing them counts
    (masked language modelling), which takes a ``vocabulary``.
    """
    base = jax.tree.map(jnp.asarray, base)

    def objective(base: Params, own: Any, rows: TextRows, key: PRNGKeyArray) -> Float[Array, ""]:
        model = _joined(own["own"], base["word"])
        return _loss(layers, model, None, own["head"]["bias"], base, rows, vocabulary, guesses, key, plan.dtype)

    begun = calibrated(layers, base, start(layers, base), tokens[:CALIBRATING], pad_id)
    trained: Any = {
        "own": {"ngrams": _wordless(begun.ngrams), "upper": _without_word(begun.upper)},
        "head": {"bias": jnp.zeros(layers.config.vocab_size)},
    }
    after, losses = fit_texts(
        objective,
        base,
        trained,
        tokens,
        plan,
        rate=RATE,
        keeper=keeper,
        save_every=save_every,
        pad_id=pad_id,
        report=report,
    )
    model = _joined(after["own"], base["word"])
    return model._replace(upper=_extended(model.upper, tokens)), losses


def _extended(upper: Params, tokens: Sequence[Tokens]) -> Params:
    """The positions and types that no text had, which begin at zero and stay there, are as those next to them."""
    longest, types = max(len(own.ids) for own in tokens), np.unique(np.concatenate([own.types for own in tokens]))
    nearest = {}
    if (position := upper.get("position")) is not None:
        nearest["position"] = position[np.minimum(np.arange(len(position)), longest - 1)]
    if (token_type := upper.get("token_type")) is not None:
        every = np.arange(len(token_type))
        nearest["token_type"] = token_type[np.where(np.isin(every, types), every, types[0])]
    return {**upper, **nearest}


def calibrated(
    layers: NGramLayers, base: Params, model: Hierarchical, tokens: Sequence[Tokens], pad_id: int = 0
) -> Hierarchical:
    """``model`` with the norm of its merged vectors fitted to the hidden states that the upper layers get in the whole
    backbone: number by number, by least squares over some texts. Positions and types begin at zero: the hidden states
    hold them already, as far as an n-gram knows."""
    rows = rectangle(tokens, padded_length(max(len(own.ids) for own in tokens)), pad_id)
    place = layers.upper.bias_layout()[0, "embeddings_norm"]
    plain = {name: jnp.zeros_like(own) for name, own in model.upper.items() if name in EMBEDDED}
    bias = model.upper["bias"].at[place].set(0.0)
    upper = {**model.upper, **plain, "embeddings_norm": jnp.ones_like(model.upper["embeddings_norm"]), "bias": bias}

    @jax.jit
    def fitted(base: Params, model: Hierarchical, rows: TextRows) -> tuple[Array, Array]:
        found = hierarchical_states(layers, model, rows)[0]
        expected = states_of(split(layers.config), base, rows, "float32")[layers.count]
        weight = within(rows)[..., None].astype(jnp.float32) / rows.lengths.sum().astype(jnp.float32)
        mean, expected_mean = ((own * weight).sum((0, 1)) for own in (found, expected))
        variance = (jnp.square(found - mean) * weight).sum((0, 1))
        scale = ((found - mean) * (expected - expected_mean) * weight).sum((0, 1)) / jnp.maximum(variance, 1e-6)
        return scale, expected_mean - scale * mean

    scale, offset = fitted(base, Hierarchical(model.ngrams, upper), rows)
    return Hierarchical(model.ngrams, {**upper, "embeddings_norm": scale, "bias": bias.at[place].set(offset)})


def train_domain(
    layers: NGramLayers,
    model: Hierarchical,
    base: Params,
    tokens: Sequence[Tokens],
    vocabulary: Vocabulary | None,
    plan: TrainingPlan,
    *,
    guesses: float = 0.0,
    keeper: Keeper | None = None,
    save_every: int = 100,
    pad_id: int = 0,
    report: Callable[[UpdateReport], None] = lambda step: None,
) -> tuple[Params, list[float]]:
    """(the n-gram layers trained further on texts of a domain, losses). The upper layers stay as they are.

    The layers learn to give the hidden states that the whole backbone, ``base``, gives of these texts, as in ``adapt``.
    With ``guesses`` above 0 they learn to guess hidden tokens as well (HMI's further pretraining), which is of use only
    where the backbone can do so itself: one that was trained to embed texts cannot.
    """
    known = jax.tree.map(jnp.asarray, (model, base))

    def objective(known: Any, own: Any, rows: TextRows, key: PRNGKeyArray) -> Float[Array, ""]:
        frozen, base = known
        whole = Hierarchical(_worded(own["own"], frozen.upper["word"]), frozen.upper)
        bias = own["head"]["bias"]
        return _loss(layers, whole, frozen.ngrams, bias, base, rows, vocabulary, guesses, key, plan.dtype)

    trained = {"own": _wordless(known[0].ngrams), "head": {"bias": jnp.zeros(layers.config.vocab_size)}}
    after, losses = fit_texts(
        objective,
        known,
        trained,
        tokens,
        plan,
        rate=DOMAIN_RATE,
        keeper=keeper,
        save_every=save_every,
        pad_id=pad_id,
        report=report,
    )
    return _worded(after["own"], known[0].upper["word"]), losses


def _loss(
    layers: NGramLayers,
    model: Hierarchical,
    root: Params | None,
    bias: Float[Array, " v"],
    base: Params,
    rows: TextRows,
    vocabulary: Vocabulary | None,
    guesses: float,
    key: PRNGKeyArray,
    dtype: DType,
) -> Float[Array, ""]:
    """How far the model's hidden states are from those of ``base``, in the mean over layers, and so many times the loss
    of ``guesses``; ``bias`` is that of guessing."""
    hidden = hide(rows, vocabulary, key) if vocabulary is not None and guesses else None
    shown = rows if hidden is None else hidden.rows
    found = hierarchical_states(layers, model, shown, dtype, root)
    expected = jax.lax.stop_gradient(states_of(split(layers.config), base, shown, dtype)[layers.count :])
    apart = [state_distance(own, other, within(rows)) for own, other in zip(found, expected, strict=True)]
    loss = sum(apart, start=jnp.float32(0)) / len(apart)
    if hidden is not None:
        loss += guesses * guess_loss(found[-1], bias, model.upper["word"], hidden.targets)
    return loss


def hierarchical_states(
    layers: NGramLayers, model: Hierarchical, rows: TextRows, dtype: DType = "float32", root: Params | None = None
) -> tuple[Float[Array, "n l d"], ...]:
    """The merged vectors of texts whose n-grams are computed, and every upper layer's output, f32; values past a row's
    length have no meaning.

    Where ``rows`` have levels, an n-gram is cut to what a table will hold of it; with ``root``, the n-gram layers of
    the root, those that a domain's table will not hold are computed by them.
    """
    inside = within(rows)
    count = inside.size
    grams = text_ngrams(rows, layers.window).reshape(count, -1)
    table = layers.vectors(model.ngrams, grams, dtype)
    if root is not None and rows.levels is not None:
        own = (rows.levels == OWN).reshape(-1, 1, 1)
        table = jnp.where(own, table, layers.vectors(root, grams, dtype))
    at = jnp.where(inside, jnp.arange(count, dtype=rows.ids.dtype).reshape(inside.shape), NO_ROW)
    encoder = split(dataclasses.replace(layers.upper, table_rows=count))
    return states_of(encoder, {**model.upper, "table": table}, rows._replace(ids=at), dtype)


def text_ngrams(rows: TextRows, window: Window) -> Int[Array, "n l size"]:
    """``jpets.plot.ngrams.ngrams`` of padded texts inside a program, cut to their levels. A place past a row's length
    is a token alone."""
    inside = within(rows)
    raised = jnp.where(inside, rows.ids + 1, 0)
    length = raised.shape[1]
    wide = jnp.pad(raised, ((0, 0), (window.before, window.after)))
    found = jnp.stack([wide[:, place : place + length] for place in range(window.size)], -1)
    if rows.levels is not None:
        found = jnp.where(_kept(window)[jnp.maximum(rows.levels, 0)], found, 0)
    own = jnp.arange(window.size) == window.before
    return jnp.where(inside[..., None], found, own.astype(found.dtype))


def _kept(window: Window) -> Bool[Array, "levels size"]:
    """The places that an n-gram keeps at each level of falling back."""
    spans = [(window.before, window.after), *window.shorter]
    offsets = np.arange(window.size) - window.before
    return jnp.array([(offsets >= -before) & (offsets <= after) for before, after in spans])


def _without_word(params: Params) -> Params:
    return {name: own for name, own in params.items() if name != "word"}


def _wordless(ngrams: Params) -> Params:
    return {**ngrams, "lower": _without_word(ngrams["lower"])}


def _worded(ngrams: Params, word: Array) -> Params:
    return {**ngrams, "lower": {**ngrams["lower"], "word": word}}


def _joined(own: Params, word: Array) -> Hierarchical:
    return Hierarchical(_worded(own["ngrams"], word), {**own["upper"], "word": word})
