"""AdapterHub folders: ``adapter_config.json`` with ``adapter.safetensors`` or ``pytorch_adapter.bin``, maybe a head."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from checkpoints.backbone import Backbone
from checkpoints.huggingface import ADAPTER
from checkpoints.imports.adapterhub_head import read_hub_head
from checkpoints.imports.adapterhub_methods import adapter_deltas, low_rank_deltas, prefix_deltas
from checkpoints.imports.heads import Wishes
from checkpoints.imports.imported import Imported, notes_on_base
from checkpoints.imports.tensor_files import read_one_of
from checkpoints.imports.unread import Problems, Unread
from checkpoints.settings import names, read_json, unsupported
from checkpoints.validation import refuse
from jpets.errors import InvalidTask
from jpets.types import Delta

FILES = ("adapter.safetensors", "pytorch_adapter.bin")
COMMON = names("architecture leave_out dropout init_weights init_weights_seed")

Reader = Callable[[Mapping[str, Any], str, Unread, Backbone], list[Delta]]
READERS: Mapping[str, tuple[Reader, frozenset[str]]] = MappingProxyType(
    {
        "bottleneck": (
            adapter_deltas,
            names(
                "mh_adapter output_adapter reduction_factor non_linearity original_ln_before original_ln_after "
                "is_parallel scaling residual_before_ln adapter_residual_before_ln "
                # without effect: they belong to phm_layer or inv_adapter, which are refused, or to training
                "phm_dim factorized_phm_W shared_W_phm shared_phm_rule factorized_phm_rule phm_c_init phm_init_range "
                "learn_phm hypercomplex_nonlinearity phm_rank phm_bias inv_adapter_reduction_factor stochastic_depth"
            ),
        ),
        "lora": (
            low_rank_deltas,
            names("selfattn_lora intermediate_lora output_lora r alpha attn_matrices composition_mode dtype"),
        ),
        "prefix_tuning": (
            prefix_deltas,
            # there is no second encoder or decoder for a cross prefix to act in
            names("encoder_prefix cross_prefix flat prefix_length bottleneck_size non_linearity shared_gating"),
        ),
    }
)
"""``architecture`` -> what makes deltas of its tensors, and the settings it understands."""


def is_adapterhub(settings: Mapping[str, Any]) -> bool:
    """Whether an ``adapter_config.json`` is AdapterHub's."""
    return isinstance(settings.get("config"), dict) and "peft_type" not in settings


def read_adapterhub(folder: Path, backbone: Backbone, wishes: Wishes) -> Imported:
    """Raises ``InvalidTask`` with every problem found; an option that is not supported is one."""
    document = read_json(folder / ADAPTER)
    settings, name = document.get("config"), document.get("name")
    if not isinstance(settings, dict) or not isinstance(name, str):
        raise InvalidTask(
            f"{ADAPTER}: expected AdapterHub's name and config; older configurations: save the adapter again"
        )
    architecture, family = settings.get("architecture") or "bottleneck", backbone.config.family
    wrong = []
    if not isinstance(architecture, str) or architecture not in READERS:
        wrong.append(f"{ADAPTER}: architecture must be one of {sorted(READERS)}, found {architecture!r}")
    if document.get("model_type", family) != family:
        wrong.append(f"{ADAPTER}: model_type is {document['model_type']!r}, the backbone's is {family!r}")
    refuse(wrong)
    reader, known = READERS[architecture]
    problems = Problems([*unsupported(settings, COMMON | known, f"architecture {architecture}")])
    tensors = Unread(read_one_of(folder, FILES), problems)
    deltas = reader(settings, name, tensors, backbone)
    tensors.refuse_rest(f"not understood in a {family} adapter of architecture {architecture}")
    found = read_hub_head(folder, backbone, wishes, problems)
    problems.refuse()
    notes = (*notes_on_base(document.get("model_name"), backbone), *found.notes)
    return dataclasses.replace(found, deltas=tuple(deltas), notes=notes)
