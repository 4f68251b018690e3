"""The native form of a backbone: a folder that loads without conversion.

    backbone.json   {"format": 1, "name", "config": {...}, "fingerprint", "embeds": {...}}
    tokenizer.json
    params/         the parameter tree, written by Orbax
    plot/           tables of n-gram vectors (``jpets.plot.tree``), if they stand for the backbone's lower layers

Task files name a backbone by its fingerprint, so reading one checks it.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pydantic

from checkpoints.backbone import Backbone
from checkpoints.canonical import PADDING_POSITION, Params, canonical_shapes, from_params
from checkpoints.finite import check_finite
from jpets.config import BackboneConfig
from jpets.errors import Conflict, InvalidBackbone, InvalidInput
from jpets.files import space_errors, sync_folder, sync_tree, temporary_sibling
from jpets.plot.domains import DomainTables
from jpets.plot.tree import TREE, Tree
from jpets.types import BY_MEAN, EmbeddingRule

MANIFEST, TOKENIZER, PARAMS, PLOT = "backbone.json", "tokenizer.json", "params", "plot"
FORMAT = 1


class _Manifest(pydantic.BaseModel):
    format: int
    name: str
    config: BackboneConfig
    fingerprint: str
    embeds: EmbeddingRule = BY_MEAN
    """Earlier folders lack it: their backbones embed by the mean."""


def is_native(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def write_native(backbone: Backbone, folder: Path, plot: Path | None = None) -> None:
    """Writes ``folder`` whole or not at all. What the tree of ``plot`` names becomes its tables; ``plot`` goes when
    that is done.

    Raises ``Conflict`` where something is there already, ``OutOfSpace``, and ``InvalidInput`` for a backbone that has
    tables elsewhere."""
    if backbone.tables is not None or backbone.config.looks_up != (plot is not None):
        raise InvalidInput(f"the tables of backbone {backbone.name!r} are files beside it: copy its folder instead")
    if folder.exists():
        raise Conflict(f"{folder.name} exists already; remove it or choose another name")
    temporary = temporary_sibling(folder)
    manifest = _Manifest(
        format=FORMAT,
        name=backbone.name,
        config=backbone.config,
        fingerprint=backbone.fingerprint,
        embeds=backbone.embeds,
    )
    try:
        with space_errors():
            temporary.mkdir(parents=True)
            _save(temporary / PARAMS, backbone.params)
            (temporary / TOKENIZER).write_text(backbone.tokenizer_json, encoding="utf-8")
            (temporary / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
            if plot is not None:
                _copy_tables(plot, temporary / PLOT)  # they stay there until all is done
            sync_tree(temporary)
            _publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if plot is not None:
        shutil.rmtree(plot, ignore_errors=True)


def _copy_tables(plot: Path, target: Path) -> None:
    """The tree and what it names: beside them may be what an earlier run left."""
    for name in (TREE, *Tree.read(plot).files):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        _linked(plot / name, target / name)


def _linked(source: Path, target: Path) -> None:
    """The same file by another name, or a copy where the file system has no such thing."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _publish(temporary: Path, folder: Path) -> None:
    """Raises ``Conflict`` where ``folder`` came meanwhile."""
    try:
        temporary.rename(folder)
    except OSError as error:
        if folder.exists():
            raise Conflict(f"{folder.name} exists already; remove it or choose another name") from error
        raise
    sync_folder(folder.parent)


def read_native(folder: Path, name: str | None = None, *, verify: bool = True) -> Backbone:
    """A backbone that ``write_native`` wrote. ``verify`` recomputes the fingerprint. Raises ``InvalidBackbone``; of
    tables ``InvalidTable``, ``NotFound`` and ``OutOfSpace``."""
    try:
        manifest = _Manifest.model_validate_json((folder / MANIFEST).read_bytes())
        tokenizer_json = (folder / TOKENIZER).read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError, pydantic.ValidationError) as error:
        raise InvalidBackbone(f"{MANIFEST} or {TOKENIZER} is missing or damaged; import the backbone again") from error
    if manifest.format != FORMAT:
        raise InvalidBackbone(f"{MANIFEST}: expected format {FORMAT}, found {manifest.format}; import it again")
    params = _restore(folder / PARAMS, manifest.config)
    tables = DomainTables(folder / PLOT, manifest.config.vocab_size) if manifest.config.looks_up else None
    backbone = Backbone(
        name or manifest.name,
        manifest.config,
        params,
        tokenizer_json,
        manifest.fingerprint,
        manifest.embeds,
        root=tables.tree.vectors if tables is not None else None,
    )
    check_finite(from_params(params, manifest.config))
    if verify and backbone.computed_fingerprint() != manifest.fingerprint:
        raise InvalidBackbone(
            f"the parameters or tokenizer do not match the stored fingerprint {manifest.fingerprint}; "
            "import the backbone again"
        )
    if tables is None:
        return backbone
    config = dataclasses.replace(manifest.config, table_rows=len(tables.values), table_format=tables.tree.kept_as)
    return dataclasses.replace(backbone, config=config, params={**params, "table": _in_place(tables)}, tables=tables)


def _in_place(tables: DomainTables) -> Any:
    """The vectors as a CPU's array that nobody copies: it is far larger than any memory."""
    import jax

    try:
        (device, *_) = jax.local_devices(backend="cpu")
    except RuntimeError:  # JAX was told to use other platforms alone
        return tables.values
    return jax.device_put(tables.values, device, may_alias=True)


def _save(folder: Path, params: Params) -> None:
    import orbax.checkpoint as ocp  # half a second, and only this format needs it

    with space_errors(), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.resolve(), params)


def _restore(folder: Path, config: BackboneConfig) -> Params:
    import orbax.checkpoint as ocp

    try:
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(folder.resolve())
        tree = {**restored, "layers": {int(layer): leaves for layer, leaves in restored["layers"].items()}}
        tree["layers"] = dict(sorted(tree["layers"].items()))
        if config.skips_padding:  # which earlier folders do not have
            tree.setdefault(PADDING_POSITION, np.zeros(config.embedding_width, np.float32))
        found = {name: array.shape for name, array in from_params(tree, config).items()}
    except (FileNotFoundError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise InvalidBackbone(f"{PARAMS} is incomplete or damaged; import the backbone again") from error
    wrong = [
        f"{name}: expected {list(shape)}, found {list(found[name])}"
        for name, shape in canonical_shapes(config).items()
        if found[name] != shape
    ]
    if wrong:
        raise InvalidBackbone(f"{PARAMS} does not fit {MANIFEST}: {'; '.join(wrong)}")
    return _as_f32(tree)


def _as_f32(tree: Mapping[Any, Any]) -> Params:
    return {
        key: _as_f32(leaf) if isinstance(leaf, Mapping) else np.ascontiguousarray(leaf, np.float32)
        for key, leaf in tree.items()
    }
