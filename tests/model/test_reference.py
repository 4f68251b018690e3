"""Encoders and deltas against the outputs of the reference implementations (made by scripts/make_fixtures.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from support import FIXTURES, Bench, device_params, make_task, on_device, row_answer, tiny

from checkpoints.torch_file import read_torch
from jpets.deltas import class_method
from jpets.deltas.adapter import adapter_placement
from jpets.deltas.diff import diff_delta
from jpets.deltas.lora import lora_delta
from jpets.deltas.protocol import ClassKey
from jpets.deltas.sites import BoundClass
from jpets.engine.assembly import Row, assemble
from jpets.engine.bucket import Bucket, Variant, widest
from jpets.model.encoder import split
from jpets.model.forward import bind_sites, encode
from jpets.types import Delta, Head
from pallas_kernels.masked_matmul import pack_planes

HF_SITES = {
    "attention.self.query": "query",
    "attention.self.key": "key",
    "attention.self.value": "value",
    "attention.output.dense": "attn_out",
    "intermediate.dense": "ffn_in",
    "output.dense": "ffn_out",
    "attention.output.LayerNorm": "attn_norm",
    "output.LayerNorm": "ffn_norm",
}
LAYERS = range(3)


def inputs(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    data = np.load(FIXTURES / name / "outputs.npz")
    ids, mask = data["input_ids"], data["attention_mask"]
    return ids, mask, data["token_type_ids"] if "token_type_ids" in data else np.zeros_like(ids)


def fixture_rows(name: str, slots: Mapping[ClassKey, int] = MappingProxyType({}), pooling: int = 0) -> list[Row]:
    ids, mask, types = inputs(name)
    return [
        Row(i[: m.sum()].astype(np.int32), t[: m.sum()].astype(np.int32), slots, pooling)
        for i, m, t in zip(ids, mask, types, strict=True)
    ]


BUCKETS = [Bucket(6 * 24, ((6, 24),)), Bucket(96, ((5, 22), (2, 24)))]


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
@pytest.mark.parametrize("name", ["tiny-bert", "tiny-distilbert", "tiny-bert-bin"])
def test_hidden_states_layer_by_layer(name: str, bucket: Bucket) -> None:
    folder = "tiny-bert" if name == "tiny-bert-bin" else name
    backbone, expected = tiny(name), np.load(FIXTURES / folder / "outputs.npz")["hidden_states"]
    rows = fixture_rows(folder)
    assembled = on_device(assemble(rows, bucket, Variant(), 0))
    encoder, params = split(backbone.config), device_params(backbone)
    states = encoder.bind(params).hidden_states(assembled.batch, bind_sites(encoder, params, assembled.batch))
    starts = np.asarray(assembled.batch.rows.first_token)[assembled.order]
    for layer, state in enumerate(states):
        for query, row in enumerate(rows):
            found = np.asarray(state)[starts[query] : starts[query] + row.length]
            np.testing.assert_allclose(found, expected[layer, query, : row.length], atol=2e-5, err_msg=f"layer {layer}")


def test_pooler_output() -> None:
    expected = np.load(FIXTURES / "tiny-bert" / "outputs.npz")["pooler_output"]
    own = Bench(tiny(), [])
    assembled, outputs = own.run(fixture_rows("tiny-bert", pooling=2), BUCKETS[1], Variant())
    np.testing.assert_allclose(np.asarray(outputs.pooled)[assembled.order], expected, atol=2e-5)


def served_hidden(delta: Delta) -> list[np.ndarray]:
    """Hidden states of the fixture rows with one delta, through bank, packing and windows."""
    backbone = tiny()
    own = Bench(backbone, [make_task(backbone, "t", [delta], Head("embedding"))])
    variant = widest(list(own.banks), heavy=True)
    rows = fixture_rows("tiny-bert", own.slots["t"])
    assembled = on_device(assemble(rows, BUCKETS[1], variant, 0))
    bound = [
        BoundClass(key, own.banks[key].arrays, view, class_method(key.method))
        for key, view in zip(variant.classes(), assembled.views, strict=True)
    ]
    hidden = np.asarray(jax.jit(lambda: encode(own.encoder, own.params, assembled.batch, bound))())
    starts = np.asarray(assembled.batch.rows.first_token)[assembled.order]
    return [hidden[start : start + row.length] for start, row in zip(starts, rows, strict=True)]


def compare(delta: Delta, folder: str) -> None:
    expected = np.load(FIXTURES / folder / "outputs.npz")["last_hidden_state"]
    for query, found in enumerate(served_hidden(delta)):
        np.testing.assert_allclose(found, expected[query, : len(found)], atol=1e-4)


def peft_delta(name: str) -> Delta:
    folder = FIXTURES / "peft-lora" / name
    config, tensors = (
        json.loads((folder / "adapter_config.json").read_text()),
        load_file(folder / "adapter_model.safetensors"),
    )
    matrices: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = {}
    for layer in LAYERS:
        for module, site in HF_SITES.items():
            prefix = f"base_model.model.bert.encoder.layer.{layer}.{module}.lora_"
            if prefix + "A.weight" in tensors:
                pair = (tensors[prefix + "A.weight"].T, tensors[prefix + "B.weight"].T)
                matrices.setdefault(site, {})[layer] = pair
    return lora_delta(matrices, alpha=config["lora_alpha"], rank_stabilised=config["use_rslora"])


@pytest.mark.parametrize("name", ["r8-query-value", "r4-all-rslora"])
def test_lora_agrees_with_peft(name: str) -> None:
    compare(peft_delta(name), f"peft-lora/{name}")


@pytest.mark.parametrize("name", ["houlsby", "pfeiffer", "pfeiffer-swish"])
def test_adapter_agrees_with_adapterhub(name: str) -> None:
    folder, backbone = FIXTURES / "adapterhub" / name, tiny()
    file = folder / "adapter.safetensors"
    tensors = load_file(file) if file.exists() else read_torch(folder / "pytorch_adapter.bin")
    config = json.loads((folder / "adapter_config.json").read_text())["config"]
    settings = adapter_placement(name.partition("-")[0], backbone.config)
    settings |= {"activation": config["non_linearity"], "bottleneck": 16}
    own: dict[str, np.ndarray] = {}
    parts = {"down": "adapter_down.0.weight", "down_bias": "adapter_down.0.bias"}
    parts |= {"up": "adapter_up.weight", "up_bias": "adapter_up.bias"}
    modules = {"after_attn_out": "attention.output", "after_ffn_out": "output"}
    for site in settings["sites"]:
        for part, suffix in parts.items():
            stacked = []
            for layer in LAYERS:
                wanted = f"encoder.layer.{layer}.{modules[site]}.adapters."
                (array,) = [
                    value
                    for key, value in tensors.items()
                    if key.removeprefix("bert.").startswith(wanted) and key.endswith(suffix)
                ]
                stacked.append(array.T if array.ndim == 2 else array)
            own[f"{site}/{part}"] = np.stack(stacked).astype(np.float32)
    compare(Delta("adapter", settings, own), f"adapterhub/{name}")


def test_bitfit_agrees_with_the_reference() -> None:
    biases = load_file(FIXTURES / "bitfit" / "biases.safetensors")
    tensors = {
        f"{site}/bias": np.stack([biases[f"encoder.layer.{layer}.{module}.bias"] for layer in LAYERS])
        for module, site in HF_SITES.items()
    }
    tensors["embeddings_norm/bias"] = biases["embeddings.LayerNorm.bias"][None]
    tensors["pooler/bias"] = biases["pooler.dense.bias"][None]
    compare(Delta("bitfit", {}, tensors), "bitfit")


def test_mask_agrees_with_the_reference() -> None:
    masks = np.load(FIXTURES / "mask" / "masks.npz")
    config = tiny().config
    tensors = {}
    for module, site in list(HF_SITES.items())[:6]:
        inputs_, outputs = config.dims(site)
        bits = [
            np.unpackbits(masks[f"encoder.layer.{layer}.{module}.weight"])[: inputs_ * outputs].reshape(
                outputs, inputs_
            )
            for layer in LAYERS
        ]
        tensors[f"{site}/bits"] = pack_planes(np.stack([b.T for b in bits]).astype(bool))
    compare(Delta("mask", {}, tensors), "mask")


def test_diff_agrees_with_the_reference() -> None:
    data = np.load(FIXTURES / "diff" / "diff.npz")
    config = tiny().config
    weights: dict[str, dict[int, np.ndarray]] = {}
    biases: dict[str, dict[int, np.ndarray]] = {}
    for module, site in HF_SITES.items():
        for layer in LAYERS:
            name = f"encoder.layer.{layer}.{module}"
            if f"{name}.weight/rows" in data:
                dense = np.zeros(config.dims(site)[::-1], np.float32)
                dense[data[f"{name}.weight/rows"], data[f"{name}.weight/cols"]] = data[f"{name}.weight/values"]
                weights.setdefault(site, {})[layer] = dense.T
            part = config.bias_layout()[layer, site]
            change = np.zeros(part.stop - part.start, np.float32)
            if f"{name}.bias/rows" in data:
                change[data[f"{name}.bias/rows"]] = data[f"{name}.bias/values"]
                biases.setdefault(site, {})[layer] = change
    if "embeddings.LayerNorm.bias/rows" in data:
        change = np.zeros(config.hidden_size, np.float32)
        change[data["embeddings.LayerNorm.bias/rows"]] = data["embeddings.LayerNorm.bias/values"]
        biases["embeddings_norm"] = {0: change}
    compare(diff_delta(weights, biases, list(LAYERS)), "diff")


def hf_head(name: str) -> dict[str, np.ndarray]:
    return load_file(FIXTURES / "tiny-bert-heads" / name / "head.safetensors")


@pytest.mark.parametrize("name", ["bert-sequence", "bert-token", "distilbert-sequence"])
def test_heads_agree_with_the_reference(name: str) -> None:
    backbone = tiny("tiny-distilbert" if name.startswith("distil") else "tiny-bert")
    tensors, expected = hf_head(name), np.load(FIXTURES / "tiny-bert-heads" / name / "outputs.npz")["logits"]
    own = {"kernel": tensors["classifier.weight"].T, "bias": tensors["classifier.bias"]}
    if "pre_classifier.weight" in tensors:
        own |= {"dense_kernel": tensors["pre_classifier.weight"].T, "dense_bias": tensors["pre_classifier.bias"]}
    kind = "token-classification" if name == "bert-token" else "sequence-classification"
    pooling = "pooler" if name == "bert-sequence" else "cls"
    head = Head(kind, own, pooling=pooling, activation="relu")
    bench = Bench(backbone, [make_task(backbone, "t", [], head)])
    folder = "tiny-distilbert" if name.startswith("distil") else "tiny-bert"
    rows = fixture_rows(folder, bench.slots["t"], 2 if pooling == "pooler" else 0)
    for bucket in BUCKETS:
        assembled, outputs = bench.run(rows, bucket, widest(list(bench.banks), heavy=True))
        for query, row in enumerate(rows):
            found = row_answer(assembled, outputs, query, head.outputs)["logits"]
            wanted = expected[query, : row.length] if kind.startswith("token") else expected[query][None]
            np.testing.assert_allclose(found, wanted, atol=1e-4)
