"""How many slots each class gets, and whether the remembered classes of tasks stay right."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest
from support import ENGINE_SETTINGS, make_head, make_task, method_tasks, random_delta, shallow, tiny

from jpets.deltas.protocol import ClassKey
from jpets.engine.device.classes import LOWERING, class_slots
from jpets.engine.device.memory import banks_bytes, param_bytes
from jpets.engine.workloads.encoder_network import EncoderNetwork
from jpets.types import Task

SETTINGS = dataclasses.replace(ENGINE_SETTINGS, slots=7, max_slots=63, max_batch_rows=16)


def lora(rank: int = 4) -> Task:
    delta = random_delta("lora", shallow().config, 1)
    return make_task(shallow(), f"lora-{rank}", [delta], make_head(np.random.default_rng(0), 64, 3))


def slots(stay: int, coming: int, limit: float = float("inf")) -> dict[str, int]:
    config, params = shallow().config, dict(shallow().params)
    keys = EncoderNetwork(config).classes(lora(), params)
    found = class_slots(
        [lora()] * stay, [], dict.fromkeys(keys, coming), EncoderNetwork(config), params, SETTINGS, limit
    )
    return {key.method: count for key, count in found}


@pytest.mark.parametrize(
    ("stay", "coming", "expected"),
    [
        (0, 1, 8),
        (0, 3, 8),
        (0, 4, 16),
        (0, 31, 64),
        (0, 100_000, 64),
        (1, 0, 8),
        (10, 0, 32),
        (40, 0, 128),
        (40, 9, 128),
    ],
)
def test_tasks_that_may_leave_share_slots(stay: int, coming: int, expected: int) -> None:
    assert slots(stay, coming) == {"lora": expected, "head": expected}


def test_under_a_limit_a_batch_of_them_still_fits() -> None:
    config, params = shallow().config, dict(shallow().params)
    keys = EncoderNetwork(config).classes(lora(), params)
    needed = param_bytes(EncoderNetwork(config), params, "float32") + banks_bytes(
        dict.fromkeys(keys, 20), config, "float32"
    )
    found = slots(0, 100_000, needed * 16 / 15 + 1)
    assert found == {"lora": 17, "head": 17}, "a batch has 16 rows"


def test_remembered_classes_are_made_anew_when_lowering_changes() -> None:
    """If this fails, tasks have other classes than before: raise ``LOWERING``, then write down the new digest."""
    config, params = tiny().config, dict(tiny().params)
    classes = [(task.id, EncoderNetwork(config).classes(task, params)) for task in method_tasks(tiny())]
    assert all(isinstance(key, ClassKey) for _, keys in classes for key in keys)
    digest = hashlib.sha256(repr(classes).encode()).hexdigest()[:16]
    assert (LOWERING, digest) == (2, "bd86ed14441686af")
