"""Models on one backbone as transformers and Sentence-Transformers save them, one for each head, and what these
libraries answer with them. Needs PyTorch, transformers and sentence-transformers."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import sentence_transformers
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer import modules

Model = Any  # the classes of these libraries are typed only in part

SEED = 17
SPREAD = 0.02
"""Of the noise on every bias of the encoder, which is each task's own delta."""
VECTOR = 128
"""Numbers of the vectors behind the Dense layer."""
HEADS: Mapping[str, tuple[str, Sequence[str], dict[str, Any]]] = {
    "topic": ("BertForSequenceClassification", ("science", "games", "music", "network", "editors"), {}),
    "tags": (
        "BertForSequenceClassification",
        ("console", "library", "x11", "web"),
        {"problem_type": "multi_label_classification"},
    ),
    "price": ("BertForSequenceClassification", ("LABEL_0",), {"problem_type": "regression"}),
    "meaning": ("BertForSequenceClassification", ("entailment", "neutral", "contradiction"), {}),
    "names": ("BertForTokenClassification", ("O", "B-PER", "I-PER", "B-LOC", "I-LOC"), {}),
    "questions": ("BertForQuestionAnswering", (), {}),
    "words": ("BertForMaskedLM", (), {}),
}
"""Task -> class, labels, configuration."""


class Made(NamedTuple):
    """``model`` is the library's object, ``folder`` what it saved."""

    folder: pathlib.Path
    model: Model
    tokenizer: Model


def make(backbone: pathlib.Path, folder: pathlib.Path) -> dict[str, Made]:
    """All models, each in a folder of its task's name."""
    torch.manual_seed(SEED)
    tokenizer = transformers.AutoTokenizer.from_pretrained(backbone)
    tokenizer.model_max_length = 512
    made = {}
    for name, (cls, labels, settings) in HEADS.items():
        named = {"id2label": dict(enumerate(labels)), "label2id": {own: at for at, own in enumerate(labels)}}
        options = {**settings, **(named if labels else {})}
        model = _tuned(getattr(transformers, cls).from_pretrained(backbone, **options))
        made[name] = Made(folder / name, model, tokenizer)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    made["vectors"] = Made(folder / "vectors", _embedder(backbone, folder), tokenizer)
    made["rank"] = Made(folder / "rank", _ranker(backbone, folder), tokenizer)
    return made


def pipeline(name: str, made: Made) -> Model | None:
    """The library's pipeline over a model; None where this version of it has none."""
    kinds = {
        "topic": "TextClassificationPipeline",
        "tags": "TextClassificationPipeline",
        "price": "TextClassificationPipeline",
        "meaning": "ZeroShotClassificationPipeline",
        "names": "TokenClassificationPipeline",
        "questions": "QuestionAnsweringPipeline",
        "words": "FillMaskPipeline",
    }
    cls = getattr(transformers, kinds[name], None)
    return None if cls is None else cls(model=made.model, tokenizer=made.tokenizer, device="cpu")


def versions() -> dict[str, str]:
    return {own.__name__: own.__version__ for own in (torch, transformers, sentence_transformers)}


def _tuned(model: Model) -> Model:
    """With noise on its encoder's biases, and a head whose answers differ from text to text."""
    heads = {"classifier", "qa_outputs", "cls"}
    for name, own in model.named_parameters():
        if name.partition(".")[0] not in heads:
            if name.endswith("bias"):
                own.data += SPREAD * torch.randn_like(own)
        elif own.dim() == 2:
            own.data = torch.randn_like(own) * 3 / own.shape[1] ** 0.5
        elif name.endswith("bias"):
            own.data = 0.1 * torch.randn_like(own)
    return model.eval()


def _embedder(backbone: pathlib.Path, folder: pathlib.Path) -> Model:
    """Mean pooling, a Dense layer and vectors of length 1."""
    encoder = _tuned(transformers.BertModel.from_pretrained(backbone))
    encoder.save_pretrained(folder / "encoder")
    transformers.AutoTokenizer.from_pretrained(backbone).save_pretrained(folder / "encoder")
    transformer = modules.Transformer(str(folder / "encoder"), max_seq_length=256)
    size = encoder.config.hidden_size
    parts = [transformer, modules.Pooling(size), modules.Dense(size, VECTOR), modules.Normalize()]
    SentenceTransformer(modules=parts, device="cpu").save(str(folder / "vectors"))
    return SentenceTransformer(str(folder / "vectors"), device="cpu")


def _ranker(backbone: pathlib.Path, folder: pathlib.Path) -> Model:
    """One output for a pair, which ranks as it is."""
    model = _tuned(transformers.BertForSequenceClassification.from_pretrained(backbone, num_labels=1))
    model.save_pretrained(folder / "ranker")
    transformers.AutoTokenizer.from_pretrained(backbone).save_pretrained(folder / "ranker")
    made = CrossEncoder(str(folder / "ranker"), activation_fn=torch.nn.Identity(), max_length=512, device="cpu")
    made.save_pretrained(str(folder / "rank"))
    return CrossEncoder(str(folder / "rank"), device="cpu")
