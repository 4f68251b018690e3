"""AdapterHub's methods: bottleneck adapters, LoRA and IA3 (one architecture there), prefix tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints.backbone import Backbone
from checkpoints.canonical import FloatArray
from checkpoints.imports.places import model_prefix, module_places
from checkpoints.imports.unread import Unread
from checkpoints.settings import expect, expect_count, expect_list, expect_number, is_number
from jpets.config import ADAPTER_SITES, BackboneConfig
from jpets.deltas.ia3 import ia3_delta
from jpets.deltas.lora import lora_delta
from jpets.types import Delta
from pallas_kernels.numerics import ACTIVATIONS

Parts = dict[str, FloatArray]
POOL = ".prefix_tuning.pool."
MODULES = {
    "after_attn_out": ("encoder.layer.{i}.attention.output", "transformer.layer.{i}.attention_adapters"),
    "after_ffn_out": ("encoder.layer.{i}.output", "transformer.layer.{i}.output_adapters"),
}
"""Site -> modules that hold its adapters: in BERT and its like, in DistilBERT."""
SWITCHES = {"after_attn_out": "mh_adapter", "after_ffn_out": "output_adapter"}
"""Site -> option that says whether it has adapters."""
BEHIND_NORM = "original_ln_before"
LORA_SWITCHES = {"selfattn_lora": True, "intermediate_lora": False, "output_lora": False}
"""Options that say where low-rank matrices are, and their defaults."""
ATTENTION = {"q": "query", "k": "key", "v": "value"}


def adapter_deltas(settings: Mapping[str, Any], name: str, tensors: Unread, backbone: Backbone) -> list[Delta]:
    """Bottleneck adapters: ``double_seq_bn`` (Houlsby), ``seq_bn`` (Pfeiffer), ``par_bn`` (He et al. 2021).

    A scaling, fixed or learned, is folded into the up projection. Layers may differ in size.
    """
    config, problems = backbone.config, tensors.problems.options
    prefix, reads = model_prefix(config, tensors.names), _input(settings, problems)
    activation = str(settings.get("non_linearity", "relu")).lower()
    if activation not in ACTIVATIONS:
        problems.append(f"non_linearity: expected one of {sorted(ACTIVATIONS)}, found {activation[:80]!r}")
    scaling, covered = settings.get("scaling", 1.0), _layers(settings, config, problems)
    found: dict[str, dict[int, Parts]] = {}
    for site in ADAPTER_SITES:
        if not expect(settings, SWITCHES[site], bool, False, problems):
            continue
        module = MODULES[site][config.family == "distilbert"]
        for layer in covered:
            place = f"{prefix}{module.format(i=layer)}.adapters.{name}"
            found.setdefault(site, {})[layer] = _bottleneck(tensors, place, config.hidden_size, scaling)
    if not found:
        problems.append(
            f"expected adapters in some layers of the backbone, found {', '.join(SWITCHES.values())} all off"
        )
    if tensors.problems:
        return []
    layers = sorted({layer for own in found.values() for layer in own})
    size = max(parts["down"].shape[1] for own in found.values() for parts in own.values())
    none: Parts = {"down": np.zeros((config.hidden_size, 0), np.float32), "down_bias": np.zeros(0, np.float32)}
    empty = _padded(none, size, config.hidden_size)
    stacked = {
        f"{site}/{part}": np.stack(
            [_padded(own[layer], size, config.hidden_size)[part] if layer in own else empty[part] for layer in layers]
        )
        for site, own in found.items()
        for part in empty
    }
    return [
        Delta(
            "adapter",
            {"sites": list(found), "layers": layers, "bottleneck": size, "activation": activation, "input": reads},
            stacked,
        )
    ]


def _layers(settings: Mapping[str, Any], config: BackboneConfig, problems: list[str]) -> list[int]:
    """The layers that are not left out."""
    left_out = expect_list(settings, "leave_out", int, [], problems)
    return [layer for layer in range(config.layers) if layer not in left_out]


def _input(settings: Mapping[str, Any], problems: list[str]) -> str:
    """What the down projection reads; only placements that add to the sub-layer's output, before its norm."""
    if settings.get("original_ln_after", True) is not True:
        problems.append(f"original_ln_after: expected true, found {settings['original_ln_after']!r}")
    parallel, behind_norm = (expect(settings, name, bool, False, problems) for name in ("is_parallel", BEHIND_NORM))
    if parallel:
        return "residual"
    if not behind_norm:
        return "output"
    if settings.get("residual_before_ln", True) is not True:
        problems.append(f"residual_before_ln: expected true, found {settings['residual_before_ln']!r}")
    return "normed"


def _bottleneck(tensors: Unread, place: str, width: int, scaling: Any) -> Parts:
    down = tensors.take(f"{place}.adapter_down.0.weight", (None, width)).T
    size = down.shape[1] or None  # any size where the tensor is missing
    down_bias = tensors.take(f"{place}.adapter_down.0.bias", (size,))
    up = tensors.take(f"{place}.adapter_up.weight", (width, size)).T
    up_bias = tensors.take(f"{place}.adapter_up.bias", (width,))
    factor: Any = 1.0
    if scaling in ("learned", "channel"):
        factor = tensors.take(f"{place}.scaling", (1,) if scaling == "learned" else (width,))
    elif is_number(scaling):
        factor = np.float32(scaling)
    else:
        tensors.problems.options.append(f"scaling: expected a number, learned or channel, found {scaling!r}")
    return {"down": down, "down_bias": down_bias, "up": up * factor, "up_bias": up_bias * factor}


def _padded(parts: Parts, size: int, width: int) -> Parts:
    """``parts`` with a bottleneck of ``size``: what is added gives zeros, whatever the activation."""
    missing = size - parts["down"].shape[1]
    up, up_bias = parts.get("up", np.zeros((0, width))), parts.get("up_bias", np.zeros(width))
    return {
        "down": np.pad(parts["down"], ((0, 0), (0, missing))).astype(np.float32),
        "down_bias": np.pad(parts["down_bias"], (0, missing)).astype(np.float32),
        "up": np.pad(up, ((0, missing), (0, 0))).astype(np.float32),
        "up_bias": up_bias.astype(np.float32),
    }


def low_rank_deltas(settings: Mapping[str, Any], name: str, tensors: Unread, backbone: Backbone) -> list[Delta]:
    """LoRA (``composition_mode`` "add") or IA3 ("scale": factors on a module's output with its bias)."""
    config, problems = backbone.config, tensors.problems.options
    mode = settings.get("composition_mode", "add")
    if mode not in ("add", "scale"):
        problems.append(f"composition_mode: expected add or scale, found {mode!r}")
    rank, alpha = expect_count(settings, "r", 8, problems), expect_number(settings, "alpha", 8, problems)
    sites, layers = _lora_sites(settings, problems), _layers(settings, config, problems)
    prefix = model_prefix(config, tensors.names)
    matrices: dict[str, dict[int, tuple[FloatArray, FloatArray]]] = {}
    factors: dict[str, dict[int, FloatArray]] = {}
    for module, (layer, site, _) in module_places(config).items():
        place = f"{prefix}{module}.loras.{name}"
        if site not in sites or layer not in layers:
            continue
        inputs, outputs = config.dims(site)
        if mode == "scale":
            factors.setdefault(site, {})[layer] = tensors.take(f"{place}.lora_B", (outputs, 1))[:, 0] * np.float32(
                alpha
            )
        else:
            a, b = tensors.take(f"{place}.lora_A", (rank, inputs)), tensors.take(f"{place}.lora_B", (outputs, rank))
            matrices.setdefault(site, {})[layer] = (a.T, b.T)
    if not matrices and not factors:
        problems.append(f"expected lora_B in some layers of the backbone, found {', '.join(LORA_SWITCHES)} all off")
    if tensors.problems:  # what is missing may be of any size
        return []
    return [lora_delta(matrices, alpha=alpha) if matrices else ia3_delta(factors)]


def _lora_sites(settings: Mapping[str, Any], problems: list[str]) -> set[str]:
    """The linear sites that the options say have matrices."""
    attention, middle, output = (expect(settings, name, bool, off, problems) for name, off in LORA_SWITCHES.items())
    letters = expect(settings, "attn_matrices", list, ["q", "v"], problems)
    if not all(isinstance(each, str) and each in ATTENTION for each in letters):
        problems.append(f"attn_matrices: expected some of {list(ATTENTION)}, found {str(letters)[:80]}")
        letters = []
    found = {ATTENTION[each] for each in letters} if attention else set()
    return found | ({"ffn_in"} if middle else set()) | ({"ffn_out"} if output else set())


def prefix_deltas(settings: Mapping[str, Any], name: str, tensors: Unread, backbone: Backbone) -> list[Delta]:
    """Prefix tuning: ``flat`` or behind its two-layer network, run here once. The text's positions begin at 0."""
    config, problems = backbone.config, tensors.problems.options
    layers = _layers(settings, config, problems)
    tokens = expect_count(settings, "prefix_length", 30, problems)
    if not layers:
        problems.append("leave_out: expected some layers to have a prefix, found all of them left out")
    width = len(layers) * 2 * config.hidden_size
    for each in tensors.names:
        if POOL in each:  # the layers' own names for what the model holds
            tensors.drop(each)
    start = f"{model_prefix(config, tensors.names)}prefix_tuning.prefix_tunings.{name}."
    groups = {each.removeprefix(start).partition(".")[0] for each in tensors.names if each.startswith(start)}
    if len(groups) != 1:
        problems.append(f"expected one prefix named {name[:80]!r}, found {len(groups)}")
        return []
    place = f"{start}{groups.pop()}"
    if expect(settings, "flat", bool, False, problems):
        rows = tensors.take(f"{place}.control_trans", (tokens * width,))
    else:
        rows = _control(settings, tensors, place, tokens, width, config.hidden_size)
    if tensors.problems:
        return []
    keys, values = rows.reshape(tokens, len(layers), 2, config.hidden_size).transpose(2, 1, 0, 3)
    return [Delta("prefix", {"tokens": tokens, "layers": layers}, {"attn_kv/key": keys, "attn_kv/value": values})]


def _control(
    settings: Mapping[str, Any], tensors: Unread, place: str, tokens: int, width: int, hidden: int
) -> FloatArray:
    middle = expect_count(settings, "bottleneck_size", 512, tensors.problems.options)
    x = tensors.take(f"{place}.wte.weight", (tokens, hidden))
    first, first_bias = (
        tensors.take(f"{place}.control_trans.0.weight", (middle, hidden)),
        tensors.take(f"{place}.control_trans.0.bias", (middle,)),
    )
    last, last_bias = (
        tensors.take(f"{place}.control_trans.2.weight", (width, middle)),
        tensors.take(f"{place}.control_trans.2.bias", (width,)),
    )
    activation = str(settings.get("non_linearity", "tanh")).lower()
    if activation not in ACTIVATIONS:
        tensors.problems.options.append(
            f"non_linearity: expected one of {sorted(ACTIVATIONS)}, found {activation[:80]!r}"
        )
    if tensors.problems:
        return x
    inner = np.asarray(ACTIVATIONS[activation](jnp.asarray(x @ first.T + first_bias)))
    return np.asarray(inner @ last.T + last_bias, np.float32)
