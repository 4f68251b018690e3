"""A folder's tokenizer is what transformers makes of it, whatever its files say against each other."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import ByteLevelBPETokenizer, Tokenizer, models, normalizers, pre_tokenizers, processors

from checkpoints import tokenizer
from checkpoints.tokenizer import read_tokenizer
from jpets.config import BackboneConfig
from jpets.errors import InvalidBackbone
from jpets.tokenizing import TextEncoder
from jpets.types import Preprocessing, Query

FIXTURES = Path(__file__).parents[1] / "fixtures"
CONFIG = BackboneConfig("bert", 900, 16, 2, 2, 32, 24)
NOTHING_BUT_CUT = Preprocessing(truncation=True)
TEXTS: list[tuple[str, str | None]] = [
    ("Hello World", "Again"),
    ("a Library of déjà VU, naïve Ü", None),
    ("中国人 and 文", "x中y"),
    ("spelled [SEP] and [MASK] <mask> <pad> </s> [PAD] <e1> [unused1]", "<s> [CLS]"),
    ("  two  spaces\tand\nlines \x01 ", None),
]
Write = Callable[..., Path]


def bert_vocab() -> dict[str, int]:
    own = json.loads((FIXTURES / "tiny-bert" / "tokenizer.json").read_text())["model"]["vocab"]
    more = [
        *"ABCDEFGHIJKLMNOPQRSTUVWXYZéàïÜ中国人文",
        "##中",
        "##国",
        "##人",
        "Hello",
        "World",
        "[unused1]",
        "d",
        "##é",
    ]
    return {**own, **{word: len(own) + at for at, word in enumerate(word for word in more if word not in own)}}


@pytest.fixture
def bert(tmp_path: Path) -> Write:
    """A BERT folder: its tokenizer is changed as told, and so are the files beside it."""

    def write(*, settings: Any = None, normalizer: Any = None, special: Any = None, alone: bool = False) -> Path:
        document = json.loads((FIXTURES / "tiny-bert" / "tokenizer.json").read_text())
        document["model"]["vocab"] = bert_vocab()
        document["normalizer"].update(normalizer or {})
        (tmp_path / "config.json").write_text('{"model_type": "bert"}')
        (tmp_path / "tokenizer.json").write_text(json.dumps(document))
        if not alone:
            (tmp_path / "tokenizer_config.json").write_text(
                json.dumps({"tokenizer_class": "BertTokenizer", **(settings or {})})
            )
        if special is not None:
            (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
        return tmp_path

    return write


def settings_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def compare(folder: Path, config: BackboneConfig = CONFIG) -> str:
    """Every text has the ids and types of the library's tokenizer; returns the ``tokenizer.json``."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    read = read_tokenizer(folder, settings_of(folder), config)
    own = TextEncoder(read.text, config.vocab_size, config.type_vocab_size, 200, read.usual_length)
    for text, pair in TEXTS:
        limit = min(200, theirs.model_max_length)
        expected = theirs(text, pair, truncation=True, max_length=limit)
        found = own.encode(Query(None, text, pair), NOTHING_BUT_CUT)
        assert found.ids.tolist() == expected["input_ids"], text
        types = (
            expected.get("token_type_ids", [0] * len(found.ids)) if config.type_vocab_size > 1 else [0] * len(found.ids)
        )
        assert found.types.tolist() == types, text
    return read.text


@pytest.mark.parametrize(
    ("settings", "normalizer"),
    [
        ({"do_lower_case": False}, None),
        ({"do_lower_case": True}, {"lowercase": False}),
        ({"strip_accents": False}, None),
        ({"strip_accents": True, "do_lower_case": False}, None),
        ({"tokenize_chinese_chars": False}, None),
        ({}, {"handle_chinese_chars": False}),
        ({"model_input_names": ["input_ids", "attention_mask"]}, None),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, {"lowercase": False}),
        ({"tokenizer_class": "DistilBertTokenizer"}, None),
        ({"extra_special_tokens": ["[unused1]"]}, None),
        ({"additional_special_tokens": ["<e1>", "<e2>"]}, None),
        ({"truncation_side": "left", "model_max_length": 8}, None),
        ({"model_max_length": 9}, None),
    ],
)
def test_settings_beside_the_file(bert: Write, settings: dict[str, Any], normalizer: dict[str, Any] | None) -> None:
    folder = bert(settings=settings, normalizer=normalizer)
    assert Tokenizer.from_str(compare(folder)).get_vocab_size() >= len(bert_vocab())


def test_a_cased_file_alone(bert: Write) -> None:
    compare(bert(normalizer={"lowercase": False}, alone=True))


def test_a_file_that_says_the_same_stays_and_costs_no_import(bert: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = bert(
        settings={"do_lower_case": True, "strip_accents": None, "model_max_length": 20, "mask_token": "[MASK]"},
        special={"cls_token": "[CLS]", "sep_token": {"content": "[SEP]", "lstrip": False, "normalized": False}},
    )
    file = (folder / "tokenizer.json").read_text()
    assert compare(folder) == file
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert read_tokenizer(folder, settings_of(folder), CONFIG) == (file, 20)
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    with pytest.raises(ImportError):
        read_tokenizer(folder, settings_of(folder), CONFIG)


@pytest.mark.parametrize("name", ["tiny-bert", "tiny-distilbert", "tiny-electra", "tiny-roberta"])
def test_another_spelling_is_no_other_tokenizer(name: str) -> None:
    folder = FIXTURES / name
    types = 2 if "roberta" not in name else 1
    config = BackboneConfig(name.removeprefix("tiny-"), 900, 16, 2, 2, 32, 24, type_vocab_size=types)
    assert read_tokenizer(folder, settings_of(folder), config).text == (folder / "tokenizer.json").read_text()


def test_a_vocabulary_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "vocab.txt").write_text("\n".join(bert_vocab()), encoding="utf-8")
    compare(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false, "tokenizer_class": "BertTokenizer"}')
    compare(tmp_path)


def roberta(folder: Path, settings: dict[str, Any] | None, *, json_file: bool = True) -> Path:
    bpe = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    bpe.train_from_iterator(["Hello World again, a library"] * 9, 300, 1, special_tokens=special)
    bpe._tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), True, False)
    if json_file:
        bpe.save(str(folder / "tokenizer.json"))
    bpe.save_model(str(folder))
    (folder / "config.json").write_text('{"model_type": "roberta"}')
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "RobertaTokenizer", **settings}))
    return folder


@pytest.mark.parametrize("json_file", [True, False])
@pytest.mark.parametrize("settings", [None, {"add_prefix_space": True}, {"add_prefix_space": False}])
def test_bytes(tmp_path: Path, settings: dict[str, Any] | None, json_file: bool) -> None:
    config = BackboneConfig("roberta", 900, 16, 2, 2, 32, 24, type_vocab_size=1)
    compare(roberta(tmp_path, settings, json_file=json_file), config)


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces(tmp_path: Path, prefix: bool) -> None:
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((c, -4.0) for c in "\u2581aeloHWrd中")]
    own = Tokenizer(models.Unigram(pieces, unk_id=3))
    own.normalizer = normalizers.NFKC()
    own.pre_tokenizer = pre_tokenizers.Metaspace()
    own.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    own.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "xlm-roberta"}')
    settings = {"tokenizer_class": "XLMRobertaTokenizer", "add_prefix_space": prefix}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    compare(tmp_path, BackboneConfig("xlm-roberta", 900, 16, 2, 2, 32, 24, type_vocab_size=1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"auto_map": {"AutoTokenizer": ["own.Slow", "own.Fast"]}}, "auto_map names a tokenizer with code of its own"),
        ({"auto_map": ["own.Slow", None]}, "auto_map names a tokenizer with code of its own"),
        ({"split_special_tokens": True}, "split_special_tokens must be false"),
        ({"truncation_side": "middle"}, r"transformers cannot read the folder's tokenizer \(ValueError\)"),
    ],
)
def test_what_cannot_be_followed_is_refused(bert: Write, settings: dict[str, Any], message: str) -> None:
    folder = bert(settings=settings)
    with pytest.raises(InvalidBackbone, match=message):
        read_tokenizer(folder, settings_of(folder), CONFIG)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json"])
def test_a_file_of_any_size_is_not_read_whole(bert: Write, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """An archive of a megabyte may hold gigabytes of spaces."""
    monkeypatch.setattr(tokenizer, "MAX_BYTES", 1000)
    monkeypatch.setattr(tokenizer, "MOST_BYTES", 1000)
    folder = bert()
    (folder / name).write_text("{}" + " " * 1000)
    with pytest.raises(InvalidBackbone, match="of at most 1000 bytes"):
        read_tokenizer(folder, settings_of(folder), CONFIG)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("key", ["vocab", "merges", "gguf_file", "init_inputs", "vocab_file"])
def test_a_folder_names_no_file_elsewhere(tmp_path: Path, bert: Write, name: str, key: str) -> None:
    """The library would open it, whatever it is."""
    secret = tmp_path / "secret.txt"
    secret.write_text("[UNK]\nsecret\n")
    folder = bert(settings={"do_lower_case": False})
    given = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps({**given, key: str(secret)}))
    (folder / "vocab.txt").write_text("\n".join(bert_vocab()))
    for alone in (False, True):
        if alone:
            (folder / "tokenizer.json").unlink()
        with pytest.raises(InvalidBackbone, match=f"{name}: expected no {key}"):
            read_tokenizer(folder, settings_of(folder), CONFIG)


def test_files_that_the_library_reads_are_bounded(bert: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "MOST_BYTES", 1 << 20)
    folder = bert(settings={"do_lower_case": False})
    (folder / "vocab.txt").write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(InvalidBackbone, match=r"vocab\.txt: expected at most 1,048,576 bytes"):
        read_tokenizer(folder, settings_of(folder), CONFIG)


@pytest.mark.parametrize(
    "document",
    [
        {"model": {}, "added_tokens": [5]},
        {"model": {}, "added_tokens": [{"content": "x"}]},
        {"model": {}, "added_tokens": [], "truncation": "x"},
        {"model": {}, "added_tokens": [{"id": "1", "content": "x"}]},
    ],
)
def test_a_file_that_no_library_wrote_is_refused(bert: Write, document: Any) -> None:
    folder = bert()
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(InvalidBackbone, match="what the tokenizers library writes"):
        read_tokenizer(folder, settings_of(folder), CONFIG)


def test_a_vocabulary_without_what_a_model_needs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "vocab.txt").write_text("hello\nworld\n")
    with pytest.raises(InvalidBackbone):
        read_tokenizer(tmp_path, settings_of(tmp_path), CONFIG)


def test_a_setting_that_is_no_json(bert: Write) -> None:
    folder = bert()
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(InvalidBackbone, match=r"tokenizer_config\.json must be a JSON document"):
        read_tokenizer(folder, settings_of(folder), CONFIG)
