"""Further pretraining by masked language modelling (Devlin et al. 2019), of chosen layers only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jpets.config import BackboneConfig
from jpets.errors import InvalidInput
from jpets.model.encoder import Params, SplitEncoder
from jpets.tokenizing import Tokens
from jpets.training.batches import filled_up, orders
from jpets.training.forward import TextRows, hidden_states
from jpets.training.objective import Objective, fit_batches
from jpets.training.plan import TrainingPlan, settled
from jpets.training.run import Keeper, UpdateReport
from jpets.training.tokens import padded_length, rectangle

CHOSEN = 0.15
"""Share of the tokens to be guessed."""
RATE = 1e-4
"""Learning rate by default."""
MASKED, REPLACED = 0.8, 0.1
"""Shares of these that become ``[MASK]`` and a random token; the others stay."""


class Guesses(NamedTuple):
    """Inputs with some tokens hidden, and the hidden tokens: ``targets`` [n, L], -1 elsewhere."""

    rows: TextRows
    targets: Int[Array, "n l"]


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """``special`` ids are neither hidden nor used as replacements."""

    size: int
    mask: int
    special: tuple[int, ...]

    @property
    def ordinary(self) -> Int[np.ndarray, " ordinary"]:
        """All other ids."""
        return np.setdiff1d(np.arange(self.size, dtype=np.int32), self.special)


def hide(rows: TextRows, vocabulary: Vocabulary, key: PRNGKeyArray) -> Guesses:
    """15 % of each batch's tokens chosen: 80 % of them masked, 10 % replaced at random, 10 % left (section 3.1)."""
    pick, kind, other = jax.random.split(key, 3)
    inside = jnp.arange(rows.ids.shape[1])[None] < rows.lengths[:, None]
    free: Bool[Array, "n l"] = inside & ~jnp.isin(rows.ids, jnp.asarray(vocabulary.special))
    chosen = free & (jax.random.uniform(pick, rows.ids.shape) < CHOSEN)
    dice = jax.random.uniform(kind, rows.ids.shape)
    ordinary = jnp.asarray(vocabulary.ordinary, rows.ids.dtype)
    drawn = ordinary[jax.random.randint(other, rows.ids.shape, 0, len(ordinary))]
    ids = jnp.where(chosen & (dice < MASKED), jnp.asarray(vocabulary.mask, rows.ids.dtype), rows.ids)
    ids = jnp.where(chosen & (dice >= MASKED) & (dice < MASKED + REPLACED), drawn, ids)
    return Guesses(rows._replace(ids=ids), jnp.where(chosen, rows.ids, -1))


def guess_loss(
    hidden: Float[Array, "n l d"], bias: Float[Array, " v"], word: Float[Array, "v d"], targets: Int[Array, "n l"]
) -> Any:
    """Mean cross-entropy of the hidden tokens, by the word embeddings as output weights."""
    logits = hidden @ word.T.astype(hidden.dtype) + bias
    counted = targets >= 0
    each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counted, targets, 0))
    return jnp.where(counted, each, 0).sum() / jnp.maximum(counted.sum(), 1).astype(each.dtype)


def fit_texts(
    objective: Objective[TextRows],
    frozen: Any,
    trained: Any,
    tokens: Sequence[Tokens],
    plan: TrainingPlan,
    *,
    rate: float,
    keeper: Keeper | None = None,
    save_every: int = 100,
    pad_id: int = 0,
    report: Callable[[UpdateReport], None] = lambda step: None,
) -> tuple[Any, list[float]]:
    """(``trained`` after all updates, losses), of texts without labels: see ``fit_batches``. Texts that fill up a batch
    have length 0, so that no token of theirs counts."""
    lengths = [len(own.ids) for own in tokens]
    plan = settled(plan, len(lengths))
    chosen_at = orders(lengths, plan)

    def batch_at(epoch: int, at: int) -> TextRows:
        chosen = chosen_at(epoch, at)
        filled = [tokens[row] for row in filled_up(chosen, plan.batch)]
        rows = rectangle(filled, padded_length(max(len(own.ids) for own in filled)), pad_id)
        return rows._replace(lengths=jnp.where(np.arange(plan.batch) < len(chosen), rows.lengths, 0))

    return fit_batches(
        objective,
        frozen,
        trained,
        batch_at,
        plan.per_epoch(len(lengths)),
        plan,
        rate=rate,
        keeper=keeper,
        save_every=save_every,
        report=report,
    )


def pretrain(
    encoder: SplitEncoder,
    base: Params,
    tokens: Sequence[Tokens],
    layers: Sequence[int],
    vocabulary: Vocabulary,
    plan: TrainingPlan,
    *,
    keeper: Keeper | None = None,
    save_every: int = 100,
    pad_id: int = 0,
    report: Callable[[UpdateReport], None] = lambda step: None,
) -> tuple[Params, list[float]]:
    """(the backbone with ``layers`` trained further, losses). Embeddings and the other layers stay as they are.

    A killed run resumes from ``keeper``'s progress, with the same result.

    Raises ``InvalidInput`` for layers that do not exist.
    """
    _check(layers, encoder.config)
    if encoder.config.embedding_size:
        raise InvalidInput("further pretraining takes embeddings of the layers' width; this backbone projects them")
    if encoder.config.looks_up:
        raise InvalidInput("this backbone's lower layers are tables: make a domain of the texts instead")
    base = jax.tree.map(jnp.asarray, base)
    start = {
        "own": {str(layer): base["layers"][layer] for layer in layers},
        "head": {"bias": jnp.zeros(encoder.config.vocab_size)},
    }

    def objective(base: Params, own: Any, rows: TextRows, key: PRNGKeyArray) -> Float[Array, ""]:
        guesses = hide(rows, vocabulary, key)
        params = {**base, "layers": {**base["layers"], **{int(at): leaves for at, leaves in own["own"].items()}}}
        hidden = hidden_states(encoder, params, guesses.rows, plan.dtype)
        return guess_loss(hidden, own["head"]["bias"], base["word"], guesses.targets)

    trained, losses = fit_texts(
        objective,
        base,
        start,
        tokens,
        plan,
        rate=RATE,
        keeper=keeper,
        save_every=save_every,
        pad_id=pad_id,
        report=report,
    )
    own = {int(layer): leaves for layer, leaves in trained["own"].items()}
    return {**base, "layers": {**base["layers"], **own}}, losses


def _check(layers: Sequence[int], config: BackboneConfig) -> None:
    if not layers or not all(0 <= layer < config.layers for layer in layers):
        raise InvalidInput(f"layers must be some of 0 to {config.layers - 1}, found {list(layers)}")
