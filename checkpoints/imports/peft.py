"""PEFT folders: ``adapter_config.json`` with ``adapter_model.safetensors`` or ``.bin`` (LoRA, IA3, prompt, prefix)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from checkpoints.backbone import Backbone
from checkpoints.imports.heads import Wishes, head_of_names, labels_of, read_head
from checkpoints.imports.imported import Imported, notes_on_base
from checkpoints.imports.peft_linear import ia3_deltas, lora_deltas
from checkpoints.imports.peft_virtual import prefix_deltas, prompt_deltas
from checkpoints.imports.settings import names, read_json, unsupported
from checkpoints.imports.tensor_files import read_one_of
from checkpoints.imports.unread import Unread
from checkpoints.validation import refuse
from jpets.errors import InvalidTask
from jpets.types import Delta, HeadType

CONFIG = "adapter_config.json"
FILES = ("adapter_model.safetensors", "adapter_model.bin")
WRAPPED = ("base_model.model.", "base_model.")
"""How PEFT's names begin: those inside a tuned model, those of a prompted one."""
INNER = (".modules_to_save.default.", ".modules_to_save.", ".base_layer.")
"""What wrappers put inside of names, with the adapter's own name where ``bias`` "all" sweeps a saved module along."""
TASK_TYPES: Mapping[str, HeadType] = MappingProxyType(
    {
        "SEQ_CLS": "sequence-classification",
        "TOKEN_CLS": "token-classification",
        "QUESTION_ANS": "question-answering",
        "FEATURE_EXTRACTION": "embedding",
    }
)
GENERAL = names(
    "peft_type task_type peft_version auto_mapping base_model_name_or_path revision inference_mode modules_to_save"
)
"""Settings of every method; the tensors that are there say which modules were saved."""

Reader = Callable[[Mapping[str, Any], Unread, Backbone], list[Delta]]
READERS: Mapping[str, tuple[Reader, frozenset[str]]] = MappingProxyType(
    {
        "LORA": (
            lora_deltas,
            names(  # read
                "r lora_alpha rank_pattern alpha_pattern use_rslora bias target_modules exclude_modules "
                "layers_to_transform layers_pattern init_lora_weights "
                # a linear layer's matrices look the same with it
                "fan_in_fan_out "
                # of training and of the library alone
                "lora_dropout loftq_config eva_config megatron_config megatron_core runtime_config qalora_group_size "
                "ensure_weight_tying"
            ),
        ),
        "IA3": (
            ia3_deltas,
            names("target_modules exclude_modules feedforward_modules fan_in_fan_out init_ia3_weights"),
        ),
        "PROMPT_TUNING": (
            prompt_deltas,
            names(
                "num_virtual_tokens token_dim num_transformer_submodules num_attention_heads num_layers "
                "prompt_tuning_init prompt_tuning_init_text tokenizer_name_or_path tokenizer_kwargs"
            ),
        ),
        "P_TUNING": (
            prompt_deltas,
            names(
                "num_virtual_tokens token_dim num_transformer_submodules num_attention_heads num_layers "
                "encoder_reparameterization_type encoder_hidden_size encoder_num_layers encoder_dropout"
            ),
        ),
        "PREFIX_TUNING": (
            prefix_deltas,
            names(
                "num_virtual_tokens token_dim num_transformer_submodules num_attention_heads num_layers "
                "encoder_hidden_size prefix_projection init_weights"
            ),
        ),
    }
)
"""``peft_type`` -> what makes deltas of its tensors, and the settings it understands."""


def read_peft(folder: Path, backbone: Backbone, wishes: Wishes) -> Imported:
    """Raises ``InvalidTask`` with every problem found; an option that is not supported is one."""
    settings = read_json(folder / CONFIG)
    kind = settings.get("peft_type")
    if not isinstance(kind, str) or kind not in READERS:
        raise InvalidTask(f"{CONFIG}: peft_type must be one of {sorted(READERS)}, found {kind!r}")
    reader, known = READERS[kind]
    problems = list(unsupported(settings, GENERAL | known, f"peft_type {kind}"))
    tensors = Unread({_own_name(name): array for name, array in read_one_of(folder, FILES).items()}, problems)
    deltas = reader(settings, tensors, backbone)
    head_type = _head_type(settings, tensors, backbone, wishes)
    head = read_head(tensors, backbone.config, head_type, wishes.problem, wishes.pooling)
    labels = labels_of(head, settings, wishes, problems)
    for name in tensors.names:
        if ".original_module." in name:  # what a saved module replaced; `bias` "all" sweeps it along
            tensors.drop(name)
    tensors.refuse_rest(f"not understood in a {backbone.config.family} checkpoint of peft_type {kind}")
    refuse(problems)
    return Imported(tuple(deltas), head, labels, notes_on_base(settings.get("base_model_name_or_path"), backbone))


def _own_name(name: str) -> str:
    """The name inside the model that was tuned; a module that was saved whole lies in a wrapper of its own."""
    for wrapper in WRAPPED:
        if name.startswith(wrapper):
            name = name.removeprefix(wrapper)
            break
    for inner in INNER:
        name = name.replace(inner, ".")
    return name


def _head_type(settings: Mapping[str, Any], tensors: Unread, backbone: Backbone, wishes: Wishes) -> HeadType:
    if wishes.head is not None:
        return wishes.head
    task_type = settings.get("task_type")
    if isinstance(task_type, str) and task_type in TASK_TYPES:
        return TASK_TYPES[task_type]
    if task_type is not None:
        tensors.problems.append(f"task_type: expected one of {sorted(TASK_TYPES)}, found {task_type!r}")
        return "embedding"
    found = head_of_names(tensors, backbone.config)
    if len(found) > 1:
        tensors.problems.append(
            f"task_type is not set, and the saved modules may be {' or '.join(found)}: say which head"
        )
    return found[0] if found else "embedding"
