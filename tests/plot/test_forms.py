"""Normal forms: which tokens share an entry, and that what is looked up is what was computed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support import tiny
from tokenizers import Tokenizer, models

from jpets.errors import InvalidTable, OutOfSpace
from jpets.plot import forms
from jpets.plot.forms import forms_of, normal_text, read_forms, write_forms

MARK = "\u2581"


def map_of(tokens: list[str], special: tuple[str, ...] = (), words: int | None = None) -> dict[str, str]:
    """The normal form of each token, by text."""
    tokenizer = Tokenizer(models.WordLevel({token: id for id, token in enumerate(tokens)}, tokens[0]))
    tokenizer.add_special_tokens(list(special))
    found = forms_of(tokenizer.to_str(), words or len(tokens))
    assert found[0] == 0
    np.testing.assert_array_equal(found[found], found, err_msg="a normal form is its own")
    return {token: tokens[found[id + 1] - 1] for id, token in enumerate(tokens)}


def test_tokens_alike_but_for_case_and_compatibility_share_a_form() -> None:
    tokens = ["<unk>", "THE", "The", "the", MARK + "The", MARK + "the", "ﬁ", "fi", "Straße", "café", "cafe", "##The"]
    assert map_of(tokens) == {
        **{token: token for token in tokens},
        "THE": "the",
        "The": "the",
        MARK + "The": MARK + "the",
        "ﬁ": "fi",
    }


def test_without_the_normal_text_the_least_id_stands_for_all() -> None:
    assert map_of(["<unk>", "Wort", "WORT", "ＷＯＲＴ"]) == {
        "<unk>": "<unk>", "Wort": "Wort", "WORT": "Wort", "ＷＯＲＴ": "Wort"
    }  # fmt: skip


def test_special_tokens_stay() -> None:
    assert map_of(["<unk>", "[mask]", "[MASK]"], ("[MASK]",))["[MASK]"] == "[MASK]"


def test_ids_that_the_tokenizer_lacks_stay() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "A": 1}, "a"))
    assert forms_of(tokenizer.to_str(), 4).tolist() == [0, 1, 1, 3, 4]
    assert forms_of(tokenizer.to_str(), 1).tolist() == [0, 1]


def test_letters_that_stand_for_bytes_are_read_as_what_they_stand_for() -> None:
    """A space's letter has a small one that stands for another byte, and so has a part of a letter."""
    backbone = tiny("tiny-roberta")
    vocabulary = json.loads(backbone.tokenizer_json)["model"]["vocab"]
    found = forms_of(backbone.tokenizer_json, backbone.config.vocab_size)
    for small, large in (("a", "A"), ("z", "Z")):
        assert found[vocabulary[large] + 1] == vocabulary[small] + 1 == found[vocabulary[small] + 1]
    texts = {id: text for text, id in vocabulary.items()}
    changed = {(texts[at - 1], texts[found[at] - 1]) for at in np.flatnonzero(found != np.arange(len(found)))}
    assert changed and all(ord(letter) < 0x100 for pair in changed for letter in "".join(pair).replace("Ġ", ""))
    assert all(normal_text(one) == normal_text(other) for one, other in changed)
    assert found[vocabulary["Ġ"] + 1] == vocabulary["Ġ"] + 1


def test_what_was_written_is_read_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = np.array([0, 1, 1, 3])
    digest = write_forms(tmp_path, own)
    np.testing.assert_array_equal(read_forms(tmp_path, digest, 3), own)
    with pytest.raises(InvalidTable, match="of 4 tokens, found those of 3"):
        read_forms(tmp_path, digest, 4)
    path = tmp_path / f"{digest}{forms.SUFFIX}"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(InvalidTable, match="damaged"):
        read_forms(tmp_path, digest, 3)
    path.unlink()
    with pytest.raises(InvalidTable, match="missing"):
        read_forms(tmp_path, digest, 3)

    def full(*_: object) -> None:
        raise OutOfSpace("full")

    monkeypatch.setattr(forms, "write_atomic", full)
    with pytest.raises(OutOfSpace):
        write_forms(tmp_path, own)
