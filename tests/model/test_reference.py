"""Encoders and deltas against the outputs of the reference implementations (``scripts/fixtures/make_fixtures.py``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np
import pytest
from reference import Reference, Source, against, reference
from safetensors.numpy import load_file
from support import FIXTURES, Bench, device_params, make_task, on_device, row_answer, tiny

from checkpoints.backbone import Backbone
from checkpoints.torch_file import read_torch
from jpets.deltas import class_method
from jpets.deltas.adapter import adapter_placement
from jpets.deltas.entries import diff_delta
from jpets.deltas.lora import lora_delta
from jpets.deltas.sites import BoundClass
from jpets.engine.batch.assembly import assemble
from jpets.engine.batch.bucket import Bucket, Variant, widest
from jpets.engine.batch.rows import Row, led
from jpets.engine.workloads.encoder_network import INPUTS
from jpets.model.encoder import split
from jpets.model.forward import bind_sites, encode
from jpets.types import Delta, Head, HeadType, Pooling
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


WIDER = Bucket(128, ((5, 27), (2, 29)))
BUCKETS = [Bucket(6 * 24, ((6, 24),)), Bucket(96, ((5, 22), (2, 24)))]


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
@against("tiny-bert", "tiny-distilbert", "tiny-roberta", "tiny-electra")
def test_hidden_states_layer_by_layer(fixture: str, source: Source, bucket: Bucket) -> None:
    compare_layers(tiny(fixture), reference(fixture, source), bucket)


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_old_checkpoints_hold_the_same_encoder(bucket: Bucket) -> None:
    compare_layers(tiny("tiny-bert-bin"), reference("tiny-bert", "kept"), bucket)


def compare_layers(backbone: Backbone, wanted: Reference, bucket: Bucket) -> None:
    rows, expected = wanted.rows, wanted.outputs["hidden_states"]
    assembled = on_device(assemble(rows, bucket, Variant(), INPUTS))
    encoder, params = split(backbone.config), device_params(backbone)
    model, sites = encoder.bind(params), bind_sites(encoder, params, assembled.batch)
    states = model.hidden_states(assembled.batch, sites)
    starts = np.asarray(assembled.batch.rows.first_token)[assembled.order]
    for layer, state in enumerate(states):
        for query, row in enumerate(rows):
            found = np.asarray(state)[starts[query] : starts[query] + row.length]
            np.testing.assert_allclose(found, expected[layer, query, : row.length], atol=2e-5, err_msg=f"layer {layer}")
    assert backbone.config.pooler == ("pooler_output" in wanted.outputs)
    if backbone.config.pooler:
        np.testing.assert_allclose(model.pool(states[-1][starts], sites), wanted.outputs["pooler_output"], atol=2e-5)


@against("tiny-bert")
def test_pooler_output(fixture: str, source: Source) -> None:
    wanted = reference(fixture, source)
    own = Bench(tiny(), [])
    assembled, outputs = own.run([replace(row, pooling=2) for row in wanted.rows], BUCKETS[1], Variant())
    np.testing.assert_allclose(np.asarray(outputs.pooled)[assembled.order], wanted.outputs["pooler_output"], atol=2e-5)


def served_hidden(delta: Delta, rows: Sequence[Row]) -> list[np.ndarray]:
    """Hidden states of ``rows`` with one delta, through bank, packing and windows."""
    backbone = tiny()
    own = Bench(backbone, [make_task(backbone, "t", [delta], Head("embedding"))])
    variant, lead = widest(list(own.banks), heavy=True), class_method(delta.method).lead(delta)
    rows = [led(replace(row, slots=own.slots["t"]), lead, INPUTS) for row in rows]
    assembled = on_device(assemble(rows, WIDER if lead.tokens else BUCKETS[1], variant, INPUTS))
    bound = [
        BoundClass(key, own.banks[key].arrays, view, class_method(key.method))
        for key, view in zip(variant.classes(), assembled.views, strict=True)
    ]
    hidden = np.asarray(jax.jit(lambda: encode(own.encoder, own.params, assembled.batch, bound))())
    starts = np.asarray(assembled.batch.rows.first_token)[assembled.order]
    return [hidden[start : start + row.length] for start, row in zip(starts, rows, strict=True)]


def compare(delta: Delta, fixture: str, source: Source) -> None:
    wanted = reference(fixture, source)
    for query, found in enumerate(served_hidden(delta, wanted.rows)):
        np.testing.assert_allclose(found, wanted.outputs["last_hidden_state"][query, : len(found)], atol=1e-4)


@against("peft-encoder/ia3")
def test_ia3_agrees_with_peft(fixture: str, source: Source) -> None:
    """The suffix ``output.dense`` names both sub-layers' last linear, whose input a feed-forward factor scales."""
    tensors = load_file(FIXTURES / fixture / "adapter_model.safetensors")
    sites = {"attention.self.key": "key", "attention.self.value": "value"}
    sites |= {"attention.output.dense": "into_attn_out", "output.dense": "into_ffn_out"}
    own = {
        f"{site}/scale": np.stack(
            [tensors[f"base_model.model.encoder.layer.{layer}.{module}.ia3_l"].reshape(-1) for layer in LAYERS]
        )
        for module, site in sites.items()
    }
    compare(Delta("ia3", {"sites": list(sites.values())}, own), fixture, source)


@against("peft-encoder/prefix")
def test_prefix_agrees_with_peft(fixture: str, source: Source) -> None:
    """One row a virtual token: keys and values in turn, layer by layer. BERT counts them as positions."""
    kept = load_file(FIXTURES / fixture / "adapter_model.safetensors")["prompt_embeddings"]
    tokens = len(kept)
    parts = kept.reshape(tokens, len(LAYERS), 2, -1).transpose(2, 1, 0, 3)
    own = {"attn_kv/key": parts[0], "attn_kv/value": parts[1]}
    compare(Delta("prefix", {"tokens": tokens, "first_position": tokens}, own), fixture, source)


@against("peft-encoder/prompt")
def test_prompt_agrees_with_peft(fixture: str, source: Source) -> None:
    kept = load_file(FIXTURES / fixture / "adapter_model.safetensors")["prompt_embeddings"]
    compare(Delta("prompt", {"tokens": len(kept)}, {"embeddings/prompt": kept[None]}), fixture, source)


def peft_delta(fixture: str) -> Delta:
    folder = FIXTURES / fixture
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


@against("peft-lora/r8-query-value", "peft-lora/r4-all-rslora")
def test_lora_agrees_with_peft(fixture: str, source: Source) -> None:
    compare(peft_delta(fixture), fixture, source)


@against("adapterhub/houlsby", "adapterhub/pfeiffer", "adapterhub/pfeiffer-swish")
def test_adapter_agrees_with_adapterhub(fixture: str, source: Source) -> None:
    folder, backbone = FIXTURES / fixture, tiny()
    file = folder / "adapter.safetensors"
    tensors = load_file(file) if file.exists() else read_torch(folder / "pytorch_adapter.bin")
    config = json.loads((folder / "adapter_config.json").read_text())["config"]
    settings = adapter_placement(folder.name.partition("-")[0], backbone.config)
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
    compare(Delta("adapter", settings, own), fixture, source)


@against("bitfit")
def test_bitfit_agrees_with_the_reference(fixture: str, source: Source) -> None:
    biases = load_file(FIXTURES / "bitfit" / "biases.safetensors")
    tensors = {
        f"{site}/bias": np.stack([biases[f"encoder.layer.{layer}.{module}.bias"] for layer in LAYERS])
        for module, site in HF_SITES.items()
    }
    tensors["embeddings_norm/bias"] = biases["embeddings.LayerNorm.bias"][None]
    tensors["pooler/bias"] = biases["pooler.dense.bias"][None]
    compare(Delta("bitfit", {}, tensors), fixture, source)


@against("mask")
def test_mask_agrees_with_the_reference(fixture: str, source: Source) -> None:
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
    compare(Delta("mask", {}, tensors), fixture, source)


@against("diff")
def test_diff_agrees_with_the_reference(fixture: str, source: Source) -> None:
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
    compare(diff_delta(weights, biases, list(LAYERS)), fixture, source)


HEADS: Mapping[str, HeadType] = {
    "bert-sequence": "sequence-classification",
    "bert-token": "token-classification",
    "bert-qa": "question-answering",
    "distilbert-sequence": "sequence-classification",
}


@against(*(f"tiny-bert-heads/{name}" for name in HEADS))
def test_heads_agree_with_the_reference(fixture: str, source: Source) -> None:
    backbone = tiny("tiny-distilbert" if "distilbert" in fixture else "tiny-bert")
    wanted, tensors = reference(fixture, source), load_file(FIXTURES / fixture / "head.safetensors")
    kind = HEADS[fixture.rpartition("/")[2]]
    last = "qa_outputs" if kind == "question-answering" else "classifier"
    own = {"kernel": tensors[f"{last}.weight"].T, "bias": tensors[f"{last}.bias"]}
    if "pre_classifier.weight" in tensors:
        own |= {"dense_kernel": tensors["pre_classifier.weight"].T, "dense_bias": tensors["pre_classifier.bias"]}
    pooling: Pooling = "pooler" if fixture.endswith("bert-sequence") and "distilbert" not in fixture else "cls"
    head = Head(kind, own, pooling=pooling, activation="relu")
    bench = Bench(backbone, [make_task(backbone, "t", [], head)])
    rows = [replace(row, slots=bench.slots["t"], pooling=2 if pooling == "pooler" else 0) for row in wanted.rows]
    for bucket in BUCKETS:
        assembled, outputs = bench.run(rows, bucket, widest(list(bench.banks), heavy=True))
        for query, row in enumerate(rows):
            found = row_answer(assembled, outputs, query, head.outputs)["logits"]
            logits = wanted.outputs["logits"][query]
            np.testing.assert_allclose(found, logits[: row.length] if head.reads_tokens else logits[None], atol=1e-4)
