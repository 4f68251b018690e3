"""Importing a backbone from a Hugging Face folder: ``config.json``, tensors, ``tokenizer.json``.

Where it is a Sentence-Transformers folder, the backbone embeds texts as that library does (``checkpoints.sentence``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from checkpoints.backbone import Backbone
from checkpoints.canonical import PADDING_POSITION, FloatArray, canonical_shapes
from checkpoints.families import ACTIVATIONS, FAMILIES, encoder_prefix, tensor_names
from checkpoints.finite import check_finite
from checkpoints.listing import listing
from checkpoints.sentence import MODULES, Sentence, lowered, model_folder, read_sentence
from checkpoints.settings import read_json
from checkpoints.tensors import SAFETENSORS, read_tensors
from checkpoints.tokenizer import read_tokenizer
from checkpoints.wrappers import unwrapped
from jpets.config import BackboneConfig
from jpets.errors import InvalidBackbone, InvalidTask
from jpets.types import BY_MEAN

Tensors = Mapping[str, npt.NDArray[Any]]
ADAPTER = "adapter_config.json"
"""Of an adapter, of which ``transformers`` computes a model beside it with."""
MOST_PROBLEMS = 6
"""Problems that are shown of a Sentence-Transformers folder."""
MOST_LAYERS = 1000
"""Their tensors are named before any file is read."""


def read_backbone(folder: Path, name: str | None = None) -> Backbone:
    """A backbone from a Hugging Face folder, with a head or without; the name is the folder's by default.

    Raises ``InvalidBackbone`` with missing or wrongly shaped tensors, and for settings that cannot be computed.
    """
    inner = model_folder(folder)
    if (inner / ADAPTER).is_file():
        raise InvalidBackbone(
            f"expected a model, found one with an adapter, which transformers computes with it ({ADAPTER}); give a "
            "copy of the folder without the adapter, and see jpets task import for that"
        )
    settings = read_settings(inner)
    family = family_of(settings)
    tensors = unwrapped(read_tensors(inner))
    prefix = encoder_prefix(tensors, family)
    pooler = any(f"{prefix}{module}.weight" in tensors for _, module, _ in FAMILIES[family].pooler)
    config = read_config(settings, family, pooler)
    found = convert(tensors, config, prefix, unused_positions(settings, family), finite=True)
    text = read_tokenizer(inner, settings, config)
    config = dataclasses.replace(config, usual_length=text.usual_length)
    sentence = _sentence(folder, config)
    tokenizer_json = lowered(text.text) if sentence.lowercase else text.text
    return Backbone.of_tensors(name or folder.resolve().name, config, found, tokenizer_json, sentence.rule)


def _sentence(folder: Path, config: BackboneConfig) -> Sentence:
    """How the backbone embeds texts by itself. Raises ``InvalidBackbone`` where that cannot be computed."""
    problems: list[str] = []
    try:
        found = read_sentence(folder, config.max_positions, problems)
    except InvalidTask as error:
        raise InvalidBackbone(error.message) from error
    if found is not None and found.dense:
        problems.append(
            f"{MODULES}: expected Transformer, Pooling and maybe Normalize, found Dense, which tasks can have"
        )
    if problems:
        raise InvalidBackbone(
            f"{'; '.join(problems[:MOST_PROBLEMS])}; for tasks alone, or the mean over the tokens, give a copy of the "
            f"folder without {MODULES}"
        )
    return found or Sentence(BY_MEAN)


def read_settings(folder: Path) -> dict[str, Any]:
    """``config.json`` of a folder. Raises ``InvalidBackbone``, also where it names a class of its own for the model, as
    its tensors may have the usual names and be used in another way, or a file of its own for the weights."""
    settings = read_json(folder / "config.json", InvalidBackbone)
    found = settings.get("auto_map")
    own = sorted(name for name in found if str(name).startswith("AutoModel")) if isinstance(found, Mapping) else ()
    if own:
        raise InvalidBackbone(
            f"config.json: auto_map names code of its own for {own[0]}, which is not run; where it is a plain model "
            "of its model_type, remove auto_map"
        )
    if (weights := settings.get("transformers_weights")) not in (None, SAFETENSORS):
        raise InvalidBackbone(
            f"config.json: transformers_weights: expected none, found {str(weights)[:80]!r}; give that file the name "
            f"{SAFETENSORS}, and remove the setting"
        )
    return settings


def family_of(settings: Mapping[str, Any]) -> str:
    """The supported family that ``config.json`` names. Raises ``InvalidBackbone``."""
    family = settings.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise InvalidBackbone(f"config.json: model_type must be one of {sorted(FAMILIES)}, found {family!r}")
    return family


def read_config(settings: Mapping[str, Any], family: str, pooler: bool) -> BackboneConfig:
    """The backbone's shape and constants. Raises ``InvalidBackbone`` naming every setting that cannot be taken."""
    spec = FAMILIES[family]
    errors = []
    for key in spec.sizes.values():
        if type(settings.get(key)) is not int or settings[key] < 1:
            errors.append(f"{key} must be a positive number, found {settings.get(key)!r}")
    layers = settings.get(spec.sizes["layers"])
    if isinstance(layers, int) and layers > MOST_LAYERS:
        errors.append(f"{spec.sizes['layers']} must be at most {MOST_LAYERS}, found {layers}")
    pad = settings.get("pad_token_id", 1)
    if spec.positions_follow_pad and (type(pad) is not int or pad < 0):
        errors.append(f"pad_token_id must be a number, as positions begin behind it, found {pad!r}")
    types = settings.get("type_vocab_size", 2) if spec.token_types else 0
    if type(types) is not int or types < 0:
        errors.append(f"type_vocab_size must be a number, found {types!r}")
    activation = settings.get(spec.activation, "gelu")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        errors.append(f"{spec.activation} must be one of {sorted(ACTIVATIONS)}, found {activation!r}")
    eps = settings.get(spec.norm_eps, 1e-12) if spec.norm_eps else 1e-12
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < 1:
        errors.append(f"{spec.norm_eps} must be a number from 0 to 1, found {eps!r}")
    if settings.get("position_embedding_type") not in (None, "absolute"):
        errors.append(f"position_embedding_type must be 'absolute', found {settings['position_embedding_type']!r}")
    errors += [f"{key} must be false, found true" for key in ("is_decoder", "add_cross_attention") if settings.get(key)]
    sizes: dict[str, Any] = {field: settings.get(key) for field, key in spec.sizes.items()}
    if not errors and sizes["hidden_size"] % sizes["heads"]:
        errors.append(f"{spec.sizes['hidden_size']} must be a multiple of {spec.sizes['heads']}")
    if not errors and (unused := unused_positions(settings, family)):
        sizes["max_positions"] -= unused
        if sizes["max_positions"] < 1:
            errors.append(f"{spec.sizes['max_positions']} must be more than {unused}, as positions begin there")
    if errors:
        raise InvalidBackbone("config.json: " + "; ".join(errors))
    if sizes.get("embedding_size") == sizes["hidden_size"]:
        sizes["embedding_size"] = 0  # such checkpoints have no projection
    return BackboneConfig(
        family=family,
        **sizes,
        type_vocab_size=types,
        activation=ACTIVATIONS[activation],
        norm_eps=float(eps),
        padding_id=pad if spec.positions_follow_pad else 1,
        pooler=pooler,
    )


def unused_positions(settings: Mapping[str, Any], family: str) -> int:
    """Rows of the checkpoint's position table before the one of a text's first token."""
    return settings.get("pad_token_id", 1) + 1 if FAMILIES[family].positions_follow_pad else 0


def convert(
    tensors: Tensors, config: BackboneConfig, prefix: str = "", unused: int = 0, *, finite: bool = False
) -> dict[str, FloatArray]:
    """Canonical name -> f32 array, positions from row ``unused`` of their table on.

    Raises ``InvalidBackbone`` naming missing and wrongly shaped tensors and, where they are to be ``finite``, those
    that are not: of each kind the first, and how many there are.
    """
    shapes = canonical_shapes(config)
    found: dict[str, FloatArray] = {}
    names: dict[str, str] = {}
    errors = []
    for name, candidates, transposed in tensor_names(config):
        if name not in shapes:
            continue
        rows, skipped = shapes[name][0], unused if name == "position" else 0
        expected = shapes[name][::-1] if transposed else (rows + skipped, *shapes[name][1:])
        key = next((prefix + each for each in candidates if prefix + each in tensors), None)
        if key is None:
            errors.append(f"{prefix}{candidates[0]}: expected {list(expected)}, found nothing")
        elif tensors[key].shape != expected:
            errors.append(f"{key}: expected {list(expected)}, found {list(tensors[key].shape)}")
        elif tensors[key].dtype.name not in ("float32", "float16", "bfloat16", "float64"):
            errors.append(f"{key}: expected floating-point numbers, found {tensors[key].dtype.name}")
        else:
            array = np.asarray(tensors[key], np.float32)[skipped:]
            found[name], names[name] = array.T if transposed else array, key
            if name == "position" and config.skips_padding:
                found[PADDING_POSITION] = np.asarray(tensors[key][skipped - 1], np.float32)
                names[PADDING_POSITION] = f"{key}[{skipped - 1}]"
    if errors and not found:
        others = ", ".join(repr(name[:80]) for name in sorted(tensors)[:3])
        raise InvalidBackbone(
            f"expected a {config.family} model's tensors, such as {prefix}{next(tensor_names(config))[1][0]}, found "
            f"{len(tensors)} with other names or shapes: {others} ...; save the model itself, without what wraps it"
        )
    if errors:
        raise InvalidBackbone(f"the checkpoint does not fit its config.json: {listing(errors)}")
    if finite:
        check_finite({names.get(place, place): array for place, array in found.items()})
    return found
