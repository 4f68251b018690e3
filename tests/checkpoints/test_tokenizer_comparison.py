"""A model that was trained on other tokens than its backbone makes of texts is refused, whatever part does it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from full_model import biases, write_full
from support import FIXTURES, tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from checkpoints.imports.heads import Wishes
from checkpoints.imports.task import read_adapter, read_model
from checkpoints.tokenizer_comparison import differences, read_otherwise
from jpets.errors import InvalidTask

FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
PIECE = "##able"
"""A token of the vocabulary, and several where it is written in a text: so are ``[unused1]`` and its like of BERT."""
Document = dict[str, Any]


def added(*tokens: str, **flags: bool) -> str:
    document: Document = json.loads(tiny().tokenizer_json)
    ids = document["model"]["vocab"]
    known = {token["content"]: token for token in document["added_tokens"]}
    known |= {token: {"id": ids[token], "content": token, "special": True, **FLAGS, **flags} for token in tokens}
    return json.dumps({**document, "added_tokens": sorted(known.values(), key=lambda token: token["id"])})


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_tokens_that_are_found_before_words_are_divided(kind: str, tmp_path: Path) -> None:
    """The one beside ``[MASK]`` changes what texts become only around a token that few texts have."""
    if kind == "model":
        folder = write_full(tmp_path, biases)
    else:
        folder = tmp_path / "own"
        shutil.copytree(FIXTURES / "imports" / "peft" / "lora", folder)
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    (folder / "tokenizer.json").write_text(added(PIECE))
    read = read_model if kind == "model" else read_adapter
    with pytest.raises(
        InvalidTask, match=f"2 tokens are read from texts otherwise than .* 'tiny-bert', such as '{PIECE}'"
    ):
        read(folder, tiny(), Wishes())
    (folder / "tokenizer.json").write_text(added("[MASK]", lstrip=True))
    assert read(folder, tiny(), Wishes()) is not None


def test_a_word_that_is_found_inside_others() -> None:
    word = "file"
    found = read_otherwise(added(word), tiny().tokenizer_json)
    assert found and all(word in token and token != word for token in found)
    assert read_otherwise(added(word, single_word=True), tiny().tokenizer_json) == []


@pytest.mark.parametrize("tokens", [(), ("!",), ("[MASK]",)])
def test_tokens_that_would_be_found_anyway_change_nothing(tokens: tuple[str, ...]) -> None:
    assert read_otherwise(added(*tokens), tiny().tokenizer_json) == []


def byte_level(merges: list[tuple[str, str]], *, space: bool) -> str:
    vocab = {token: at for at, token in enumerate(("a", "b", "c", "ab", "bc", "abc", "Ġ", "Ġa"))}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    tokenizer.decoder = decoders.ByteLevel()
    return str(tokenizer.to_str())


@pytest.mark.parametrize("space", [False, True])
def test_other_merges_of_one_vocabulary(space: bool) -> None:
    """A space before a text's first word is told by itself, in a note."""
    ab, bc, whole = ("a", "b"), ("b", "c"), ("ab", "c")
    own = byte_level([ab, bc, whole], space=True)
    other = byte_level([bc, ab, whole], space=space)
    assert read_otherwise(own, other) == ["abc"] and differences(own, other, 1) == []
    assert read_otherwise(own, byte_level([ab, bc, whole], space=space)) == []


def test_a_file_that_leaves_out_what_is_null() -> None:
    documents = [json.loads(byte_level([], space=True)) for _ in range(2)]
    for document in documents:
        document["pre_tokenizer"] = None
    del documents[1]["pre_tokenizer"]
    full, short = map(json.dumps, documents)
    assert differences(full, short, 1) == [] and read_otherwise(full, short) == []
