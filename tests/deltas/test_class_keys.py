"""Keys of classes, which every plan looks up, and a task's slots by them."""

from __future__ import annotations

import pickle

from jpets.deltas.protocol import ClassKey
from jpets.deltas.task_slots import NO_SLOTS, TaskSlots, class_number, numbered_class, task_slots

KEY = ClassKey("adapter", (("after_ffn_out", 16),), (0, 1, 4), (("activation", "relu"), ("input", "output")), 1)


def test_equal_keys_are_one_class() -> None:
    other = ClassKey(KEY.method, KEY.sites, KEY.layers, KEY.options, KEY.ordinal)
    assert other == KEY and hash(KEY) == hash(other) and {KEY: 1}[other] == 1
    assert str(KEY) == "adapter/after_ffn_out:16/activation=relu/input=output/layers 0-1+4#1"
    assert class_number(KEY) == class_number(other) and numbered_class(class_number(KEY)) == KEY


def test_a_key_takes_no_hash_to_another_process() -> None:
    """Texts have other hashes there."""
    assert hash(KEY) == KEY._hash and "_hash" in vars(KEY)
    sent = pickle.loads(pickle.dumps(KEY))
    assert sent == KEY and "_hash" not in vars(sent)
    slots = TaskSlots({KEY: 3})
    assert slots.pairs.tolist() == [[class_number(KEY)], [3]]
    sent = pickle.loads(pickle.dumps(slots))
    assert isinstance(sent, TaskSlots) and sent == slots and not vars(sent)


def test_slots_of_a_task_are_made_once() -> None:
    slots = task_slots({KEY: 3, ClassKey("mask"): 2})
    assert task_slots(slots) is slots and slots.heavy and slots.pairs is slots.pairs
    assert task_slots({}) is NO_SLOTS and not NO_SLOTS.heavy and NO_SLOTS.pairs.shape == (2, 0)
