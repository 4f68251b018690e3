"""PEFT methods of virtual tokens: prompt tuning, P-tuning and prefix tuning, as they are saved (projected already)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoints.backbone import Backbone
from checkpoints.canonical import FloatArray
from checkpoints.imports.unread import Unread
from checkpoints.settings import expect, expect_count
from jpets.types import Delta

EMBEDDINGS = "prompt_embeddings"


def prompt_deltas(settings: Mapping[str, Any], tensors: Unread, backbone: Backbone) -> list[Delta]:
    """Prompt tuning (Lester et al. 2021): virtual tokens enter before the embeddings' norm and get positions."""
    kept = _embeddings(settings, tensors, backbone.config.embedding_width)
    if tensors.problems:
        return []
    return [Delta("prompt", {"tokens": len(kept)}, {"embeddings/prompt": kept[None]})]


def prefix_deltas(settings: Mapping[str, Any], tensors: Unread, backbone: Backbone) -> list[Delta]:
    """Prefix tuning (Li and Liang 2021): a row a virtual token, keys and values in turn, layer by layer.

    The models count the prefix as positions, so the text's own begin behind it.
    """
    config = backbone.config
    if config.family == "distilbert":
        tensors.problems.options.append(
            "peft_type: PREFIX_TUNING is not supported for distilbert, whose model has no such input"
        )
    kept = _embeddings(settings, tensors, config.layers * 2 * config.hidden_size)
    tokens = len(kept)
    if tensors.problems:
        return []
    keys, values = kept.reshape(tokens, config.layers, 2, config.hidden_size).transpose(2, 1, 0, 3)
    return [
        Delta("prefix", {"tokens": tokens, "first_position": tokens}, {"attn_kv/key": keys, "attn_kv/value": values})
    ]


def _embeddings(settings: Mapping[str, Any], tensors: Unread, width: int) -> FloatArray:
    problems = tensors.problems.options
    modules = expect(settings, "num_transformer_submodules", int, 1, problems)
    if modules != 1:
        problems.append(f"num_transformer_submodules: expected 1 for an encoder, found {modules}")
    tokens = expect_count(settings, "num_virtual_tokens", None, problems)
    return tensors.take(EMBEDDINGS, (tokens, width))
