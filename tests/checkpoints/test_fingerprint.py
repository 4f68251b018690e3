from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from checkpoints.canonical import canonical_shapes
from checkpoints.fingerprint import FINGERPRINT, fingerprint

Tensors = dict[str, np.ndarray]


@pytest.fixture
def tensors(bert: Any) -> Tensors:
    rng = np.random.default_rng(0)
    return {name: rng.random(shape, np.float32) for name, shape in canonical_shapes(bert.config).items()}


def test_form(tensors: Tensors, tokenizer_json: str, bert: Any) -> None:
    assert FINGERPRINT.fullmatch(fingerprint(tensors, tokenizer_json, bert.config))


def test_settings_that_came_later_changed_no_fingerprint(tensors: Tensors, tokenizer_json: str, bert: Any) -> None:
    """It is still the one in task files from before ``embedding_size`` was a setting."""
    earlier = "sha256:6a3039cdc6ca10ae5363813860c466842283bc42b71210c38db19eeb9106fa80"
    assert fingerprint(tensors, tokenizer_json, bert.config) == earlier


@pytest.mark.parametrize("change", [{"usual_length": 8}, {"table_rows": 9}, {"table_format": "float8"}])
def test_how_much_fits_and_how_it_is_stored_does_not_matter(
    tensors: Tensors, tokenizer_json: str, bert: Any, change: dict[str, Any]
) -> None:
    changed = dataclasses.replace(bert.config, **change)
    assert fingerprint(tensors, tokenizer_json, changed) == fingerprint(tensors, tokenizer_json, bert.config)


def test_order_and_memory_layout_do_not_matter(tensors: Tensors, tokenizer_json: str, bert: Any) -> None:
    expected = fingerprint(tensors, tokenizer_json, bert.config)
    shuffled = {name: np.asfortranarray(tensors[name]) for name in sorted(tensors, reverse=True)}
    assert fingerprint(shuffled, tokenizer_json, bert.config) == expected


def test_every_tensor_matters(tensors: Tensors, tokenizer_json: str, bert: Any) -> None:
    seen = {fingerprint(tensors, tokenizer_json, bert.config)}
    for name, array in tensors.items():
        changed = array.copy()
        changed.flat[-1] += 1
        seen.add(fingerprint({**tensors, name: changed}, tokenizer_json, bert.config))
    assert len(seen) == len(tensors) + 1


@pytest.mark.parametrize(
    "change",
    [
        {"norm_eps": 1e-5},
        {"activation": "relu"},
        {"heads": 4},
        {"family": "other"},
        {"max_positions": 23},
        {"embedding_size": 16},
    ],
)
def test_settings_matter(tensors: Tensors, tokenizer_json: str, bert: Any, change: dict[str, Any]) -> None:
    changed = dataclasses.replace(bert.config, **change)
    assert fingerprint(tensors, tokenizer_json, changed) != fingerprint(tensors, tokenizer_json, bert.config)


def test_tokenizer_matters_but_not_its_truncation(tensors: Tensors, tokenizer_json: str, bert: Any) -> None:
    expected = fingerprint(tensors, tokenizer_json, bert.config)
    data = json.loads(tokenizer_json)
    cut = {**data, "truncation": {"max_length": 128}, "padding": {"strategy": "BatchLongest"}}
    assert fingerprint(tensors, json.dumps(cut, indent=2), bert.config) == expected
    data["model"]["vocab"]["three"] = 6
    assert fingerprint(tensors, json.dumps(data), bert.config) != expected


def test_the_position_of_padding_matters_where_there_is_one(tokenizer_json: str, roberta: Any) -> None:
    """Checkpoints have zeros there, and earlier fingerprints knew none."""
    rng = np.random.default_rng(0)
    tensors = {name: rng.random(shape, np.float32) for name, shape in canonical_shapes(roberta.config).items()}
    own = tensors.pop("padding_position")
    earlier = fingerprint(tensors, tokenizer_json, roberta.config)
    assert fingerprint({**tensors, "padding_position": np.zeros_like(own)}, tokenizer_json, roberta.config) == earlier
    assert fingerprint({**tensors, "padding_position": own}, tokenizer_json, roberta.config) != earlier


def test_the_usual_length_does_not_matter(tensors: Tensors, tokenizer_json: str, bert: Any) -> None:
    cut = dataclasses.replace(bert.config, usual_length=8)
    assert fingerprint(tensors, tokenizer_json, cut) == fingerprint(tensors, tokenizer_json, bert.config)
