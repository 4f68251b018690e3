"""Heads that fill masks, read of transformers' models: against the library's own logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from masked import MASKED, MODELS, masked_folder, masked_task
from safetensors.numpy import load_file, save_file
from support import FIXTURES, tiny

from checkpoints.imports.heads import Wishes
from checkpoints.imports.task import read_adapter, read_model
from checkpoints.task_file import read_task, task_to_bytes
from jpets.engine.results.fills import probabilities
from jpets.errors import InvalidInput, InvalidTask
from jpets.fills import MOST_MASKS, Vocabulary
from jpets.model.encoder import split
from jpets.results import Fills
from jpets.tokenizing import TextEncoder, Tokens
from jpets.training.predict import Predictor


@pytest.mark.parametrize("family", MODELS)
def test_the_probabilities_are_the_librarys(family: str, tmp_path: Path) -> None:
    backbone = tiny(f"tiny-{family}")
    model = read_model(masked_folder(tmp_path / "own", family), backbone, Wishes())
    assert model.head.type == "fill-mask" and not model.labels
    kept = np.load(MASKED / family / "outputs.npz")
    types = np.load(FIXTURES / f"tiny-{family}" / "outputs.npz").get("token_type_ids", np.zeros_like(kept["input_ids"]))
    tokens = [
        Tokens(ids[:n].astype(np.int32), own[:n].astype(np.int32))
        for ids, own, n in zip(kept["input_ids"], types, kept["lengths"], strict=True)
    ]
    text = TextEncoder.of(backbone)
    answers = Predictor(split(backbone.config), text, model.head)(backbone.params, model.head, tokens)
    vocabulary = Vocabulary(text.tokenizer, backbone.params["word"], backbone.config.norm_eps)
    for own, outputs, logits in zip(tokens, answers, kept["logits"], strict=True):
        masked = vocabulary.masked(own.ids)
        assert masked.places.tolist() == [place for place in (1, 3) if place < len(own.ids)]
        result = Fills(task="own", tokens=1, outputs=outputs[masked.places], masked=masked, tensors=model.head.tensors)
        logits = logits[: len(masked.places)]
        powers = np.exp(logits - logits.max(-1, keepdims=True))
        np.testing.assert_allclose(probabilities(result), powers / powers.sum(-1, keepdims=True), atol=1e-5)


def test_a_task_file_keeps_the_head(tmp_path: Path) -> None:
    task = masked_task(tmp_path / "own")
    again = read_task(task_to_bytes(task), id="words", config=tiny().config, backbone=tiny().ref())
    assert again.head.type == "fill-mask" and again.head.activation == "gelu"
    assert {name: own.shape for name, own in again.head.tensors.items()} == {
        "kernel": (64, 64), "bias": (64,), "norm_weight": (64,), "norm_bias": (64,), "decoder_bias": (800,)
    }  # fmt: skip
    outline = again.outlined(host_part=True)
    np.testing.assert_array_equal(outline.head.tensors["decoder_bias"], task.head.tensors["decoder_bias"])


@pytest.mark.parametrize("fault", ["words", "decoder", "norm", "bias"])
def test_a_model_that_cannot_be_served_so_is_refused(fault: str, tmp_path: Path) -> None:
    folder = masked_folder(tmp_path / "own")
    tensors = load_file(folder / "model.safetensors")
    words = tensors["bert.embeddings.word_embeddings.weight"]
    if fault == "words":
        tensors["bert.embeddings.word_embeddings.weight"] = words + 1
    elif fault == "decoder":
        tensors["cls.predictions.decoder.weight"] = words + 1
    elif fault == "norm":
        del tensors["cls.predictions.transform.LayerNorm.weight"]
    else:
        tensors["cls.predictions.bias"] = tensors["cls.predictions.bias"][:5]
    save_file(tensors, folder / "model.safetensors")
    named = {
        "words": "word: expected the word embeddings",
        "decoder": r"decoder\.weight: expected the word embeddings",
        "norm": r"LayerNorm\.weight: expected \[64\], found nothing",
        "bias": r"predictions\.bias: expected \[800\], found \[5\]",
    }[fault]
    with pytest.raises(InvalidTask, match=named):
        read_model(folder, tiny(), Wishes())


def test_a_decoder_that_is_stored_though_it_is_tied(tmp_path: Path) -> None:
    folder = masked_folder(tmp_path / "own")
    tensors = load_file(folder / "model.safetensors")
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    tensors["cls.predictions.decoder.bias"] = tensors.pop("cls.predictions.bias")
    save_file(tensors, folder / "model.safetensors")
    assert read_model(folder, tiny(), Wishes()).head.type == "fill-mask"


def test_a_text_with_very_many_masks_is_refused() -> None:
    vocabulary = Vocabulary(TextEncoder.of(tiny()).tokenizer, tiny().params["word"], 1e-12)
    mask = vocabulary.token("[MASK]")
    assert len(vocabulary.masked(np.full(MOST_MASKS, mask, np.int32)).places) == MOST_MASKS
    for count, named in ((MOST_MASKS + 1, "at most"), (0, "hold none")):
        with pytest.raises(InvalidInput, match=named):
            vocabulary.masked(np.array([2, *[mask] * count, 3], np.int32))


def test_of_an_adapter_no_such_head_is_read(tmp_path: Path) -> None:
    folder = FIXTURES / "imports" / "peft" / "lora-token"
    with pytest.raises(InvalidTask, match="fill-mask head is read of a whole"):
        read_adapter(folder, tiny(), Wishes(head="fill-mask"))
