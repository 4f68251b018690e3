"""Where a checkpoint's modules lie in a backbone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from checkpoints.families import FAMILIES, ModuleKind, encoder_prefix
from jpets.config import BackboneConfig


class ModulePlace(NamedTuple):
    """``layer`` is 0 outside the layers."""

    layer: int
    site: str
    kind: ModuleKind


def module_places(config: BackboneConfig) -> Mapping[str, ModulePlace]:
    """Module path in a Hugging Face model, without the model's own prefix -> place in the backbone."""
    family = FAMILIES[config.family]
    found = {}
    for place, module, kind in (*family.modules, *(family.pooler if config.pooler else ())):
        for layer in range(config.layers) if "{i}" in place else (0,):
            found[module.format(i=layer)] = ModulePlace(layer, place.rpartition("/")[2], kind)
    return found


def model_prefix(config: BackboneConfig, names: Iterable[str]) -> str:
    """What a model with a head puts before its encoder's modules; nothing where the encoder itself was tuned."""
    return encoder_prefix(names, config.family)
