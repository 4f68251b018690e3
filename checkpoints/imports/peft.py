"""PEFT folders: ``adapter_config.json`` with ``adapter_model.safetensors`` or ``.bin`` (LoRA, IA3, prompt, prefix)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy.typing as npt

from checkpoints.backbone import Backbone
from checkpoints.huggingface import ADAPTER
from checkpoints.imports.heads import (
    Wishes,
    head_of_names,
    labels_of,
    note_on_labels,
    note_on_problem,
    problem_of,
    read_head,
    refuse_idle_wishes,
)
from checkpoints.imports.imported import Imported, notes_on_base, revision_of
from checkpoints.imports.peft_linear import ia3_deltas, lora_deltas
from checkpoints.imports.peft_virtual import prefix_deltas, prompt_deltas
from checkpoints.imports.sentence import embedding_of
from checkpoints.imports.tensor_files import read_one_of
from checkpoints.imports.unread import Problems, Unread
from checkpoints.sentence import model_folder
from checkpoints.settings import expect_list, names, read_json, read_optional, unsupported
from checkpoints.wrappers import unwrapped_name
from jpets.errors import InvalidTask
from jpets.types import Delta, Head, HeadType

FILES = ("adapter_model.safetensors", "adapter_model.bin")
WRAPPED = ("base_model.model.", "base_model.")
"""How PEFT's names begin: those inside a tuned model, those of a prompted one."""
SAVED = ".modules_to_save."
REPLACED = ".original_module."
BASE = ".base_layer."
"""What wrappers put inside of names: before a module that was saved whole, before the one that it replaced, and before
a tuned module's own parameters."""
HEADS = ("classifier", "score", "qa_outputs")
"""Modules that are saved whole for a task type, whether or not the settings name them."""
TASK_TYPES: Mapping[str, HeadType] = MappingProxyType(
    {
        "SEQ_CLS": "sequence-classification",
        "TOKEN_CLS": "token-classification",
        "QUESTION_ANS": "question-answering",
        "FEATURE_EXTRACTION": "embedding",
    }
)
WITHOUT_TYPES = ("QUESTION_ANS",)
"""Task types whose wrapper in PEFT takes token types and does not hand them on: the task has learnt without."""
PROMPTS = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")
PROMPTS_WITHOUT_TYPES = ("FEATURE_EXTRACTION",)
"""Task types whose wrapper does so for methods of ``PROMPTS`` alone."""
MODEL_TYPES: Mapping[str, HeadType] = MappingProxyType(
    {
        "ForSequenceClassification": "sequence-classification",
        "ForTokenClassification": "token-classification",
        "ForQuestionAnswering": "question-answering",
        "Model": "embedding",
    }
)
"""End of the class that was tuned -> head; PEFT writes that class where it was told no task type."""
GENERAL = names(
    "peft_type task_type peft_version auto_mapping base_model_name_or_path revision inference_mode modules_to_save"
)
"""Settings of every method."""

Stored = Mapping[str, npt.NDArray[Any]]
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
    inner = model_folder(folder)
    settings = read_json(inner / ADAPTER)
    kind = settings.get("peft_type")
    if not isinstance(kind, str) or kind not in READERS:
        raise InvalidTask(f"{ADAPTER}: peft_type must be one of {sorted(READERS)}, found {kind!r}")
    reader, known = READERS[kind]
    problems = Problems([*unsupported(settings, GENERAL | known, f"peft_type {kind}")])
    tensors = Unread(_own_tensors(read_one_of(inner, FILES), problems.tensors), problems)
    _drop_replaced(tensors, [*HEADS, *expect_list(settings, "modules_to_save", str, [], problems.options)])
    deltas = reader(settings, tensors, backbone)
    found = _head(folder, settings, tensors, backbone, wishes)
    tensors.refuse_rest(f"not understood in a {backbone.config.family} checkpoint of peft_type {kind}")
    problems.refuse()
    notes = (*notes_on_base(settings.get("base_model_name_or_path"), backbone, revision_of(settings)), *found.notes)
    without = WITHOUT_TYPES + (PROMPTS_WITHOUT_TYPES if kind in PROMPTS else ())
    rule = dataclasses.replace(found.preprocessing, one_type=settings.get("task_type") in without)
    return dataclasses.replace(found, deltas=tuple(deltas), notes=notes, preprocessing=rule)


def _own_tensors(stored: Stored, problems: list[str]) -> Stored:
    """The tensors by their names inside the model that was tuned.

    ``bias`` "all" sweeps along copies of what is saved anyway; a tensor that comes twice with other numbers is a
    problem.
    """
    unwrapped = {_unwrapped(name): name for name in stored}
    sources: dict[str, str] = {}
    for name, array in stored.items():
        first = sources.setdefault(_own_name(_unwrapped(name), unwrapped), name)
        if first != name and not _same(stored[first], array):
            problems.append(f"{name[:120]}: expected the same numbers as in {first[:120]}, found others")
    return {own: stored[name] for own, name in sources.items()}


def _same(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def _unwrapped(name: str) -> str:
    name = unwrapped_name(name)
    return name.removeprefix(next((wrapper for wrapper in WRAPPED if name.startswith(wrapper)), ""))


def _own_name(name: str, others: Collection[str]) -> str:
    """The name without what wrappers put in it. That may be the adapter's own name too, where ``others`` has the name
    without it."""
    module, saved, part = name.partition(SAVED)
    if saved:
        plain = f"{module}.{part.partition('.')[2]}"
        name = plain if plain in others or part.startswith("default.") else f"{module}.{part}"
    return name.replace(BASE, ".")


def _drop_replaced(tensors: Unread, saved: Collection[str]) -> None:
    """Drops what modules that were saved whole have replaced; ``bias`` "all" sweeps it along."""
    for name in tensors.names:
        module, replaced, _ = name.partition(REPLACED)
        if replaced and any(module == each or module.endswith(f".{each}") for each in saved):
            tensors.drop(name)


def _head(folder: Path, settings: Mapping[str, Any], tensors: Unread, backbone: Backbone, wishes: Wishes) -> Imported:
    """The head among the tensors, and its labels; without deltas."""
    kind, problems = _head_type(settings, tensors, backbone, wishes), tensors.problems.options
    if kind is None:
        return Imported((), Head("embedding"))
    if kind == "embedding":
        found = embedding_of(folder, backbone, wishes, problems)
        refuse_idle_wishes(found.head, wishes, problems)
        return found
    model = read_optional(model_folder(folder) / "config.json")  # of the model that was tuned
    problem = problem_of(model, wishes, problems)
    head = read_head(tensors, backbone.config, kind, problem)
    refuse_idle_wishes(head, wishes, problems)
    labels = labels_of(head, {**model, **settings}, wishes, problems)
    return Imported((), head, labels, (*note_on_labels(labels), *note_on_problem(head, problem)))


def _tuned_model(settings: Mapping[str, Any]) -> str | None:
    """The class of the model that was tuned, where that is said."""
    mapping = settings.get("auto_mapping")
    found = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    return found if isinstance(found, str) and found else None


def _head_type(settings: Mapping[str, Any], tensors: Unread, backbone: Backbone, wishes: Wishes) -> HeadType | None:
    """The type of the head; None, which is a problem, where nothing tells it."""
    if wishes.head is not None:
        return wishes.head
    task_type = settings.get("task_type")
    if isinstance(task_type, str) and task_type in TASK_TYPES:
        return TASK_TYPES[task_type]
    if task_type is not None:
        tensors.problems.options.append(f"task_type: expected one of {sorted(TASK_TYPES)}, found {task_type!r}")
        return None
    found = head_of_names(tensors, backbone.config)
    tuned = _tuned_model(settings)
    if tuned is not None:
        expected = next((kind for end, kind in MODEL_TYPES.items() if tuned.endswith(end)), None)
        if expected is not None and (expected == "embedding" or expected in found):
            return expected
        lacks = "the folder lacks its head" if expected is not None else "whose head is not supported"
        tensors.problems.options.append(
            f"auto_mapping: the adapter was trained in a {tuned[:80]}, {lacks}; save it again with the task_type, or "
            "say --head embedding to do without the head"
        )
        return None
    if len(found) > 1:
        tensors.problems.options.append(
            f"task_type is not set, and the saved modules may be {' or '.join(found)}: say which head"
        )
        return None
    return found[0] if found else "embedding"
