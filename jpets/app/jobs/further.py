"""A new backbone by further pretraining."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

from checkpoints.backbone import Backbone
from checkpoints.canonical import from_params
from jpets.errors import InvalidBackbone, InvalidInput
from jpets.model.encoder import split
from jpets.tokenizing import TextEncoder
from jpets.training.checkpoints import Checkpoints, claimed
from jpets.training.data import Example
from jpets.training.plan import TrainingPlan
from jpets.training.pretrain import Vocabulary, pretrain
from jpets.training.run import UpdateReport
from jpets.types import Preprocessing, Query

MASKS = ("[MASK]", "<mask>")


def further_pretrained(
    backbone: Backbone,
    name: str,
    examples: Sequence[Example],
    layers: Sequence[int],
    max_length: int,
    plan: TrainingPlan,
    *,
    folder: Path | None = None,
    report: Callable[[UpdateReport], None] = lambda step: None,
) -> tuple[Backbone, list[float]]:
    """(``backbone`` with ``layers`` trained on the texts, called ``name``; losses). ``folder`` keeps checkpoints.

    Raises ``InvalidInput``, also for a run that diverged, ``InvalidBackbone`` for a tokenizer that has no mask.
    """
    config = backbone.config
    encoder = TextEncoder.of(backbone)
    rule = Preprocessing(max_length=min(max_length, config.max_positions), truncation=True)
    tokens = [encoder.encode(Query(None, each.plain), rule) for each in examples]
    with contextlib.ExitStack() as stack:
        stack.enter_context(claimed(folder, backbone.fingerprint, plan, tokens, list(layers)))
        keeper = stack.enter_context(contextlib.closing(Checkpoints(folder))) if folder is not None else None
        params, losses = pretrain(
            split(config),
            dict(backbone.params),
            tokens,
            layers,
            vocabulary_of(backbone.tokenizer_json),
            plan,
            keeper=keeper,
            pad_id=encoder.pad_id,
            report=report,
        )
    trained = jax.tree.leaves([params["layers"][layer] for layer in layers])
    if not all(map(math.isfinite, losses)) or not all(bool(jnp.isfinite(leaf).all()) for leaf in trained):
        raise InvalidInput("losses or weights are not finite: training diverged; try a lower rate")
    tensors = from_params(params, config)
    return Backbone.of_tensors(name, config, tensors, backbone.tokenizer_json, backbone.embeds), losses


def first_and_last(losses: Sequence[float]) -> tuple[float, float]:
    """Means over the first and the last tenth of the updates."""
    tenth = max(1, len(losses) // 10)
    return sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth


def chosen_layers(given: str | None, count: int) -> list[int]:
    """Numbers by commas; of ``count`` layers by default the lower half, where a model keeps what it knows of a domain
    (HMI section 5.1). Raises ``InvalidInput``."""
    if given is None:
        return list(range(max(1, count // 2)))
    try:
        return sorted({int(each) for each in given.split(",")})
    except ValueError as error:
        raise InvalidInput(f"layers must be numbers by commas, found {given!r}") from error


def vocabulary_of(tokenizer_json: str) -> Vocabulary:
    """Raises ``InvalidBackbone`` for a tokenizer that has no mask."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    special = {at for at, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    mask = next((at for at in map(tokenizer.token_to_id, MASKS) if at is not None), None)
    if mask is None:
        raise InvalidBackbone(f"the tokenizer has none of {list(MASKS)}: its model was not trained to guess tokens")
    return Vocabulary(tokenizer.get_vocab_size(), mask, tuple(sorted(special | {mask})))
