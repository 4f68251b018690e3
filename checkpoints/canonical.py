"""A backbone's tensors under canonical names: the neutral form between checkpoint formats and the parameter tree.

Names: ``word``, ``position``, ``token_type``; ``padding_position`` [width] of families whose positions skip padding;
``PLACE/weight`` [in, out] and ``PLACE/bias`` of linear sites; ``PLACE/scale`` and ``PLACE/bias`` of norms. PLACE is
``layers/<i>/<site>``, or a site outside the layers.

Fingerprints are taken over this form. It must not change when the engine lays its parameters out in another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jpets.config import LINEAR_SITES, NORM_SITES, OUTSIDE_SITES, BackboneConfig

FloatArray = npt.NDArray[np.float32]
Params = dict[str, Any]
PADDING_POSITION = "padding_position"
EMBEDDINGS = ("word", "position", PADDING_POSITION, "token_type")
FUSED = ("query", "key", "value")
"""Sites whose weights lie side by side in one ``qkv`` leaf."""


def place_name(layer: int, site: str) -> str:
    """The canonical name of a site; ``layer`` is 0 and unused for places outside the layers."""
    return site if site in OUTSIDE_SITES else f"layers/{layer}/{site}"


def canonical_shapes(config: BackboneConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a backbone has, in canonical order."""
    d, e = config.hidden_size, config.embedding_width
    shapes: dict[str, tuple[int, ...]] = {"word": (config.vocab_size, e), "position": (config.max_positions, e)}
    if config.skips_padding:
        shapes[PADDING_POSITION] = (e,)
    if config.type_vocab_size:
        shapes["token_type"] = (config.type_vocab_size, e)
    shapes |= {"embeddings_norm/scale": (e,), "embeddings_norm/bias": (e,)}
    if config.embedding_size:
        shapes |= {"embeddings_project/weight": (e, d), "embeddings_project/bias": (d,)}
    for layer in range(config.layers):
        for site in LINEAR_SITES:
            shapes[f"layers/{layer}/{site}/weight"] = config.dims(site)
            shapes[f"layers/{layer}/{site}/bias"] = config.dims(site)[1:]
        for site in NORM_SITES:
            shapes |= {f"layers/{layer}/{site}/scale": (d,), f"layers/{layer}/{site}/bias": (d,)}
    if config.pooler:
        shapes |= {"pooler/weight": (d, d), "pooler/bias": (d,)}
    return shapes


def to_params(tensors: Mapping[str, FloatArray], config: BackboneConfig) -> Params:
    """The encoder's parameter tree, f32 and contiguous: fused ``qkv``, one flat ``bias``."""

    def layer_leaves(layer: int) -> dict[str, FloatArray]:
        at = f"layers/{layer}"
        leaves = {site: _own(tensors[f"{at}/{site}/weight"]) for site in LINEAR_SITES if site not in FUSED}
        norms = {site: _own(tensors[f"{at}/{site}/scale"]) for site in NORM_SITES}
        qkv = np.concatenate([tensors[f"{at}/{site}/weight"] for site in FUSED], axis=1)
        return {"qkv": _own(qkv), **leaves, **norms}

    embeddings = {name: _own(tensors[name]) for name in EMBEDDINGS if name in tensors}
    return {
        **embeddings,
        "embeddings_norm": _own(tensors["embeddings_norm/scale"]),
        **{site: _own(tensors[f"{site}/weight"]) for site in _linear_outside(config)},
        "layers": {layer: layer_leaves(layer) for layer in range(config.layers)},
        "bias": np.concatenate([tensors[f"{place_name(*place)}/bias"] for place in config.bias_layout()]),
    }


def from_params(params: Mapping[str, Any], config: BackboneConfig) -> dict[str, FloatArray]:
    """Canonical name -> array, views into ``params``, in canonical order. The inverse of ``to_params``."""
    layout, d = config.bias_layout(), config.hidden_size
    found: dict[str, FloatArray] = {name: params[name] for name in EMBEDDINGS if name in params}
    found["embeddings_norm/scale"] = params["embeddings_norm"]
    for layer, leaves in params["layers"].items():
        for column, site in enumerate(FUSED):
            found[f"layers/{layer}/{site}/weight"] = leaves["qkv"][:, column * d : (column + 1) * d]
        for site in LINEAR_SITES[len(FUSED) :]:
            found[f"layers/{layer}/{site}/weight"] = leaves[site]
        for site in NORM_SITES:
            found[f"layers/{layer}/{site}/scale"] = leaves[site]
    for site in _linear_outside(config):
        found[f"{site}/weight"] = params[site]
    for place, part in layout.items():
        found[f"{place_name(*place)}/bias"] = params["bias"][part]
    return {name: found[name] for name in canonical_shapes(config)}


def _linear_outside(config: BackboneConfig) -> tuple[str, ...]:
    present = {"embeddings_project": config.embedding_size > 0, "pooler": config.pooler}
    return tuple(site for site, here in present.items() if here)


def _own(array: FloatArray) -> FloatArray:
    return np.ascontiguousarray(array, np.float32)
