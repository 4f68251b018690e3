"""FLOPs and bytes of one BERT-base layer of each method, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from jpets.config import LINEAR_SITES, NAMED_BACKBONES
from jpets.deltas import METHODS
from jpets.deltas.bitfit import BIAS_CLASS
from jpets.deltas.diff import count_step
from jpets.deltas.protocol import ClassKey

BERT = NAMED_BACKBONES["bert-base"]
TOKENS, TASKS = 1024, 32


def lowered(method: str, **settings: object) -> ClassKey:
    delta = METHODS[method].init(np.random.default_rng(0), settings, BERT, 0.02)
    return METHODS[method].lower(delta, BERT)[0].key


def linear(method: str, density: float) -> ClassKey:
    sizes = {site: int(np.prod(BERT.dims(site)) * density) for site in LINEAR_SITES}
    sites = tuple((site, count_step(size) if size else 0) for site, size in sizes.items())
    return ClassKey(method, sites, tuple(range(BERT.layers)))


CASES = {
    # two sites, each A 768 x 8 and B 8 x 768: 2 (768 + 768) 8 FLOPs a token
    "lora": (lowered("lora", rank=8, sites=["query", "value"]), 50_331_648, 32 * 49_152 + 1024 * 15_360),
    # 198,272 parameters a layer, of the 2,379,264 of twelve
    "adapter": (lowered("adapter", bottleneck=64), 402_653_184, 32 * 2 * 198_272 + 1024 * 18_432),
    # 7,077,888 weights: a bit each and the shared weight for every task
    "mask": (linear("mask", 0), 14_495_514_624, 32 * (884_736 + 14_155_776) + 1024 * 41_472),
    # 0.5 % is 2,949 and 11,796 non-zeros, kept as 3,072 and 12,288: four and two sites; the ends of 5 * 3 + 12 tiles
    "diff": (linear("diff", 0.005), 75_497_472, 32 * (5 * 36_864 + 4 * 27) + 1024 * 69_120),
    # 8,448 biases a layer
    "bitfit": (BIAS_CLASS, 8_650_752, 32 * 2 * 8_448 + 1024 * 8 * 8_448),
    # 4,608 factors a layer: keys, values, and the feed-forward network's activations
    "ia3": (lowered("ia3"), 4_718_592, 32 * 2 * 4_608 + 1024 * 8 * 4_608),
    # a mask's product; a bit a weight and six scales for every task, the shared weight not again
    "onebit": (linear("onebit", 0), 14_495_514_624, 32 * (884_736 + 24) + 1024 * 69_120),
    # scores and contexts over 16 keys for each token; keys, values and how many there are
    "prefix": (lowered("prefix"), 50_331_648, 32 * (2 * 24_576 + 2) + 1024 * 4_608),
    # eight embeddings for each task, read and written
    "prompt": (lowered("prompt"), 196_608, 32 * (12_288 + 24_576)),
}


def test_every_method_declares_its_work() -> None:
    assert CASES.keys() == METHODS.keys()


@pytest.mark.parametrize("method", CASES)
def test_work_of_a_bert_base_layer(method: str) -> None:
    key, flops, moved = CASES[method]
    assert METHODS[method].work(key, BERT, TOKENS, TASKS) == (flops, moved)


def test_from_memory_bound_to_compute_bound() -> None:
    intensity = {m: (w := METHODS[m].work(CASES[m][0], BERT, TOKENS, TASKS)).flops / w.bytes for m in CASES}
    assert sorted(intensity, key=lambda m: intensity[m]) == [
        "bitfit",
        "ia3",
        "prompt",
        "diff",
        "lora",
        "prefix",
        "adapter",
        "mask",
        "onebit",
    ]
