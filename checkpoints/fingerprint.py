"""The fingerprint of a backbone: equal where, and only where, a task's numbers mean the same.

It covers the encoder's tensors under canonical names (values as little-endian f32, whatever format they came in), the
tokenizer, and the settings that change results. Truncation and padding are not part of it: the engine sets its own.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from checkpoints.canonical import PADDING_POSITION, FloatArray
from jpets.config import BackboneConfig
from jpets.errors import InvalidBackbone

FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}")
LATER: Mapping[str, object] = MappingProxyType({"embedding_size": 0, "padding_id": 1, "window": (0, 0)})
"""Settings that came later, with the values that every earlier backbone has: only other values enter."""


LIMITS = ("usual_length", "table_rows", "table_format")
"""Settings that say how texts are cut, how much fits and how it is stored, not what numbers mean; like truncation and
padding they never enter."""


def fingerprint(
    tensors: Mapping[str, FloatArray], tokenizer_json: str, config: BackboneConfig, root: str | None = None
) -> str:
    """``sha256:<hex>`` of a backbone given by its canonical tensors, and by the digest of the n-gram layers of its root
    if it looks tokens up. Raises ``InvalidBackbone``."""
    digest = hashlib.sha256(b"jpets backbone 1\n")
    settings = {**config.to_dict(), "norm_eps": float(config.norm_eps)}
    settings = {key: value for key, value in settings.items() if key not in LIMITS}
    settings = {key: value for key, value in settings.items() if key not in LATER or value != LATER[key]}
    for part in (_canonical_json(settings), canonical_tokenizer(tokenizer_json)):
        digest.update(f"{len(part)}\n".encode())
        digest.update(part)
    for name in sorted(tensors):
        if name == PADDING_POSITION and not tensors[name].any():
            continue  # the usual value, which earlier fingerprints do not cover
        digest.update(f"{name} {list(tensors[name].shape)}\n".encode())
        digest.update(np.ascontiguousarray(tensors[name], "<f4").data)
    if root is not None:
        digest.update(f"root {root}\n".encode())
    return f"sha256:{digest.hexdigest()}"


def canonical_tokenizer(tokenizer_json: str) -> bytes:
    """A ``tokenizer.json`` without truncation and padding, in one spelling."""
    try:
        data = json.loads(tokenizer_json)
    except (ValueError, RecursionError) as error:
        raise InvalidBackbone("tokenizer.json must be a JSON document; save the fast tokenizer again") from error
    if not isinstance(data, dict):
        raise InvalidBackbone(f"tokenizer.json must hold a JSON object, found {type(data).__name__}")
    return _canonical_json({key: value for key, value in data.items() if key not in ("truncation", "padding")})


def _canonical_json(data: object) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
