"""Texts longer than a model takes: training and scores cut them where a server does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from support import ENGINE_SETTINGS, logits_of, make_head, make_task, random_delta, shallow

from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.errors import InvalidInput
from jpets.training.data import Example
from jpets.training.methods import lead_of
from jpets.training.session import task_logits
from jpets.training.tokens import text_encoder
from jpets.types import Preprocessing, Query


@pytest.mark.parametrize(
    ("method", "settings", "rule"),
    [
        ("prompt", {"tokens": 8}, Preprocessing(truncation=True)),
        ("prefix", {"tokens": 4, "first_position": 6}, Preprocessing(truncation=True)),
        ("bitfit", {}, Preprocessing(truncation=False)),
    ],
)
def test_long_texts_are_scored_as_a_server_computes_them(
    method: str, settings: dict[str, int], rule: Preprocessing, program_cache: Path
) -> None:
    """Virtual tokens leave less room; and a rule that cuts nothing takes texts as long as the model does."""
    backbone = shallow()
    longest = backbone.config.max_positions
    head = make_head(np.random.default_rng(0), backbone.config.hidden_size, 3)
    task = make_task(backbone, method, [random_delta(method, backbone.config, **settings)], head, preprocessing=rule)
    own = "python library " * (longest if rule.truncation else longest // 2 - 1)
    asked = dataclasses.replace(ENGINE_SETTINGS, max_length=longest)
    buckets = [Bucket(longest, ((1, longest),))]
    with Engine(backbone, [task], asked, cache_dir=program_cache, buckets=buckets).start() as engine:
        (served,) = engine.infer([Query(method, own)])
    (scored,) = task_logits(task, backbone, [Example(own, None, task.labels[0])])
    assert served.tokens > longest // 2
    np.testing.assert_allclose(scored, logits_of(served), atol=1e-4)


def test_training_leaves_room_for_virtual_tokens() -> None:
    places = shallow().config.max_positions
    assert text_encoder(shallow(), lead_of("prompt", {})).longest == places - 16, "the course's own number"
    assert text_encoder(shallow(), lead_of("lora", {})).longest == places
    with pytest.raises(InvalidInput, match=f"leave 2 of {places} tokens"):
        text_encoder(shallow(), lead_of("prompt", {"tokens": places - 2}))
