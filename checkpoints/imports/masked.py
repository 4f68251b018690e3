"""Heads that fill masks, as Hugging Face models spell them: one row a family."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from checkpoints.canonical import FloatArray
from checkpoints.imports.heads import read_linear
from checkpoints.imports.unread import Unread
from jpets.config import BackboneConfig
from jpets.types import Head


class MaskedLayout(NamedTuple):
    """Modules of a head. ``biases`` are names of the decoder's bias, of which a file may hold any. ``activation`` None
    is that of the encoder."""

    dense: str
    norm: str
    decoder: str
    biases: tuple[str, ...]
    activation: str | None = None


_ROBERTA = MaskedLayout(
    "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", ("lm_head.bias", "lm_head.decoder.bias"), "gelu"
)
MASKED: Mapping[str, MaskedLayout] = MappingProxyType(
    {
        "bert": MaskedLayout(
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            "cls.predictions.decoder",
            ("cls.predictions.bias", "cls.predictions.decoder.bias"),
        ),
        "distilbert": MaskedLayout("vocab_transform", "vocab_layer_norm", "vocab_projector", ("vocab_projector.bias",)),
        "roberta": _ROBERTA,
        "xlm-roberta": _ROBERTA,
        "camembert": _ROBERTA,
        "electra": MaskedLayout(
            "generator_predictions.dense",
            "generator_predictions.LayerNorm",
            "generator_lm_head",
            ("generator_lm_head.bias",),
            "gelu",
        ),
    }
)
"""Family -> modules."""
TIED = "expected the word embeddings of the backbone, which the head's vectors are compared with"


def read_masked_head(tensors: Unread, config: BackboneConfig, words: FloatArray, base: FloatArray) -> Head:
    """The head of a model that fills masks. ``words`` are the model's word embeddings, ``base`` the backbone's: both,
    and the decoder if it is there, must be the same. Problems go to ``tensors.problems``."""
    layout, width = MASKED[config.family], config.embedding_width
    own: dict[str, np.ndarray] = {}
    own["kernel"], own["bias"] = read_linear(tensors, layout.dense, config.hidden_size)
    own["norm_weight"] = tensors.take(f"{layout.norm}.weight", (width,))
    own["norm_bias"] = tensors.take(f"{layout.norm}.bias", (width,))
    bias = next((name for name in layout.biases if name in tensors), layout.biases[0])
    own["decoder_bias"] = tensors.take(bias, (config.vocab_size,))
    decoder = f"{layout.decoder}.weight"
    if not np.array_equal(words, base):
        tensors.problems.tensors.append(f"word: {TIED}; found others: they were trained too")
    elif decoder in tensors and not np.array_equal(tensors.take(decoder, words.shape), words):
        tensors.problems.tensors.append(f"{decoder}: {TIED}; found others")
    return Head("fill-mask", own, activation=layout.activation or config.activation)
