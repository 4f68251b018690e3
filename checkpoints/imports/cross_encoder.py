"""Cross-encoders of Sentence-Transformers: classifiers of pairs of texts, with what that library does around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from checkpoints.backbone import Backbone
from checkpoints.imports.imported import Imported
from checkpoints.sentence import (
    MODULES,
    PROMPTS,
    check_case,
    check_settings,
    listed_modules,
    most_tokens,
    note_on_prompts,
    prompts_of,
    torch_class,
    transformer_settings,
)
from checkpoints.settings import expect, read_optional
from jpets.types import Preprocessing, Relevance

KIND = "CrossEncoder"
RELEVANCES: Mapping[str, Relevance] = MappingProxyType({"Identity": "raw", "Sigmoid": "sigmoid"})
"""Classes of ``torch.nn`` behind a model's one output."""
EXPECTED: Mapping[str, object] = MappingProxyType(
    {
        "transformer_task": "sequence-classification",
        "module_output_name": "scores",
        "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    }
)
OLDER = "sbert_ce_default_activation_function"
"""In ``config.json``, before version 4 of the library."""


def is_cross_encoder(folder: Path) -> bool:
    """Whether the library's own files say so. Raises ``InvalidTask`` for files that cannot be read."""
    return bool(_said(folder))


def as_cross_encoder(
    found: Imported, folder: Path, settings: Mapping[str, Any], backbone: Backbone, problems: list[str]
) -> Imported:
    """``found``, a classifier, as one that reads pairs as the library does, where the folder is one of its
    cross-encoders; else as it is.

    ``settings`` are those of ``config.json``. Texts are cut, and the one output for a pair is ranked by as it is or by
    its sigmoid.
    """
    own = _said(folder)
    nested = settings.get("sentence_transformers")
    inner = nested if isinstance(nested, dict) else {}
    written = own.get("activation_fn") or inner.get("activation_fn") or settings.get(OLDER)
    if not own and written is None:
        return found
    notes: tuple[str, ...] = ()
    transformer = transformer_settings(folder)
    check_case(expect(transformer, "do_lower_case", bool, False, problems), backbone.tokenizer_json, problems)
    if own:
        default, prompts = prompts_of(folder, problems, KIND)
        if default is not None and prompts.get(default):
            found_text = prompts[default][:80]
            problems.append(f"{PROMPTS}: a cross-encoder's default prompt is not supported, found {found_text!r}")
        notes = note_on_prompts(default, prompts, "send them as part of a text")
        kinds = [module.kind for module in listed_modules(folder)] if (folder / MODULES).is_file() else []
        if kinds not in ([], ["Transformer"]):
            problems.append(f"{MODULES}: expected a Transformer alone in a cross-encoder, found {str(kinds)[:80]}")
        check_settings(transformer, EXPECTED, problems)
    rule = Preprocessing(most_tokens(folder, transformer, backbone.config.max_positions, problems), True)
    head = found.head
    if head.outputs == 1 and written is not None:
        relevance = RELEVANCES.get(torch_class(written) or "")
        if relevance is None:
            problems.append(f"activation_fn: expected torch.nn's Identity or Sigmoid, found {str(written)[:80]!r}")
        head = dataclasses.replace(head, relevance=relevance)
    return dataclasses.replace(found, head=head, notes=(*found.notes, *notes), preprocessing=rule)


def _said(folder: Path) -> Mapping[str, Any]:
    """The library's settings of a cross-encoder, which name their kind; of another folder none."""
    found = read_optional(folder / PROMPTS)
    return found if found.get("model_type") == KIND else {}
