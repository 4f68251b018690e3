"""Whether a checkpoint was trained on the tokens that its backbone makes of texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from checkpoints.backbone import Backbone
from checkpoints.sentence import lowered, model_folder, transformer_settings
from checkpoints.tokenizer import has_tokenizer, read_tokenizer
from checkpoints.tokenizer_comparison import differences, read_otherwise, sets_space
from jpets.config import BackboneConfig
from jpets.errors import InvalidBackbone, InvalidTask
from jpets.types import Preprocessing


class Compared(NamedTuple):
    """Notes on a tokenizer, and how many tokens it cuts texts to, where these are more than of the backbone's."""

    notes: tuple[str, ...] = ()
    max_length: int | None = None

    def cut(self, rule: Preprocessing) -> Preprocessing:
        """``rule``, of this length where it has none of its own."""
        return rule if rule.max_length is not None else dataclasses.replace(rule, max_length=self.max_length)


def check_tokenizer(folder: Path, settings: Mapping[str, Any], config: BackboneConfig, backbone: Backbone) -> Compared:
    """The tokenizer in the folder, if there is one. ``settings`` are those of the model's ``config.json``.

    Raises ``InvalidTask`` for a model whose tokenizer makes other tokens of a text than the backbone's.
    """
    inner = model_folder(folder)
    if not has_tokenizer(inner):
        return Compared()
    try:
        own, length = read_tokenizer(inner, settings, config)
        ids = tokenizers.Tokenizer.from_str(own).get_vocab()
    except InvalidBackbone as error:
        if not (inner / "tokenizer.json").is_file():  # of a kind that needs another library
            return Compared(("its tokenizer could not be compared with the backbone's",))
        raise InvalidTask(error.message) from error
    except Exception as error:  # the tokenizers library raises bare Exception for a file that it cannot read
        raise InvalidTask("tokenizer.json cannot be read; save the fast tokenizer again") from error
    theirs = tokenizers.Tokenizer.from_str(backbone.tokenizer_json).get_vocab()
    _refuse_tokens([token for token, id in ids.items() if theirs.get(token) != id], "have other numbers than", backbone)
    parts = differences(own, backbone.tokenizer_json, config.type_vocab_size)
    if parts and transformer_settings(folder).get("do_lower_case") is True:  # the library does it before the tokenizer
        own = lowered(own)
        parts = differences(own, backbone.tokenizer_json, config.type_vocab_size)
    if parts:
        raise InvalidTask(
            f"the tokenizer's {', '.join(parts)}: expected what the backbone {backbone.name!r} has, found another, so "
            "that texts would become other tokens (as of a model for lower-case texts); give the backbone that the "
            "model was trained on, with the model's own tokenizer files"
        )
    _refuse_tokens(read_otherwise(own, backbone.tokenizer_json), "are read from texts otherwise than", backbone)
    notes: tuple[str, ...] = ()
    if sets_space(own) != sets_space(backbone.tokenizer_json):
        notes = ("its tokenizer and the backbone's differ in whether a space is set before a text's first word",)
    own_length, usual = (each or config.max_positions for each in (length, backbone.config.usual_length))
    if own_length < usual:
        notes += (
            f"its tokenizer cuts texts to {own_length} tokens where asked, the backbone's to {usual}: --max-length",
        )
    return Compared(notes, own_length if own_length > usual else None)


def _refuse_tokens(found: list[str], how: str, backbone: Backbone) -> None:
    if found:
        listed = ", ".join(repr(token[:40]) for token in sorted(found)[:3])
        raise InvalidTask(
            f"tokenizer.json: {len(found)} tokens {how} in the backbone {backbone.name!r}, such as {listed}; give the "
            "backbone that the model was trained on, with the model's own tokenizer"
        )
