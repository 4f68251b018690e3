"""Training of small tasks over a frozen backbone, by gradients through the functions that serve them.

What is trained is any tree of f32 arrays; a ``Variation`` says what it means: the backbone's parameters and the deltas
that one forward pass runs with. ``jpets.model.forward`` then takes both, exactly as the engine's executables do.
Weights are cast to bf16 inside the loss; gradients of them and the optimiser stay in f32 (mixed precision,
Micikevicius et al. 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from jaxtyping import Array, Float, Int
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jpets.config import BackboneConfig
from jpets.deltas import HEAD, METHODS
from jpets.deltas.sites import BoundClass
from jpets.deltas.view import HeadView, RowView
from jpets.model.batch import POOLINGS, PackedBatch, Rows
from jpets.model.encoder import Params, SplitEncoder, cast_params
from jpets.model.forward import forward
from jpets.tokenizing import TextEncoder
from jpets.types import Delta, Head, Pooling, Preprocessing, Query
from pallas_kernels.packed_attention import AttentionGroup

Tree = TypeVar("Tree")
HeadTensors = dict[str, Array]
Variation = Callable[[Any], tuple[Params, Sequence[Delta]]]
POOLING: Pooling = "mean"
WARM_UP = 0.1
"""Share of the steps in which the learning rate rises."""
FROZEN_EPOCHS, FROZEN_RATE = 8, 1e-2
"""More epochs overfit: of 5 to 100, the fewest did best on held-out texts."""


class Examples(NamedTuple):
    """Rows of one length: ``ids`` [n, L] padded, ``lengths`` [n], ``labels`` [n] as class numbers."""

    ids: Int[Array, "n l"]
    lengths: Int[Array, " n"]
    labels: Int[Array, " n"]


@dataclass(frozen=True)
class Plan:
    """How long and how fast to train. ``head_rate`` is the head's own learning rate."""

    epochs: int
    rate: float
    batch: int
    seed: int
    head_rate: float = 1e-3


def tokenize(texts: Sequence[str], labels: Sequence[int], encoder: TextEncoder, rule: Preprocessing) -> Examples:
    """Texts to the token ids that the served task will see, padded to ``rule.max_length``."""
    assert rule.max_length is not None
    ids = np.full((len(texts), rule.max_length), encoder.pad_id, np.int32)
    lengths = np.zeros(len(texts), np.int32)
    for row, text in enumerate(texts):
        tokens = encoder.encode(Query(task=None, text=text), rule).ids
        ids[row, : len(tokens)], lengths[row] = tokens, len(tokens)
    return Examples(jnp.asarray(ids), jnp.asarray(lengths), jnp.asarray(np.asarray(labels, np.int32)))


def rectangle(ids: Int[Array, "n l"], lengths: Int[Array, " n"]) -> PackedBatch:
    """A rectangular bucket of mean-pooled rows."""
    n, length = ids.shape
    rows = Rows(jnp.arange(n) * length, jnp.full(n, POOLINGS.index(POOLING)))
    positions = jnp.tile(jnp.arange(length), n)
    return PackedBatch(
        ids.reshape(-1), positions, jnp.zeros_like(positions), (AttentionGroup(None, lengths),), None, None, rows
    )


def bind(
    config: BackboneConfig,
    params: Params,
    deltas: Sequence[Delta],
    head: HeadTensors,
    rows: int,
    length: int,
    dtype: str,
) -> tuple[Params, list[BoundClass]]:
    """Parameters and classes for ``rows`` rows that all belong to one task.

    Deltas that act beside the weights (adapter, LoRA) and the head get banks of two slots: the no-op and the task.
    The others are folded into the weights by their ``merge``.
    """
    slots = jnp.ones(rows, jnp.int32)
    bound = []
    for delta in deltas:
        method = METHODS[delta.method]
        if method.kind == "light":
            for part in method.lower(delta, config):
                bank = {name: _with_no_op(jnp.asarray(array), dtype) for name, array in part.arrays.items()}
                bound.append(BoundClass(part.key, bank, RowView(jnp.int32(0), slots, length), method))
        else:
            params = method.merge(delta, config, params)
    shapes = {name: np.zeros(array.shape, np.float32) for name, array in head.items()}
    own = HEAD.contribution(Head("sequence-classification", shapes))
    assert own is not None
    bank = {name: _with_no_op(array[None], "float32") for name, array in head.items()}
    bound.append(BoundClass(own.key, bank, HeadView(jnp.arange(rows), slots), HEAD))
    return cast_params(params, dtype), bound


def _with_no_op(array: Array, dtype: str) -> Array:
    return jnp.stack([jnp.zeros_like(array), array]).astype(dtype)


def run(
    encoder: SplitEncoder, params: Params, deltas: Sequence[Delta], head: HeadTensors, rows: Examples, dtype: str
) -> tuple[Float[Array, "n d"], Float[Array, "n c"]]:
    """Pooled vectors and logits of one batch, f32."""
    count, length = rows.ids.shape
    params, bound = bind(encoder.config, params, deltas, head, count, length, dtype)
    outputs = forward(encoder, params, rectangle(rows.ids, rows.lengths), bound)
    return outputs.pooled, outputs.logits[0][:, 0]


def in_batches(
    encoder: SplitEncoder,
    params: Params,
    deltas: Sequence[Delta],
    head: HeadTensors,
    rows: Examples,
    batch: int,
    dtype: str = "bfloat16",
) -> tuple[Float[Array, "n d"], Float[Array, "n c"]]:
    """``run`` over any number of rows."""
    one = jax.jit(lambda p, h, part: run(encoder, p, deltas, h, part, dtype))
    count = rows.ids.shape[0]
    padded = jnp.minimum(jnp.arange(-(-count // batch) * batch), count - 1).reshape(-1, batch)
    parts = [one(params, head, jax.tree.map(lambda array, at=at: array[at], rows)) for at in padded]
    pooled, logits = (jnp.concatenate(column)[:count] for column in zip(*parts, strict=True))
    return pooled, logits


def accuracy(logits: Float[Array, "n c"], labels: Int[Array, " n"]) -> float:
    """Share of rows whose best class is their label, to four digits."""
    return round(float((logits.argmax(-1) == labels).mean()), 4)


def cross_entropy(logits: Float[Array, "n c"], labels: Int[Array, " n"]) -> Float[Array, ""]:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def fit(
    name: str, encoder: SplitEncoder, variation: Variation, start: Tree, head: HeadTensors, rows: Examples, plan: Plan
) -> tuple[Tree, HeadTensors]:
    """Trains ``start`` and a head on ``rows`` by AdamW (Loshchilov and Hutter 2019) and cosine decay with warm-up.

    The head starts where the frozen backbone's ended, so that its random start does not distort what lies below it
    (Kumar et al. 2022, LP-FT).
    """
    steps = plan.epochs * (rows.ids.shape[0] // plan.batch)
    optimiser = optax.multi_transform(
        {"own": _adamw(plan.rate, steps), "head": _adamw(plan.head_rate, steps)}, {"own": "own", "head": "head"}
    )

    def loss(trained: dict[str, Any], part: Examples) -> Float[Array, ""]:
        params, deltas = variation(trained["own"])
        return cross_entropy(run(encoder, params, deltas, trained["head"], part, "bfloat16")[1], part.labels)

    @jax.jit
    def step(trained: dict[str, Any], state: optax.OptState, part: Examples) -> tuple[Any, Any, Float[Array, ""]]:
        value, slopes = jax.value_and_grad(loss)(trained, part)
        updates, state = optimiser.update(slopes, state, trained)
        return optax.apply_updates(trained, updates), state, value

    trained: dict[str, Any] = {"own": start, "head": head}
    state = optimiser.init(trained)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}")) as progress:
        bar = progress.add_task(name, total=steps, loss=float("nan"))
        for part in _shuffled(rows, plan):
            trained, state, value = step(trained, state, part)
            progress.update(bar, advance=1, loss=float(value))
    return trained["own"], trained["head"]


def fit_frozen_head(pooled: Float[Array, "n d"], labels: Int[Array, " n"], classes: int, plan: Plan) -> HeadTensors:
    """A linear head on pooled vectors that stay as they are, (a linear probe)."""
    count = labels.shape[0]
    optimiser = _adamw(FROZEN_RATE, FROZEN_EPOCHS * (count // plan.batch))
    head = {"kernel": jnp.zeros((pooled.shape[1], classes)), "bias": jnp.zeros(classes)}

    def step(carry: tuple[HeadTensors, Any], at: Int[Array, " b"]) -> tuple[tuple[HeadTensors, Any], None]:
        trained, state = carry
        slopes = jax.grad(lambda h: cross_entropy(pooled[at] @ h["kernel"] + h["bias"], labels[at]))(trained)
        updates, state = optimiser.update(slopes, state, trained)
        return (optax.apply_updates(trained, updates), state), None

    order = np.concatenate(list(_orders(count, FROZEN_EPOCHS, plan)))
    (trained, _), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.asarray(order)))((head, optimiser.init(head)))
    return trained


def _adamw(rate: float, steps: int) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(1, round(WARM_UP * steps)), steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))


def _orders(count: int, epochs: int, plan: Plan) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    """For each epoch the rows of its batches, [batches, batch]; what does not fill a batch waits for the next."""
    rng = np.random.default_rng(plan.seed)
    whole = count // plan.batch * plan.batch
    for _ in range(epochs):
        yield rng.permutation(count)[:whole].reshape(-1, plan.batch)


def _shuffled(rows: Examples, plan: Plan) -> Iterator[Examples]:
    for order in _orders(rows.ids.shape[0], plan.epochs, plan):
        for at in order:
            yield jax.tree.map(lambda array, at=at: array[at], rows)
