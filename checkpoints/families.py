"""How Hugging Face checkpoints of each family spell what a backbone holds: one row a module."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Literal

from jpets.config import BackboneConfig

ModuleKind = Literal["linear", "norm", "embedding"]
Row = tuple[str, str, ModuleKind]


@dataclasses.dataclass(frozen=True)
class Family:
    """How one ``model_type`` spells its settings and tensors; ``modules``: (our place, HF module, transform)."""

    sizes: Mapping[str, str]
    """Field of ``BackboneConfig`` -> key of ``config.json``."""
    activation: str
    modules: tuple[Row, ...]
    prefix: str
    """Attribute of a model with a head that holds the encoder."""
    pooler: tuple[Row, ...] = ()
    norm_eps: str | None = "layer_norm_eps"
    """Key of ``config.json``; a family without one has 1e-12."""
    positions_follow_pad: bool = False
    """The first token's position is the number behind ``pad_token_id``: no token has the ones before it."""

    @property
    def token_types(self) -> bool:
        return any(place == "token_type" for place, _, _ in self.modules)


BERT = Family(
    {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "intermediate_size": "intermediate_size",
        "max_positions": "max_position_embeddings",
    },
    "hidden_act",
    (
        ("word", "embeddings.word_embeddings", "embedding"),
        ("position", "embeddings.position_embeddings", "embedding"),
        ("token_type", "embeddings.token_type_embeddings", "embedding"),
        ("embeddings_norm", "embeddings.LayerNorm", "norm"),
        ("layers/{i}/query", "encoder.layer.{i}.attention.self.query", "linear"),
        ("layers/{i}/key", "encoder.layer.{i}.attention.self.key", "linear"),
        ("layers/{i}/value", "encoder.layer.{i}.attention.self.value", "linear"),
        ("layers/{i}/attn_out", "encoder.layer.{i}.attention.output.dense", "linear"),
        ("layers/{i}/attn_norm", "encoder.layer.{i}.attention.output.LayerNorm", "norm"),
        ("layers/{i}/ffn_in", "encoder.layer.{i}.intermediate.dense", "linear"),
        ("layers/{i}/ffn_out", "encoder.layer.{i}.output.dense", "linear"),
        ("layers/{i}/ffn_norm", "encoder.layer.{i}.output.LayerNorm", "norm"),
    ),
    "bert",
    (("pooler", "pooler.dense", "linear"),),
)
ROBERTA = dataclasses.replace(BERT, prefix="roberta", positions_follow_pad=True)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "bert": BERT,
        "roberta": ROBERTA,
        "xlm-roberta": ROBERTA,
        "camembert": ROBERTA,
        "electra": dataclasses.replace(
            BERT,
            sizes={**BERT.sizes, "embedding_size": "embedding_size"},
            modules=(*BERT.modules, ("embeddings_project", "embeddings_project", "linear")),
            prefix="electra",
            pooler=(),
        ),
        "distilbert": Family(
            {
                "vocab_size": "vocab_size",
                "hidden_size": "dim",
                "layers": "n_layers",
                "heads": "n_heads",
                "intermediate_size": "hidden_dim",
                "max_positions": "max_position_embeddings",
            },
            "activation",
            (
                ("word", "embeddings.word_embeddings", "embedding"),
                ("position", "embeddings.position_embeddings", "embedding"),
                ("embeddings_norm", "embeddings.LayerNorm", "norm"),
                ("layers/{i}/query", "transformer.layer.{i}.attention.q_lin", "linear"),
                ("layers/{i}/key", "transformer.layer.{i}.attention.k_lin", "linear"),
                ("layers/{i}/value", "transformer.layer.{i}.attention.v_lin", "linear"),
                ("layers/{i}/attn_out", "transformer.layer.{i}.attention.out_lin", "linear"),
                ("layers/{i}/attn_norm", "transformer.layer.{i}.sa_layer_norm", "norm"),
                ("layers/{i}/ffn_in", "transformer.layer.{i}.ffn.lin1", "linear"),
                ("layers/{i}/ffn_out", "transformer.layer.{i}.ffn.lin2", "linear"),
                ("layers/{i}/ffn_norm", "transformer.layer.{i}.output_layer_norm", "norm"),
            ),
            "distilbert",
            norm_eps=None,
        ),
    }
)
ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "gelu": "gelu",
        "gelu_python": "gelu",
        "gelu_new": "gelu_new",
        "gelu_pytorch_tanh": "gelu_new",
        "relu": "relu",
        "silu": "silu",
        "swish": "silu",
        "tanh": "tanh",
    }
)
"""``hidden_act`` -> jpets's name; names of one function become one, so that fingerprints agree."""
PARTS: Mapping[ModuleKind, tuple[tuple[str, tuple[str, ...]], ...]] = MappingProxyType(
    {
        "linear": (("/weight", ("weight",)), ("/bias", ("bias",))),
        "norm": (("/scale", ("weight", "gamma")), ("/bias", ("bias", "beta"))),
        "embedding": (("", ("weight",)),),
    }
)
"""What a module holds: our suffix, and its names in checkpoints, the old TensorFlow ones included."""


def encoder_prefix(names: Iterable[str], family: str) -> str:
    """What a model with a head puts before the names of its encoder's tensors; nothing where the encoder stands
    alone."""
    own = f"{FAMILIES[family].prefix}."
    return own if any(name.startswith(own) for name in names) else ""


def tensor_names(config: BackboneConfig) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """(canonical name, names in a checkpoint without prefix, whether the weight is stored [out, in])."""
    spec = FAMILIES[config.family]
    for place, module, kind in (*spec.modules, *spec.pooler):
        for layer in range(config.layers) if "{i}" in place else (0,):
            for suffix, names in PARTS[kind]:
                stored = tuple(f"{module.format(i=layer)}.{each}" for each in names)
                yield place.format(i=layer) + suffix, stored, suffix == "/weight"
