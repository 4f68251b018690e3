"""From logits to probabilities, and vectors of length 1."""

from __future__ import annotations

import numpy as np
from scipy.special import expit

from jpets.types import FloatArray


def softmax(logits: FloatArray) -> FloatArray:
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(-1, keepdims=True), np.float32)


def sigmoid(logits: FloatArray) -> FloatArray:
    return np.asarray(expit(logits), np.float32)


def normalized(vector: FloatArray) -> FloatArray:
    norm = float(np.linalg.norm(vector))
    return vector / np.float32(norm) if norm > 0 else vector
