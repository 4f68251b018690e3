"""A folder's tokenizer as ``transformers`` reads it, in the one form that engines need: a ``tokenizer.json``.

``tokenizer_config.json`` and other files beside ``tokenizer.json`` may contradict it, or stand there without it; the
library follows them. So the library reads the folder, and where it differs from the file, the file gets what the
library has. A file that differs in spelling only stays as it is, as fingerprints cover it. Importing the library takes
a second, which is saved where the files are seen to agree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from checkpoints.settings import read_optional
from checkpoints.tokenizer_comparison import around, same_parts
from jpets.config import BackboneConfig
from jpets.errors import InvalidBackbone
from jpets.files import read_bounded

JSON, CONFIG, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
MAX_BYTES = 16 << 20
"""Of a configuration: some list thousands of added tokens."""
MOST_BYTES = 128 << 20
"""Of a tokenizer: those of 250,000 tokens have 17 MB."""
OTHER = ("vocab.txt", "vocab.json", "sentencepiece.bpe.model", "spiece.model")
"""What the library makes a tokenizer of where there is no ``tokenizer.json``."""
CONVERTED = ("WordPiece", "BPE", "Unigram")
"""The kinds of model that the library's classes for our families have."""
TEMPLATES = "additional_chat_templates"
READ = (".json", ".txt", ".model", ".jinja", ".bpe", ".tiktoken")
"""Ends of files that the library reads whole."""
FILES = ("vocab_file", "merges_file", "spm_file")
GIVEN = ("vocab", "merges", "init_inputs", "gguf_file", "tokenizer_object", "fast_tokenizer_files")
"""Settings that the library would take for a tokenizer's parts, or for files to open, wherever these are."""
Document = dict[str, Any]

BERT_FAMILIES = ("bert", "distilbert", "electra")
BERT_CLASSES = ("BertTokenizer", "BertTokenizerFast")
NAMED = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
MEANINGLESS = frozenset(
    {
        "tokenizer_class",
        "model_max_length",  # read by itself
        "name_or_path",
        "special_tokens_map_file",
        "do_basic_tokenize",
        "never_split",
        "clean_up_tokenization_spaces",
        "padding_side",
    }
)
"""Settings that do not change what a text becomes."""


class ReadTokenizer(NamedTuple):
    """``text`` is a ``tokenizer.json``; ``usual_length`` that of ``BackboneConfig``."""

    text: str
    usual_length: int


def read_tokenizer(folder: Path, settings: Mapping[str, Any], config: BackboneConfig) -> ReadTokenizer:
    """The tokenizer of a Hugging Face folder, whose ``config.json`` is ``settings``.

    Raises ``InvalidBackbone`` where there is none, where it is code of its own, and where the library cannot read it.
    """
    beside = _read_json(folder / CONFIG)
    for name, found in ((CONFIG, beside), ("config.json", settings)):
        _refuse_code(name, found.get("auto_map"))
    if beside.get("split_special_tokens"):
        raise InvalidBackbone(f"{CONFIG}: split_special_tokens must be false, found true")
    raw = _read_text(folder)
    document = _checked(raw) if raw is not None else None
    if not has_tokenizer(folder):
        raise InvalidBackbone(f"expected {JSON} or {' or '.join(OTHER)} in the folder; save the tokenizer there")
    if document is not None and raw is not None:
        alone = not (folder / CONFIG).is_file()
        if (alone and _kind(document) not in CONVERTED) or _agrees(folder, document, beside, settings):
            return ReadTokenizer(raw, _usual_length(beside.get("model_max_length"), config))
    return _converted(folder, raw, config)


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (JSON, *OTHER))


def _read_json(path: Path) -> Document:
    return read_optional(path, InvalidBackbone, MAX_BYTES)


def _read_text(folder: Path) -> str | None:
    try:
        return read_bounded(folder / JSON, MOST_BYTES).decode()
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InvalidBackbone(
            f"{JSON} must be a JSON document of at most {MOST_BYTES} bytes; save the fast tokenizer again"
        ) from error


def _checked(text: str) -> Document:
    try:
        document: Document = json.loads(text)
        whole = isinstance(document["model"], dict) and all(
            isinstance(token["id"], int) and isinstance(token["content"], str) for token in document["added_tokens"]
        )
        whole &= isinstance(document.get("truncation") or {}, dict)
    except (ValueError, RecursionError, KeyError, TypeError):
        whole = False
    if not whole:
        raise InvalidBackbone(f"{JSON} must be what the tokenizers library writes; save the fast tokenizer again")
    return document


def _refuse_code(name: str, auto_map: Any) -> None:
    found = auto_map.get("AutoTokenizer") if isinstance(auto_map, Mapping) else auto_map
    if found:
        raise InvalidBackbone(
            f"{name}: auto_map names a tokenizer with code of its own, which is not run; save the tokenizer as {JSON} "
            "and remove auto_map"
        )


def _kind(document: Document) -> str:
    """The kind of a tokenizer's model; old files do not say it of their own families."""
    model = document["model"]
    return str(model.get("type") or ("BPE" if "merges" in model else "WordPiece"))


def _usual_length(length: Any, config: BackboneConfig) -> int:
    fits = isinstance(length, (int, float)) and not isinstance(length, bool) and 0 < length < config.max_positions
    return int(length) if fits else 0


def _agrees(folder: Path, document: Document, beside: Document, settings: Mapping[str, Any]) -> bool:
    """Whether the file is seen to be what the library's BERT tokenizer makes of the folder. False where in doubt."""
    special = _read_json(folder / SPECIAL)
    named = beside.get("tokenizer_class") or settings.get("tokenizer_class") or BERT_CLASSES[0]
    own = {key: value for key, value in beside.items() if key not in MEANINGLESS and value not in ([], {})}
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": own.pop("tokenize_chinese_chars", True),
        "strip_accents": own.pop("strip_accents", None),
        "lowercase": own.pop("do_lower_case", True),
    }
    tokens = {str(token.pop("id")): token for token in map(dict, document["added_tokens"])}
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    plain = [{"content": content, "special": True, **flags} for content in NAMED.values()]
    decoder = own.pop("added_tokens_decoder", tokens)
    model = {key: value for key, value in document["model"].items() if key not in ("vocab", "type")}
    return (
        settings.get("model_type") in BERT_FAMILIES
        and named in BERT_CLASSES
        and not (folder / "added_tokens.json").exists()
        and all(NAMED.get(key) == value for key, value in [*own.items(), *_contents(special)])
        and len(tokens) == len(plain)
        and all(token in tokens.values() for token in plain)
        and decoder == tokens
        and document.get("normalizer") == normalizer
        and document.get("pre_tokenizer") == {"type": "BertPreTokenizer"}
        and _kind(document) == "WordPiece"
        and model == {"unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
        and _is_bert(document.get("post_processor"), {token["content"]: int(id) for id, token in tokens.items()})
        and (document.get("truncation") or {}).get("direction", "Right") == "Right"
    )


def _contents(special: Document) -> list[tuple[str, Any]]:
    """The tokens in a map of special tokens, by key: None for one with flags other than the default ones."""
    found = []
    for key, value in special.items():
        flags = dict(value) if isinstance(value, dict) else {"content": value}
        content = flags.pop("content", None)
        found.append((key, None if any(flags.values()) else content))
    return found


def _is_bert(processor: Any, ids: Mapping[str, int]) -> bool:
    """Whether it sets ``[CLS]`` and ``[SEP]`` around texts as BERT has them, the second text of type 1."""
    if not isinstance(processor, dict):
        return False
    cls, sep = ids.get("[CLS]"), ids.get("[SEP]")
    if processor.get("type") == "BertProcessing":
        return processor.get("cls") == ["[CLS]", cls] and processor.get("sep") == ["[SEP]", sep]

    def piece(kind: str, id: str, type_id: int) -> Document:
        return {kind: {"id": id, "type_id": type_id}}

    single = [piece("SpecialToken", "[CLS]", 0), piece("Sequence", "A", 0), piece("SpecialToken", "[SEP]", 0)]
    pair = [*single, piece("Sequence", "B", 1), piece("SpecialToken", "[SEP]", 1)]
    known = processor.get("special_tokens")
    if not isinstance(known, dict):
        return False
    return (
        processor.get("type") == "TemplateProcessing"
        and processor.get("single") == single
        and processor.get("pair") == pair
        and [isinstance(own := known.get(name), dict) and own.get("ids") for name in ("[CLS]", "[SEP]")]
        == [[cls], [sep]]
    )


def _converted(folder: Path, raw: str | None, config: BackboneConfig) -> ReadTokenizer:
    """The tokenizer as the library reads it; where there is a file, with only those parts changed that differ."""
    _check_what_is_read(folder)
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        theirs = Tokenizer.from_str(found.backend_tokenizer.to_str())
        own = Tokenizer.from_str(raw) if raw is not None else theirs
        merged, changed = _merged(own, theirs, config.type_vocab_size)
    except Exception as error:  # of any kind: they vary with the file
        raise InvalidBackbone(
            f"transformers cannot read the folder's tokenizer ({type(error).__name__}), of which it must make a fast "
            f"one; save it there as {JSON}, and remove what contradicts it in {CONFIG}"
        ) from error
    if "token_type_ids" not in found.model_input_names and config.type_vocab_size > 1 and _has_types(theirs):
        merged["post_processor"], changed = _without_types(merged["post_processor"]), True
    left = found.truncation_side == "left"
    spelled = (json.loads(raw).get("truncation") or {}).get("direction", "Right") if raw is not None else "Right"
    if raw is None or changed or left != (spelled == "Left"):
        merged["padding"], merged["truncation"] = None, None
        if left:
            stand_in = {"max_length": config.max_positions, "strategy": "LongestFirst", "stride": 0}
            merged["truncation"] = {"direction": "Left", **stand_in}
        raw = json.dumps(merged, ensure_ascii=False)
    return ReadTokenizer(raw, _usual_length(found.model_max_length, config))


def _check_what_is_read(folder: Path) -> None:
    """Refuses what would make the library open files elsewhere, or fill the memory. Raises ``InvalidBackbone``."""
    for name in (CONFIG, SPECIAL):
        found = _read_json(folder / name)
        files = [key for key in found if name == SPECIAL and key.endswith("_file")]
        files += [key for key in FILES if "/" in str(found.get(key)) or "\\" in str(found.get(key))]
        if given := [key for key in (*GIVEN, *files) if found.get(key) not in (None, [], {}, "")]:
            raise InvalidBackbone(f"{name}: expected no {given[0]}, which tokenizers are not made of; remove it")
    for path in (*folder.iterdir(), *(folder / TEMPLATES).glob("*")):
        if path.is_file() and path.suffix in READ and (size := path.stat().st_size) > MOST_BYTES:
            raise InvalidBackbone(f"{path.name[:100]}: expected at most {MOST_BYTES:,} bytes, found {size:,}")


def _merged(own: Tokenizer, theirs: Tokenizer, types: int) -> tuple[Document, bool]:
    """``own`` with those parts of ``theirs`` that act differently; also whether there are any."""
    document, other = json.loads(own.to_str()), json.loads(theirs.to_str())
    changed = {part: other[part] for part, equal in same_parts(own, theirs, types).items() if not equal}
    return {**document, **changed}, bool(changed)


def _has_types(tokenizer: Tokenizer) -> bool:
    return any(any(types) for _, types in around(tokenizer, tokenizer, 1 << 20))


def _without_types(processor: Document | None) -> Document:
    """A processor that gives every token type 0. Raises ``InvalidBackbone`` for a kind that is not known."""
    kind = processor["type"] if processor is not None else None
    if processor is None or kind == "ByteLevel":
        plain: Document = {"type": "TemplateProcessing", "special_tokens": {}}
        first, second = ({"Sequence": {"id": id, "type_id": 0}} for id in "AB")
        return {**plain, "single": [first], "pair": [first, second]}
    if kind == "TemplateProcessing":

        def zero(pieces: list[Document]) -> list[Document]:
            return [{kind: {**own, "type_id": 0} for kind, own in piece.items()} for piece in pieces]

        return {**processor, "single": zero(processor["single"]), "pair": zero(processor["pair"])}
    if kind == "BertProcessing":
        (sep, sep_id), (cls, cls_id) = processor["sep"], processor["cls"]
        pieces = {name: {"SpecialToken": {"id": name, "type_id": 0}} for name in (cls, sep)}
        first, second = ({"Sequence": {"id": id, "type_id": 0}} for id in "AB")
        single = [pieces[cls], first, pieces[sep]]
        known = {name: {"id": name, "ids": [id], "tokens": [name]} for name, id in ((cls, cls_id), (sep, sep_id))}
        pair = [*single, second, pieces[sep]]
        return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": known}
    raise InvalidBackbone(
        f"{CONFIG}: model_input_names without token_type_ids needs a tokenizer whose post_processor is one of "
        f"TemplateProcessing and BertProcessing, found {kind}"
    )
