"""What two tokenizers, each a ``tokenizer.json``, make of texts otherwise."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

Document = dict[str, Any]
SPACE = '"add_prefix_space": true'


def differences(own: str, other: str, types: int) -> list[str]:
    """The parts of a ``tokenizer.json`` that make something else of a text than those of another one, apart from the
    tokens' numbers. ``types``: how many token types the model has."""
    documents = [json.loads(text) for text in (own, other)]
    sides = [(document.get("truncation") or {}).get("direction", "Right") for document in documents]
    one, two = (Tokenizer.from_str(json.dumps(_plain(document))) for document in documents)
    same = same_parts(one, two, types)
    found = [part for part in ("normalizer", "post_processor") if not same[part]]
    if _divider(documents[0]) != _divider(documents[1]):
        found.append("pre_tokenizer")
    return [*found, *(["truncation's direction"] if sides[0] != sides[1] else [])]


def sets_space(tokenizer_json: str) -> bool:
    """Whether a byte-level tokenizer sets a space before a text, as those for texts that were divided into words do."""
    return '"add_prefix_space":true' in json.dumps(
        json.loads(tokenizer_json).get("pre_tokenizer"), separators=(",", ":")
    )


def read_otherwise(own: str, other: str) -> list[str]:
    """The tokens of ``own`` whose spelling becomes other tokens by ``other``: it was given other merges, or tokens that
    are found before texts are divided. That a space may be set before a text is left out, as in ``differences``."""
    documents = [_plain(json.loads(text)) for text in (own, other)]
    if _told(documents[0]["model"]) == _told(documents[1]["model"]) and _added(documents[0]) == _added(documents[1]):
        return []  # the usual case, and a vocabulary may be large
    first, second = (Tokenizer.from_str(json.dumps(document)) for document in documents)
    vocab = first.get_vocab()
    spelled = first.decode_batch([[id] for id in vocab.values()], skip_special_tokens=False)
    found = (each.encode_batch(spelled, add_special_tokens=False) for each in (first, second))
    return [token for token, mine, theirs in zip(vocab, *found, strict=True) if mine.ids != theirs.ids]


def same_parts(own: Tokenizer, theirs: Tokenizer, types: int) -> dict[str, bool]:
    """Which parts act alike."""
    document, other = json.loads(own.to_str()), json.loads(theirs.to_str())
    return {
        "normalizer": _local(document) == _local(other),
        "pre_tokenizer": document["pre_tokenizer"] == other["pre_tokenizer"],
        "model": _told(document["model"]) == _told(other["model"]),
        "added_tokens": _added(document) == _added(other),
        "post_processor": around(own, theirs, types) == around(theirs, theirs, types),
    }


def _told(model: Document) -> Document:
    """Settings without those that are empty; merges in one spelling."""
    told = {key: value for key, value in model.items() if value not in (None, "", False)}
    if "merges" in told:
        told["merges"] = [each if isinstance(each, str) else " ".join(each) for each in told["merges"]]
    return told


def _added(document: Document) -> list[Document]:
    return sorted(document["added_tokens"], key=str)


def _local(document: Document) -> list[Document]:
    """Its normalizers, but those that only change spaces where words are divided by spaces anyway."""
    normalizer, divider = document["normalizer"], document["pre_tokenizer"] or {}
    parts = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    first = (divider.get("pretokenizers") or [divider])[0]
    if first.get("type") != "WhitespaceSplit":
        return list(parts)
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    return [part for part in parts if part != spaces and part["type"] != "Strip"]


def around(tokenizer: Tokenizer, encoder: Tokenizer, types: int) -> list[tuple[list[int], list[int]]]:
    """Ids and types of a text and of a pair, with what the tokenizer sets around them; ``types`` of the model."""
    first, second = (encoder.encode(text, add_special_tokens=False) for text in ("a", "a b c"))
    found = [tokenizer.post_process(first, None, True), tokenizer.post_process(first, second, True)]
    return [(each.ids, [type % max(1, types) for type in each.type_ids]) for each in found]


def _plain(document: Document) -> Document:
    """Without what acts on whole texts alone: cutting, padding, and a space set before them."""
    divider = json.dumps(document.get("pre_tokenizer")).replace('"add_prefix_space": false', SPACE)
    return {**document, "truncation": None, "padding": None, "pre_tokenizer": json.loads(divider)}


def _divider(document: Document) -> Document | None:
    """What divides texts into words, but for ``sets_space``, which concerns a text's first word alone."""
    found = document.get("pre_tokenizer")
    parts = [found] if found is None or "pretokenizers" not in found else found["pretokenizers"]
    less = ("add_prefix_space", "trim_offsets")
    plain = [part and {key: value for key, value in part.items() if key not in less} for part in parts]
    return {"parts": plain}
