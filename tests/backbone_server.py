"""A server of tiny-bert, which may load further backbones while its engines are held back."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from clients import Call
from support import wait_until

from checkpoints.backbone import Backbone
from checkpoints.task_file import read_task
from jpets.config import EngineSettings
from jpets.deltas import METHODS
from jpets.engine.batch.bucket import Bucket
from jpets.types import Head, Task
from serving.hosted.repository import Validator
from serving.hosted.services import Services

FIXTURES = Path(__file__).parent / "fixtures"
SETTINGS = EngineSettings(
    dtype="float32", max_length=16, max_batch_tokens=64, max_batch_rows=4, slots=7, background_compile=False
)
BUCKETS = [Bucket(64, ((4, 16),))]
OTHER = "tiny-distilbert"
GATE = threading.Event()
GATE.set()
"""Engines are made only while it is open."""
SHARED: deque[int] = deque(maxlen=1)
"""How many engines shared memory the last time."""


def bitfit_task(backbone: Backbone, id: str, seed: int) -> Task:
    rng = np.random.default_rng(seed)
    delta = METHODS["bitfit"].init(rng, {}, backbone.config, 0.1)
    kernel = rng.standard_normal((backbone.config.hidden_size, 3)).astype(np.float32)
    head = Head("sequence-classification", {"kernel": kernel, "bias": np.zeros(3, np.float32)})
    return Task(id, backbone.ref(), (delta,), head, ("a", "b", "c"))


def validator(own: Backbone) -> Validator:
    return lambda data, id: read_task(data, id=id, config=own.config, backbone=own.fingerprint)


Start = Callable[[], Services]


def state(call: Call, name: str) -> str:
    return next(item["state"] for item in call("GET", "/v1/backbones").json()["backbones"] if item["name"] == name)


def wait_for(call: Call, name: str, wanted: str) -> None:
    wait_until(lambda: state(call, name) == wanted)


def classify(call: Call, model: str) -> Any:
    answer = call("POST", "/v1/classify", json={"model": model, "input": "hello world"})
    return answer.status_code, answer.json().get("data")
