"""Several tasks trained together, each from a file of labelled texts (``together``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from jpets.config import BackboneConfig
from jpets.deltas.recipe import Direct
from jpets.errors import InvalidInput
from jpets.model.encoder import split
from jpets.tokenizing import TextEncoder
from jpets.training.data import Example
from jpets.training.linear import FrozenFeatures
from jpets.training.methods import direct_recipe, lead_of, together_names
from jpets.training.plan import Training, settled
from jpets.training.predict import Predictor
from jpets.training.prepared import Prepared, domain_of, prepare
from jpets.training.run import UpdateReport, check_batches
from jpets.training.session import Result, concluded
from jpets.training.together import Member, head_kind, train_together
from jpets.training.tokens import text_encoder
from jpets.types import LoadedBackbone


def train_many(
    backbone: LoadedBackbone,
    training: Training,
    examples: Mapping[str, Sequence[Example]],
    *,
    report: Callable[[UpdateReport], None] = lambda step: None,
) -> dict[str, Result]:
    """A task of each name, as ``session.run_training`` would make it from its texts; tasks with labels of one kind
    share a program.

    A task that diverged has a held-out loss that is not finite. Raises ``InvalidInput`` naming the task.
    """
    check_method(training.method)
    training = dataclasses.replace(training, domain=domain_of(training, backbone))
    config, base = backbone.config, dict(backbone.params)
    recipe = direct_recipe(training.method, training.settings, config, base, training.plan.seed)
    text = text_encoder(backbone, lead_of(training.method, training.settings))
    made = {name: _prepared(name, config, text, training, own) for name, own in examples.items()}
    kinds: dict[object, list[str]] = {}
    for name, own in made.items():
        batch = settled(training.plan, len(own.rows.tokens)).batch
        kinds.setdefault((batch, head_kind(own.head, own.rows)), []).append(name)
    found: dict[str, Result] = {}
    for names in kinds.values():
        found |= _train_alike(backbone, text, training, recipe, {name: made[name] for name in names}, report)
    return {name: found[name] for name in examples}


def check_method(method: str) -> None:
    """Raises ``InvalidInput`` for a method that cannot train tasks together."""
    if method not in (names := together_names()):
        raise InvalidInput(f"several tasks at once are trained by one of {list(names)}, found {method}")


def _prepared(
    name: str, config: BackboneConfig, text: TextEncoder, training: Training, examples: Sequence[Example]
) -> Prepared:
    try:
        made = prepare(config, text, training, examples)
        plan = settled(training.plan, len(made.rows.tokens))
        check_batches(plan.epochs * plan.per_epoch(len(made.rows.tokens)), plan)
        return made
    except InvalidInput as error:
        raise InvalidInput(f"{name}: {error.message}") from error


def _train_alike(
    backbone: LoadedBackbone,
    text: TextEncoder,
    training: Training,
    recipe: Direct,
    made: Mapping[str, Prepared],
    report: Callable[[UpdateReport], None],
) -> dict[str, Result]:
    encoder, base = split(backbone.config), dict(backbone.params)
    features = FrozenFeatures(encoder, text, base, next(iter(made.values())).head)
    members = [Member(recipe, own.head, own.rows, own.judged) for own in made.values()]
    outcomes = train_together(encoder, base, members, training.plan, pad_id=text.pad_id, report=report)
    predictor = Predictor(encoder, text, outcomes[0].head, outcomes[0].deltas)
    return {
        name: concluded(
            name, backbone, own, outcome, predictor, base, features, settled(training.plan, len(own.rows.tokens))
        )
        for (name, own), outcome in zip(made.items(), outcomes, strict=True)
    }
