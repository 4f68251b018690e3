"""PEFT methods that act at linear modules: LoRA and IA3."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from checkpoints.backbone import Backbone
from checkpoints.canonical import FloatArray, from_params, place_name
from checkpoints.imports.heads import LAYOUTS
from checkpoints.imports.patterns import Patterns, is_pattern
from checkpoints.imports.places import ModulePlace, model_prefix, module_places
from checkpoints.imports.unread import Unread
from checkpoints.settings import MOST, expect, expect_count, expect_list, expect_number, is_number
from jpets.deltas.ia3 import INPUTS, ia3_delta
from jpets.deltas.lora import lora_delta
from jpets.deltas.protocol import site_layers
from jpets.types import Delta

ALL_LINEAR = "all-linear"
BIASES = ("none", "all", "lora_only")
PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the base weights alone; others (pissa, olora, loftq, corda ...) train
against changed ones."""
LAYER_NUMBER = re.compile(r"\.(\d+)\.")


class Target(NamedTuple):
    """A linear module of the backbone: its name in the model that was tuned, and its place."""

    name: str
    place: ModulePlace


def lora_deltas(settings: Mapping[str, Any], tensors: Unread, backbone: Backbone) -> list[Delta]:
    """LoRA (Hu et al. 2021) with per-module ranks and scales, and the biases that were trained with it."""
    config, problems = backbone.config, tensors.problems.options
    start = settings.get("init_lora_weights", True)
    if start not in PLAIN_INITS:
        problems.append(
            f"init_lora_weights: {start!r} is not supported, it changes the base weights; convert the adapter to plain "
            "LoRA when it is saved (path_initial_model_for_weight_conversion)"
        )
    rank, alpha = expect_count(settings, "r", 8, problems), expect_number(settings, "lora_alpha", 8, problems)
    ranks = _pattern(
        settings, "rank_pattern", "a whole number from 1 on", lambda x: isinstance(x, int) and 0 < x <= MOST, problems
    )
    alphas = _pattern(settings, "alpha_pattern", "a number", is_number, problems)
    stabilised = expect(settings, "use_rslora", bool, False, problems)
    matrices: dict[str, dict[int, tuple[FloatArray, FloatArray]]] = {}
    scales: dict[tuple[str, int], float] = {}
    patterns = Patterns()
    for name, place in _targets(settings, tensors, backbone, ".lora_A.weight", patterns):
        inputs, outputs = config.dims(place.site)
        own = _pattern_value(ranks, name, rank, patterns)
        a = tensors.take(f"{name}.lora_A.weight", (own, inputs))
        b = tensors.take(f"{name}.lora_B.weight", (outputs, own))
        matrices.setdefault(place.site, {})[place.layer] = (a.T, b.T)
        scales[place.site, place.layer] = _pattern_value(alphas, name, alpha, patterns)
    if not matrices:
        tensors.problems.tensors.append("expected lora_A and lora_B of the backbone's linear modules, found none")
    biases = _biases(settings, tensors, backbone)
    if tensors.problems:  # what is missing may be of any size
        return []
    lora = lora_delta(matrices, alpha=scales, rank_stabilised=stabilised)
    return [lora, *biases]


def ia3_deltas(settings: Mapping[str, Any], tensors: Unread, backbone: Backbone) -> list[Delta]:
    """IA3 (Liu et al. 2022): factors on a module's output with its bias, or on the input of a feed-forward module."""
    config, problems = backbone.config, tensors.problems.options
    into = {site: name for name, site in INPUTS.items()}
    inner = _module_names(settings, "feedforward_modules", problems)
    factors: dict[str, dict[int, FloatArray]] = {}
    patterns = Patterns()
    for name, place in _targets(settings, tensors, backbone, ".ia3_l", patterns):
        inputs, outputs = config.dims(place.site)
        if not _is_feedforward(inner, name, patterns):
            factors.setdefault(place.site, {})[place.layer] = tensors.take(f"{name}.ia3_l", (outputs, 1))[:, 0]
        elif place.site in into:
            factors.setdefault(into[place.site], {})[place.layer] = tensors.take(f"{name}.ia3_l", (1, inputs))[0]
        else:
            tensors.drop(f"{name}.ia3_l")
            problems.append(
                f"feedforward_modules: scaling the input of {name} is not supported, only of {sorted(into)}"
            )
    if "pooler" in factors:
        problems.append("target_modules: IA3 at the pooler is not supported")
        del factors["pooler"]
    if not factors:
        tensors.problems.tensors.append("expected ia3_l of the backbone's linear modules, found none")
        return []
    return [ia3_delta(factors)]


def _targets(
    settings: Mapping[str, Any], tensors: Unread, backbone: Backbone, suffix: str, patterns: Patterns
) -> Iterator[Target]:
    """The linear modules that have tensors of ``suffix``, and those that the settings name though their tensors are
    missing.

    Most models with a head have no pooler, whatever the settings name.
    """
    config, problems = backbone.config, tensors.problems.options
    prefix = model_prefix(config, tensors.names)
    wanted, unwanted = (_module_names(settings, name, problems) for name in ("target_modules", "exclude_modules"))
    layers = _layers(settings, problems)
    pools = (settings.get("task_type"), LAYOUTS[config.family]["sequence-classification"].pooling) == (
        "SEQ_CLS",
        "pooler",
    )
    for module, place in module_places(config).items():
        name = prefix + module
        there = f"{name}{suffix}" in tensors
        named = (pools or place.site != "pooler") and (
            _matches(wanted, name, patterns) and not _matches(unwanted, name, patterns) and _in_layers(layers, name)
        )
        if place.site in config.linear_sites() and (there or named):
            yield Target(name, place)


def _module_names(settings: Mapping[str, Any], option: str, problems: list[str]) -> str | list[str]:
    """Names of modules, or one pattern of them; none where the option is absent, or, as a problem, of another type."""
    if isinstance(settings.get(option), list):
        return list(expect_list(settings, option, str, [], problems))
    found = expect(settings, option, (list, str), "", problems)
    if not is_pattern(found):
        problems.append(f"{option}: expected names of modules or a pattern of them, found {found[:80]!r}")
    return str(found)


def _layers(settings: Mapping[str, Any], problems: list[str]) -> list[int]:
    """The only layers that are tuned; empty where all of them are."""
    option = "layers_to_transform"
    if isinstance(settings.get(option), list):
        return list(expect_list(settings, option, int, [], problems))
    found = expect(settings, option, (int, list), None, problems)
    return [] if found is None else [found]


def _in_layers(layers: list[int], name: str) -> bool:
    number = LAYER_NUMBER.search(name)
    return not layers or (number is not None and int(number[1]) in layers)


def _matches(wanted: str | list[str], name: str, patterns: Patterns) -> bool:
    """As the library matches names: whole or by their last parts, or by a pattern."""
    if isinstance(wanted, str):
        return wanted == ALL_LINEAR or patterns.matches(wanted, name)
    return any(name == each or name.endswith(f".{each}") for each in wanted)


def _is_feedforward(wanted: str | list[str], name: str, patterns: Patterns) -> bool:
    return patterns.matches(wanted, name) if isinstance(wanted, str) else any(name.endswith(each) for each in wanted)


def _pattern(
    settings: Mapping[str, Any], name: str, wanted: str, is_good: Callable[[float], bool], problems: list[str]
) -> dict[str, Any]:
    """A number for each pattern of module names; an invalid entry is a problem, and left out."""
    found = {}
    for key, value in expect(settings, name, dict, {}, problems).items():
        if not is_number(value) or not is_good(value):
            problems.append(f"{name}[{key!r}]: expected {wanted}, found {json.dumps(value)[:80]}")
        elif not is_pattern(key):
            problems.append(f"{name}[{key!r}]: expected a pattern of module names")
        else:
            found[key] = value
    return found


def _pattern_value(values: Mapping[str, Any], name: str, default: Any, patterns: Patterns) -> Any:
    """The value of the first key that matches the end of a module's name."""
    return next((value for key, value in values.items() if patterns.matches(rf"(.*\.)?({key})", name)), default)


def _biases(settings: Mapping[str, Any], tensors: Unread, backbone: Backbone) -> list[Delta]:
    """The biases that a checkpoint brings: of all modules (``bias`` "all") or of the tuned ones ("lora_only")."""
    mode = settings.get("bias", "none")
    if mode not in BIASES:
        tensors.problems.options.append(f"bias: expected one of {list(BIASES)}, found {json.dumps(mode)[:80]}")
    if mode not in BIASES[1:]:
        return []
    config = backbone.config
    prefix, base = model_prefix(config, tensors.names), from_params(backbone.params, config)
    found: dict[str, dict[int, FloatArray]] = {}
    for module, (layer, site, kind) in module_places(config).items():
        name = f"{prefix}{module}.bias"
        if kind != "embedding" and name in tensors:
            shape = base[f"{place_name(layer, site)}/bias"].shape
            found.setdefault(site, {})[layer] = tensors.take(name, shape)
    if not found:
        tensors.problems.options.append(f"bias: {mode!r} says that biases were trained, found none")
        return []
    layers = tuple(range(config.layers))
    stacked = {
        f"{site}/bias": np.stack(
            [own[at] if at in own else base[f"{place_name(at, site)}/bias"] for at in site_layers(site, layers)]
        )
        for site, own in found.items()
    }
    return [Delta("bitfit", {"sites": list(found)}, stacked)]
