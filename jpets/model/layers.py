"""An encoder of some layers of another one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jpets.config import OUTSIDE_SITES, BackboneConfig
from jpets.model.encoder import Params

EMBEDDING = ("word", "position", "padding_position", "token_type", "embeddings_norm", "embeddings_project")


def some_layers(params: Params, whole: BackboneConfig, part: BackboneConfig, layers: Sequence[int]) -> Params:
    """The parameters of an encoder of the shape ``part``: the embeddings of ``whole``, and these of its layers in their
    order. A pooler is left out."""
    bias, layout = np.asarray(params["bias"]), whole.bias_layout()
    own = np.zeros(part.bias_size(), bias.dtype)
    for (layer, site), span in part.bias_layout().items():
        own[span] = bias[layout[layer if site in OUTSIDE_SITES else layers[layer], site]]
    found = {name: params[name] for name in EMBEDDING if name in params}
    return {**found, "layers": {at: params["layers"][layer] for at, layer in enumerate(layers)}, "bias": own}
