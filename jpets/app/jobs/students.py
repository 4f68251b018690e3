"""Shallow backbones and groups of students from files: the stages around ``jpets.students``."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from checkpoints.backbone import Backbone
from checkpoints.canonical import from_params
from jpets.errors import InvalidInput
from jpets.students.depth import distilled, shallow_config
from jpets.tokenizing import TextEncoder
from jpets.training.checkpoints import Checkpoints, claimed
from jpets.training.data import Example
from jpets.training.plan import TrainingPlan
from jpets.training.run import UpdateReport
from jpets.types import Preprocessing, Query


def shallow_backbone(
    backbone: Backbone,
    name: str,
    examples: Sequence[Example],
    layers: int,
    max_length: int,
    plan: TrainingPlan,
    *,
    folder: Path | None = None,
    report: Callable[[UpdateReport], None] = lambda step: None,
) -> tuple[Backbone, list[float]]:
    """(a backbone of ``layers`` layers that learnt the hidden states of ``backbone`` on these texts, losses).

    ``folder`` keeps checkpoints. Raises ``InvalidInput``, also for a run that diverged.
    """
    config = backbone.config
    shallow = shallow_config(config, layers)
    encoder = TextEncoder.of(backbone)
    rule = Preprocessing(max_length=min(max_length, config.max_positions), truncation=True)
    tokens = [encoder.encode(Query(None, each.plain), rule) for each in examples]
    with contextlib.ExitStack() as stack:
        stack.enter_context(claimed(folder, backbone.fingerprint, plan, tokens, layers))
        keeper = stack.enter_context(contextlib.closing(Checkpoints(folder))) if folder is not None else None
        params, losses = distilled(
            config,
            dict(backbone.params),
            layers,
            tokens,
            plan,
            keeper=keeper,
            pad_id=encoder.pad_id,
            report=report,
        )
    if not all(map(math.isfinite, losses)):
        raise InvalidInput("losses are not finite: training diverged; try a lower rate")
    tensors = from_params(params, shallow)
    return Backbone.of_tensors(name, shallow, tensors, backbone.tokenizer_json, backbone.embeds), losses
