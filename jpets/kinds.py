"""The words for what kind of task it is, and how its texts are cut: those of task files, jobs and commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

HeadType = Literal["sequence-classification", "token-classification", "question-answering", "embedding", "fill-mask"]
Problem = Literal["single-label", "multi-label", "regression"]
Pooling = Literal["cls", "mean", "pooler"]
Relevance = Literal["sigmoid", "raw"]
Aggregation = Literal["none", "simple", "first", "average", "max"]
"""How labels of tokens become entities."""
Side = Literal["left", "right"]
"""Of a text."""
TruncationStrategy = Literal["longest_first", "only_first", "only_second"]
"""Which text of a pair that is too long is cut, as Hugging Face's tokenizers do it."""
FloatDType = Literal["float32", "float16", "bfloat16"]
"""How a task file stores the numbers of deltas."""
ExtractionMethod = Literal["bitfit", "diff", "lora", "onebit"]
"""What is made of the difference between a fine-tuned model and its backbone."""
ExtractionChoice = Literal[ExtractionMethod, "auto"]
"""``auto``: the smallest whose answers agree with the model's."""
EXTRACTION_OPTIONS: Mapping[ExtractionChoice, Sequence[str]] = {
    "diff": ("density", "per_matrix", "block"),
    "lora": ("rank", "energy"),
    "auto": ("agreement",),
}
"""Options that belong to a single choice."""
