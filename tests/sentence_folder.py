"""Sentence-Transformers folders around ``tiny-bert``, as that library saves them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support import FIXTURES

TINY = FIXTURES / "tiny-bert"
CLS = {"word_embedding_dimension": 64, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
USUAL = ("Transformer", "Pooling", "Normalize")


def describe(
    folder: Path,
    modules: Sequence[str] = USUAL,
    pooling: Mapping[str, Any] = CLS,
    *,
    settings: Mapping[str, Any] | None = None,
    prompts: Mapping[str, Any] | None = None,
    inner: str = "",
) -> Path:
    """Writes the library's files into a folder; ``inner`` is the model's own folder in it."""
    paths = {"Transformer": inner, "Pooling": "1_Pooling"}
    listed = [
        {
            "idx": at,
            "name": str(at),
            "path": paths.get(kind, f"{at}_{kind}"),
            "type": kind if "." in kind else f"sentence_transformers.models.{kind}",
        }
        for at, kind in enumerate(modules)
    ]
    (folder / inner).mkdir(parents=True, exist_ok=True)
    (folder / "1_Pooling").mkdir(exist_ok=True)
    write(folder / "modules.json", listed)
    write(folder / "1_Pooling" / "config.json", pooling)
    if settings is not None:
        write(folder / inner / "sentence_bert_config.json", settings)
    if prompts is not None:
        write(folder / "config_sentence_transformers.json", prompts)
    return folder


def sentence_folder(folder: Path, *modules: str, inner: str = "", **how: Any) -> Path:
    """A whole model in such a folder."""
    shutil.copytree(TINY, folder / inner, ignore=shutil.ignore_patterns("*.npz"))
    return describe(folder, modules or USUAL, inner=inner, **how)


def write(file: Path, document: object) -> None:
    file.write_text(json.dumps(document))


def cased(folder: Path) -> Path:
    """Its tokenizer keeps the case of texts."""
    document = json.loads((folder / "tokenizer.json").read_text())
    document["normalizer"]["lowercase"] = False
    write(folder / "tokenizer.json", document)
    write(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "do_lower_case": False})
    return folder
