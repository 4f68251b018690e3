"""Batches of rows of similar length, in an order fixed by a seed and an epoch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Integer

from jpets.passage import Passage
from jpets.tokenizing import Tokens
from jpets.training.forward import PackedRows, TextRows
from jpets.training.losses import IGNORED, Labels, Target
from jpets.training.plan import SettledPlan
from jpets.training.tokens import packed, padded_length, rectangle

WINDOW = 32
"""Batches that are sorted by length together: rows of similar length meet, in an order that is still random."""


class Rows(NamedTuple):
    """A data set: each text's tokens, and its target as ``losses.Labels`` takes it; ``tags``: one a token.

    ``seconds``: the second texts of pairs that are embedded one by one.
    """

    tokens: Sequence[Tokens]
    targets: Sequence[Target]
    weights: Float[np.ndarray, " n"]
    tags: bool = False
    seconds: Sequence[Tokens] = ()
    cut: Sequence[Sequence[int]] = ()
    """For tags: the tags of each text's words that have no token, since the text was cut; for answers something where
    that of a text was."""

    @property
    def passages(self) -> list[Passage | None]:
        """Where in each text answers may stand."""
        return [tokens.passage for tokens in self.tokens]

    def texts(self, chosen: Integer[np.ndarray, " n"]) -> list[Tokens]:
        """The texts of some rows; for pairs all first ones, and then all second ones."""
        return [side[at] for side in (self.tokens, self.seconds) if side for at in chosen]

    def take(self, chosen: Sequence[int] | Integer[np.ndarray, " n"]) -> Rows:
        """Some of the rows."""
        picked = [int(at) for at in chosen]
        return self._replace(
            tokens=[self.tokens[at] for at in picked],
            targets=[self.targets[at] for at in picked],
            weights=self.weights[picked],
            seconds=[self.seconds[at] for at in picked] if self.seconds else (),
            cut=[self.cut[at] for at in picked] if self.cut else (),
        )


def each_batch(rows: Rows, plan: SettledPlan, epoch: int, pad_id: int = 0) -> Iterator[tuple[TextRows, Labels]]:
    """One epoch's batches, always the same for a seed and an epoch; rows that fill up the last batch have weight
    zero."""
    for chosen in batch_order([len(own.ids) for own in rows.tokens], plan, epoch):
        yield gather(rows, chosen, plan.batch, pad_id)


def batch_order(lengths: Sequence[int], plan: SettledPlan, epoch: int) -> list[Integer[np.ndarray, " _"]]:
    """Row numbers of each batch: shuffled, sorted by length within windows, and the batches shuffled again."""
    rng = np.random.default_rng([plan.seed, epoch])
    order, sizes = rng.permutation(len(lengths)), np.asarray(lengths)
    found = []
    for start in range(0, len(order), WINDOW * plan.batch):
        window = order[start : start + WINDOW * plan.batch]
        window = window[np.argsort(sizes[window], kind="stable")]
        found += [window[at : at + plan.batch] for at in range(0, len(window), plan.batch)]
    return [found[at] for at in rng.permutation(len(found))]


def orders(lengths: Sequence[int], plan: SettledPlan) -> Callable[[int, int], Integer[np.ndarray, " _"]]:
    """The row numbers of a batch by epoch and place in it, as ``batch_order`` has them; those of one epoch are kept."""
    order = functools.lru_cache(maxsize=1)(functools.partial(batch_order, lengths, plan))
    return lambda epoch, at: order(epoch)[at]


def gather(rows: Rows, chosen: Integer[np.ndarray, " n"], size: int, pad_id: int) -> tuple[TextRows, Labels]:
    """The rows of one batch, padded to ``size`` of them and to a bucket's length.

    For pairs, ``size`` first texts and then as many second ones.
    """
    texts = rows.texts(filled_up(chosen, size))
    length = padded_length(max(len(own.ids) for own in texts))
    return rectangle(texts, length, pad_id), _labels(rows, chosen, size, length)


def gather_packed(
    rows: Rows, chosen: Integer[np.ndarray, " n"], size: int, pad_id: int, tokens: int, longest: int
) -> tuple[PackedRows, Labels]:
    """The rows of one batch, one after the other in ``tokens`` places, each of at most ``longest`` tokens.

    For pairs, ``size`` first texts and then as many second ones.
    """
    return packed(packed_texts(rows, chosen, size), tokens, longest, pad_id), _labels(rows, chosen, size, longest)


def packed_texts(rows: Rows, chosen: Integer[np.ndarray, " n"], size: int) -> list[Tokens]:
    """The texts of ``gather_packed``; rows that only fill up have one token."""
    texts = rows.texts(filled_up(chosen, size))
    return [own if at % size < len(chosen) else Tokens(own.ids[:1], own.types[:1]) for at, own in enumerate(texts)]


def filled_up(chosen: Integer[np.ndarray, " n"], size: int) -> Integer[np.ndarray, " size"]:
    """The rows of a batch of ``size``: the last one is repeated where there are fewer."""
    return np.append(chosen, np.full(size - len(chosen), chosen[-1]))


def _labels(rows: Rows, chosen: Integer[np.ndarray, " n"], size: int, length: int) -> Labels:
    """Targets and weights of ``size`` rows, for ``length`` tokens each if tokens have labels; filling rows have weight
    zero."""
    filled = filled_up(chosen, size)
    weights = rows.weights[filled] * (np.arange(size) < len(chosen))
    targets = [rows.targets[at] for at in filled]
    if rows.tags:
        targets = [np.pad(own, (0, length - len(own)), constant_values=IGNORED) for own in targets]
    return Labels(jnp.asarray(np.stack(targets)), jnp.asarray(weights, jnp.float32))
