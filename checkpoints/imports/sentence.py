"""How a Sentence-Transformers folder makes an embedding of its model's hidden states: ``modules.json``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from checkpoints.imports.settings import read_json
from jpets.errors import InvalidTask
from jpets.types import Head, Pooling

MODULES = "modules.json"
UNDERSTOOD = ("Transformer", "Pooling", "Normalize")
POOLINGS: Mapping[str, Pooling] = MappingProxyType(
    {"cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean"}
)
MODE = "pooling_mode"


def embedding_head(folder: Path, head: Head, wished: Pooling | None, problems: list[str]) -> Head:
    """``head`` with the pooling and normalisation of the folder's modules, where it has any; a pooling that the user
    wishes stays. What they do beside is a problem."""
    if not (folder / MODULES).is_file():
        return head
    try:
        listed = json.loads((folder / MODULES).read_bytes())
        modules = [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in listed]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise InvalidTask(f"{MODULES}: expected a list of modules with type and path") from error
    problems += [f"{MODULES}: {kind[:80]!r} is not supported" for kind, _ in modules if kind not in UNDERSTOOD]
    head = dataclasses.replace(head, normalize=any(kind == "Normalize" for kind, _ in modules))
    place = next((path for kind, path in modules if kind == "Pooling"), None)
    if wished is not None or place is None:
        return head
    if Path(place).name != place:
        problems.append(f"{MODULES}: expected the name of a folder in the folder, found {place[:80]!r}")
        return head
    settings = read_json(folder / place / "config.json")
    modes = [
        name.removeprefix(f"{MODE}_") for name, on in settings.items() if name.startswith(f"{MODE}_") and on is True
    ]
    if isinstance(settings.get(MODE), str):
        modes.append(settings[MODE])
    if len(modes) != 1 or modes[0] not in POOLINGS:
        problems.append(
            f"{place}/config.json: expected {MODE} to be one of {sorted(POOLINGS)}, found {str(modes)[:80]}"
        )
        return head
    return dataclasses.replace(head, pooling=POOLINGS[modes[0]])
