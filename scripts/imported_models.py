"""Random checkpoints as PEFT and AdapterHub's adapters save them, one for each option that jpets imports.

``write`` makes one in a folder and computes its logits by its own library. ``make_import_fixtures.py`` keeps them for
the tests; where the libraries are installed the tests make fresh ones. All are of the fixtures' tiny backbones.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from reference_models import FIXTURES, Inputs, Model, load, take_prefixes

Library = Literal["peft", "adapters"]
SEQUENCE, TOKENS, ANSWERS = "SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS"
CLASSES = {
    ("tiny-bert", SEQUENCE): "BertForSequenceClassification",
    ("tiny-bert", TOKENS): "BertForTokenClassification",
    ("tiny-bert", ANSWERS): "BertForQuestionAnswering",
    ("tiny-distilbert", SEQUENCE): "DistilBertForSequenceClassification",
    ("tiny-roberta", SEQUENCE): "RobertaForSequenceClassification",
    ("tiny-electra", SEQUENCE): "ElectraForSequenceClassification",
}
TYPELESS = ("tiny-distilbert", "tiny-roberta")
LABELS = 3


@dataclass(frozen=True)
class PeftCase:
    """``method`` names a configuration class of PEFT's, ``options`` are its arguments."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    task: str = SEQUENCE
    backbone: str = "tiny-bert"
    pickled: bool = False
    """Saved as ``adapter_model.bin``."""
    adapter: str = "default"
    """The adapter's name, which the library takes out of most tensors' names."""


def _lora(task: str = SEQUENCE, backbone: str = "tiny-bert", pickled: bool = False, **options: Any) -> PeftCase:
    return PeftCase("LoraConfig", {"r": 4, "lora_alpha": 6, **options}, task, backbone, pickled)


PEFT: Mapping[str, PeftCase] = {
    "lora": _lora(target_modules=["query", "value"], lora_dropout=0.1),
    "lora-bin": _lora(target_modules=["query", "value"], pickled=True),
    "lora-patterns": _lora(
        target_modules=["query", "output.dense"],
        rank_pattern={"layer.0.attention.self.query": 8, r"layer\.[12]\.output\.dense": 2},
        alpha_pattern={"query": 16, "layer.1.attention.output.dense": 3},
        use_rslora=True,
    ),
    "lora-bias-all": _lora(target_modules=["query"], bias="all"),
    "lora-bias-only": _lora(target_modules=["query", "intermediate.dense"], bias="lora_only"),
    "lora-fan-in": _lora(target_modules=["value"], fan_in_fan_out=True),
    "lora-regex": _lora(target_modules=r".*attention\.self\.(key|value)"),
    "lora-layers": _lora(target_modules=["key"], layers_to_transform=[0, 2], layers_pattern="layer"),
    "lora-exclude": _lora(target_modules=["dense"], exclude_modules=["pooler.dense", "intermediate.dense"]),
    "lora-all-linear": _lora(target_modules="all-linear", r=2),
    "lora-token": _lora(TOKENS, target_modules=["query", "value"]),
    "lora-answers": _lora(ANSWERS, target_modules=["query", "value"]),
    "lora-distilbert": _lora(
        backbone="tiny-distilbert",
        target_modules=["q_lin", "ffn.lin2"],
        modules_to_save=["pre_classifier", "classifier"],
    ),
    "lora-roberta": _lora(backbone="tiny-roberta", target_modules=["query", "output.dense"], bias="all"),
    "lora-electra": _lora(backbone="tiny-electra", target_modules=["value"], bias="all"),
    "lora-named-roberta": PeftCase(
        "LoraConfig",
        {"r": 4, "lora_alpha": 6, "target_modules": ["query"], "bias": "all"},
        backbone="tiny-roberta",
        adapter="senti",
    ),
    "ia3": PeftCase(
        "IA3Config", {"target_modules": ["key", "value", "output.dense"], "feedforward_modules": ["output.dense"]}
    ),
    "prompt": PeftCase("PromptTuningConfig", {"num_virtual_tokens": 5}),
    "prompt-token": PeftCase("PromptTuningConfig", {"num_virtual_tokens": 5}, TOKENS),
    "p-tuning": PeftCase("PromptEncoderConfig", {"num_virtual_tokens": 4, "encoder_hidden_size": 32}),
    "prompt-electra": PeftCase(
        "PromptTuningConfig", {"num_virtual_tokens": 5, "token_dim": 32}, backbone="tiny-electra"
    ),
    "prefix": PeftCase("PrefixTuningConfig", {"num_virtual_tokens": 5}),
    "prefix-projected": PeftCase(
        "PrefixTuningConfig", {"num_virtual_tokens": 3, "prefix_projection": True, "encoder_hidden_size": 32}
    ),
}


@dataclass(frozen=True)
class HubCase:
    """``config`` names a configuration class of adapters', ``head`` a method that adds a head, with their arguments.

    Without ``head`` the model is transformers' own, with its static head.
    """

    config: str
    options: Mapping[str, Any] = field(default_factory=dict)
    head: str | None = "add_classification_head"
    head_options: Mapping[str, Any] = field(default_factory=dict)
    plain: bool = True
    """Saved as safetensors; else pickled, which prefixes have to be: their modules share tensors."""
    other_head: str | None = None
    """Name of another head that the model has."""


HUB: Mapping[str, HubCase] = {
    "seq-bn": HubCase("SeqBnConfig", {"reduction_factor": 8}),
    "double-seq-bn": HubCase("DoubleSeqBnConfig", {"reduction_factor": 8}, head_options={"layers": 1}, plain=False),
    "par-bn": HubCase("ParBnConfig", {"reduction_factor": 8}, head_options={"layers": 1, "use_pooler": True}),
    "learned-scaling": HubCase("ParBnConfig", {"reduction_factor": 8, "scaling": "learned"}),
    "channel-scaling": HubCase("SeqBnConfig", {"reduction_factor": 8, "scaling": "channel", "non_linearity": "gelu"}),
    "sizes": HubCase("DoubleSeqBnConfig", {"reduction_factor": {"0": 4, "default": 16}, "leave_out": [1]}),
    "lora": HubCase(
        "LoRAConfig",
        {"r": 4, "alpha": 6, "attn_matrices": ["q", "k"], "intermediate_lora": True, "output_lora": True},
        head_options={"activation_function": "relu"},
    ),
    "ia3": HubCase("IA3Config", head="add_tagging_head"),
    "prefix": HubCase("PrefixTuningConfig", {"prefix_length": 4, "bottleneck_size": 16}, plain=False),
    "prefix-flat": HubCase(
        "PrefixTuningConfig", {"prefix_length": 4, "flat": True, "leave_out": [0]}, "add_qa_head", plain=False
    ),
    "multilabel": HubCase(
        "SeqBnConfig", {"reduction_factor": 16}, head_options={"multilabel": True, "activation_function": None}
    ),
    "two-heads": HubCase(
        "SeqBnConfig", {"reduction_factor": 16}, head_options={"activation_function": "TANH"}, other_head="own2"
    ),
    "one-layer": HubCase(
        "SeqBnConfig",
        {"reduction_factor": 16},
        head_options={"layers": 1, "activation_function": "leakyrelu"},
    ),
    "static-head": HubCase("SeqBnConfig", {"reduction_factor": 16}, head=None),
}


def randomise(parameters: Mapping[str, torch.Tensor], seed: int) -> None:
    """Overwrites what is trained by normal noise; factors get noise around one."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name in sorted(parameters):
            tensor = parameters[name]
            noise = torch.from_numpy(rng.standard_normal(tuple(tensor.shape), dtype=np.float32)) * 0.2
            around_one = "ia3" in name or ".scaling" in name or (name.endswith("lora_B") and 1 in tensor.shape)
            tensor.copy_(noise + 1.0 if around_one else noise)


def write(library: Library, name: str, folder: Path, inputs: Inputs, seed: int) -> np.ndarray[Any, Any]:
    """Makes case ``name`` in an empty folder; its logits [n, classes] or [n, tokens, classes]."""
    makers: Mapping[Library, Callable[[str, Path, Inputs, int], np.ndarray[Any, Any]]]
    makers = {"peft": _write_peft, "adapters": _write_hub}
    return makers[library](name, folder, inputs, seed)


def _base(backbone: str, task: str) -> Model:
    labels = {} if task == ANSWERS else {"num_labels": LABELS}
    return load(getattr(transformers, CLASSES[backbone, task]), FIXTURES / backbone, **labels)


def _write_peft(name: str, folder: Path, inputs: Inputs, seed: int) -> np.ndarray[Any, Any]:
    import peft

    case = PEFT[name]
    config = getattr(peft, case.method)(task_type=case.task, **case.options)
    model = peft.get_peft_model(_base(case.backbone, case.task), config, adapter_name=case.adapter).eval()
    randomise({key: p for key, p in model.named_parameters() if p.requires_grad}, seed)
    model.save_pretrained(str(folder), safe_serialization=not case.pickled, save_embedding_layers=False)
    (folder / "README.md").unlink()
    if case.adapter != "default":  # a folder of its own
        shutil.copytree(folder / case.adapter, folder, dirs_exist_ok=True)
        shutil.rmtree(folder / case.adapter)
    loaded = peft.PeftModel.from_pretrained(_base(case.backbone, case.task), str(folder)).eval()
    if config.is_prompt_learning:
        take_prefixes(loaded.base_model)
    else:
        loaded = loaded.base_model  # past PEFT's wrappers: that for question answering drops token types
    return _logits(loaded, _without_types(inputs, config.is_prompt_learning or case.backbone in TYPELESS))


def _without_types(inputs: Inputs, leave_out: bool) -> Inputs:
    """PEFT ignores token types beside virtual tokens, with a warning; some models have none."""
    return {key: tensor for key, tensor in inputs.items() if not (leave_out and key == "token_type_ids")}


def _write_hub(name: str, folder: Path, inputs: Inputs, seed: int) -> np.ndarray[Any, Any]:
    import adapters

    case = HUB[name]
    model = _hub_model(case)
    model.add_adapter("own", config=getattr(adapters, case.config)(**case.options))
    if case.head is not None:
        labels = {} if case.head == "add_qa_head" else {"num_labels": LABELS}
        getattr(model, case.head)("own", **labels, **case.head_options)
    if case.other_head is not None:
        model.add_classification_head(case.other_head)
        model.active_head = "own"
    model.set_active_adapters("own")
    model.train_adapter("own")
    randomise({key: p for key, p in model.named_parameters() if p.requires_grad}, seed)
    model.save_adapter(str(folder), "own", with_head=True, use_safetensors=case.plain)
    loaded = _hub_model(case)
    loaded.load_adapter(str(folder), with_head=True, set_active=True, use_safetensors=case.plain)
    return _logits(loaded.eval(), inputs)


def _hub_model(case: HubCase) -> Model:
    import adapters

    if case.head is not None:
        return load(adapters.BertAdapterModel, FIXTURES / "tiny-bert")
    model = _base("tiny-bert", SEQUENCE)
    adapters.init(model)
    return model


def _logits(model: Model, inputs: Inputs) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        found = model(**inputs)
    if "start_logits" in found:
        return torch.stack([found.start_logits, found.end_logits], -1).numpy()
    return found.logits.numpy()


def describe(folder: Path) -> Mapping[str, Any]:
    """The configuration that a case was saved with."""
    return json.loads((folder / "adapter_config.json").read_text())
