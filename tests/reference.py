"""What the tests compare with: outputs kept in ``tests/fixtures``, and live ones where the libraries are installed."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Literal

import numpy as np
import pytest
from support import FIXTURES

from jpets.engine.batch.rows import Row

Source = Literal["kept", "live"]
LIVE_LENGTHS = [24, 5, 12, 22, 3, 18]
LIVE_SEED = 29
UNTYPED = ("distilbert", "roberta", "minilm")
"""Parts of the names of fixtures that are run without token types."""


@dataclasses.dataclass(frozen=True)
class Reference:
    """``rows`` without padding, and the reference implementation's padded outputs for them by name."""

    rows: list[Row]
    outputs: Mapping[str, np.ndarray]


def live(fixture: str) -> bool:
    """Whether the libraries that a fixture was made with are here."""
    libraries = {"peft-lora": ["peft"], "peft-encoder": ["peft"], "adapterhub": ["adapters"]}
    extra = libraries.get(fixture.partition("/")[0], [])
    return all(find_spec(name) is not None for name in ("torch", "transformers", *extra))


def against(*fixtures: str) -> pytest.MarkDecorator:
    """Runs a test with each (fixture, source); live ones only where they can run, so that none is ever skipped."""
    pairs = [
        (fixture, source) for fixture in fixtures for source in ("kept", "live") if source == "kept" or live(fixture)
    ]
    return pytest.mark.parametrize(("fixture", "source"), pairs)


def reference(fixture: str, source: Source) -> Reference:
    """Kept outputs, or those of a fresh run on inputs that no fixture has seen."""
    types = not any(part in fixture for part in UNTYPED)
    if source == "kept":
        outputs = dict(np.load(FIXTURES / fixture / "outputs.npz"))
        inputs = dict(np.load(FIXTURES / ("tiny-bert" if types else "tiny-distilbert") / "outputs.npz"))
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the libraries' own
            from fixtures import reference_models

            tensors = reference_models.random_inputs(LIVE_LENGTHS, LIVE_SEED, types=types)
            outputs = reference_models.outputs(fixture, tensors)
            inputs = {name: tensor.numpy() for name, tensor in tensors.items()}
    ids, lengths = inputs["input_ids"].astype(np.int32), inputs["attention_mask"].sum(1)
    typed = "token_type_ids" in inputs and not fixture.startswith("peft-encoder")
    of_type = inputs["token_type_ids"].astype(np.int32) if typed else np.zeros_like(ids)
    rows = [Row.of_tokens(i[:n], t[:n], {}, 0) for i, t, n in zip(ids, of_type, lengths, strict=True)]
    return Reference(rows, outputs)
