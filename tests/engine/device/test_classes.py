"""How many slots each class gets, and whether the remembered classes of tasks stay right."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter

import numpy as np
import pytest
from support import ENGINE_SETTINGS, make_head, make_task, method_tasks, random_delta, shallow, tiny

from jpets.deltas.bitfit import BIAS_CLASS
from jpets.deltas.protocol import ClassKey
from jpets.engine.device.classes import LOWERING, class_parts, class_slots
from jpets.engine.device.memory import banks_bytes, param_bytes
from jpets.engine.workloads.encoder_network import EncoderNetwork
from jpets.errors import OutOfSpace
from jpets.types import Task

SETTINGS = dataclasses.replace(ENGINE_SETTINGS, slots=7, max_slots=63, max_batch_rows=16)


def lora(rank: int = 4) -> Task:
    delta = random_delta("lora", shallow().config, 1, rank=rank)
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


def test_heads_and_biases_have_room_for_the_tasks_of_every_class() -> None:
    """Tasks of all methods have heads of one class: its slots must not run out before those of the deltas."""
    config, params = shallow().config, dict(shallow().params)
    network = EncoderNetwork(config)
    tasks = method_tasks(shallow())
    coming = Counter(key for task in tasks for key in network.classes(task, params) for _ in range(100))
    found = dict(class_slots([], [], coming, network, params, SETTINGS))
    shared = [key for key in found if key == BIAS_CLASS or key.method == "head"]
    deltas = [key for key in found if key not in shared]
    assert len(deltas) > 3 and {found[key] for key in deltas} == {SETTINGS.max_slots + 1}
    parts = class_parts(found, config, "float32")
    assert max(parts[key] for key in shared) == len(deltas) + 1, "one of them is the biases'"
    for key in shared:
        assert found[key] > min(SETTINGS.max_slots * parts[key], coming[key]), (key, found[key])
    assert dict(class_slots([], tasks, {}, network, params, SETTINGS)).keys() == found.keys()


def test_shared_classes_take_no_more_bytes_than_the_largest_of_the_others() -> None:
    config = shallow().config
    small, wide = (ClassKey("lora", (("query", rank),), (0,)) for rank in (8, 16))
    head, words = (ClassKey("head", (("outputs", n),), (0,)) for n in (4, 4096))
    parts = class_parts([small, wide, head, words], config, "float32")
    assert parts == {small: 1, wide: 1, head: 2, words: 1}
    assert class_parts([head], config, "float32") == {head: 1}
    biases = class_parts([BIAS_CLASS, head], config, "float32")
    assert biases == {BIAS_CLASS: 1, head: 1}


def test_under_a_limit_a_batch_of_them_still_fits() -> None:
    config, params = shallow().config, dict(shallow().params)
    keys = EncoderNetwork(config).classes(lora(), params)
    needed = param_bytes(EncoderNetwork(config), params, "float32") + banks_bytes(
        dict.fromkeys(keys, 20), config, "float32"
    )
    found = slots(0, 100_000, needed * 16 / 15 + 1)
    assert found == {"lora": 17, "head": 17}, "a batch has 16 rows"


def test_tasks_that_were_taken_in_one_by_one_are_no_reason_not_to_start() -> None:
    """A running server gives a new class as little as one slot besides the empty one."""
    network, config, params = EncoderNetwork(shallow().config), shallow().config, dict(shallow().params)
    keys = network.classes(lora(), params)
    taken = param_bytes(network, params, "float32")
    for count, found in ((2, 2), (3, 2), (9, 8)):
        room = banks_bytes(dict.fromkeys(keys, count), config, "float32")
        assert set(slots(0, 100_000, (taken + room) * 16 / 15 + 1).values()) == {found}
    with pytest.raises(OutOfSpace):
        slots(2, 0, (taken + banks_bytes(dict.fromkeys(keys, 2), config, "float32")) * 16 / 15 + 1)


def test_a_class_that_finds_no_room_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Its tasks alone are not served then."""
    network, config, params = EncoderNetwork(shallow().config), shallow().config, dict(shallow().params)
    small, wide = (network.classes(lora(rank), params) for rank in (4, 64))
    (head,) = set(small) & set(wide)
    room = banks_bytes(dict.fromkeys(small, 3), config, "float32")
    limit = (param_bytes(network, params, "float32") + room) * 16 / 15 + 1
    found = class_slots([], [], Counter([*small, *wide]), network, params, SETTINGS, limit)
    assert {key for key, _ in found} == set(small) and head in small
    assert "tasks of a shape cannot be served" in caplog.text


def test_remembered_classes_are_made_anew_when_lowering_changes() -> None:
    """If this fails, tasks have other classes than before: raise ``LOWERING``, then write down the new digest."""
    config, params = tiny().config, dict(tiny().params)
    classes = [(task.id, EncoderNetwork(config).classes(task, params)) for task in method_tasks(tiny())]
    assert all(isinstance(key, ClassKey) for _, keys in classes for key in keys)
    digest = hashlib.sha256(repr(classes).encode()).hexdigest()[:16]
    assert (LOWERING, digest) == (2, "bd86ed14441686af")
