"""Tiny backbones, tasks and an independent computation of what a task should answer."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.backbone import Backbone
from checkpoints.canonical import canonical_shapes, from_params
from jpets.config import BackboneConfig, EngineSettings
from jpets.deltas import METHODS, in_merge_order, task_lead
from jpets.deltas.adapter import adapter_placement
from jpets.deltas.bank import Bank, lower_task, slot_arrays, tightest
from jpets.deltas.fold import fold_pooler
from jpets.deltas.protocol import NO_LEAD, ClassKey, Contribution
from jpets.engine.batch.assembly import Assembled, assemble
from jpets.engine.batch.bucket import Bucket, Variant
from jpets.engine.batch.rows import Row
from jpets.engine.batch.rows import led as led_by
from jpets.engine.engine import Engine
from jpets.engine.programs.delta_order import ORDERED, Execution
from jpets.engine.programs.mesh import first_device
from jpets.engine.programs.program import ProgramKey
from jpets.engine.queue.pending import Pending
from jpets.engine.workloads.encoder_network import INPUTS, EncoderNetwork
from jpets.model.batch import POOLINGS
from jpets.model.encoder import Params, cast_params, split
from jpets.model.forward import Outputs
from jpets.types import Classification, Delta, Embedding, Head, Query, Regression, Result, Span, Task, Tokens

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "adapter": {"bottleneck": 12},
    "lora": {"sites": ["query", "value"], "rank": 3},
    "bitfit": {},
    "mask": {},
    "diff": {"density": 0.03},
    "ia3": {"sites": ["key", "value", "into_attn_out", "into_ffn_out", "ffn_in"]},
    "onebit": {},
    "prefix": {"tokens": 5, "first_position": 5},
    "prompt": {"tokens": 2},
}
"""One row a method: the settings that the shared tests draw random deltas with."""

ENGINE_BUCKETS = [Bucket(32, ((1, 32),)), Bucket(256, ((14, 16), (4, 64)))]
ENGINE_SETTINGS = EngineSettings(dtype="float32", max_length=64, max_batch_rows=16, slots=10, background_compile=False)


@functools.cache
def tiny(name: str = "tiny-bert") -> Backbone:
    from checkpoints.source import load_backbone  # with packages that tests of kernels do without

    return load_backbone(FIXTURES / name)


@functools.cache
def shallow(name: str = "tiny-bert", layers: int = 2) -> Backbone:
    """The lower layers of a tiny backbone, where nothing compares with a reference: programs take long to compile, and
    as much longer as they have layers."""
    whole = tiny(name)
    config = dataclasses.replace(whole.config, layers=layers)
    tensors = from_params(whole.params, whole.config)
    kept = {place: tensors[place] for place in canonical_shapes(config)}
    return Backbone.of_tensors(whole.name, config, kept, whole.tokenizer_json)


def device_params(backbone: Backbone) -> Params:
    return jax.tree.map(jnp.asarray, dict(backbone.params))


def on_device(assembled: Assembled) -> Assembled:
    """The batch as device arrays, for use outside of a compiled program."""
    batch, views = jax.tree.map(jnp.asarray, (assembled.batch, assembled.views))
    return dataclasses.replace(assembled, batch=batch, views=views)


def make_head(
    rng: np.random.Generator,
    hidden: int,
    outputs: int,
    *,
    two_layers: bool = False,
    kind: str = "sequence-classification",
    pooling: str = "cls",
    **more: Any,
) -> Head:
    tensors = {"kernel": rng.normal(0, 0.2, (hidden, outputs)), "bias": rng.normal(0, 0.2, outputs)}
    if two_layers:
        tensors |= {"dense_kernel": rng.normal(0, 0.2, (hidden, hidden)), "dense_bias": rng.normal(0, 0.2, hidden)}
    floats = {name: value.astype(np.float32) for name, value in tensors.items()}
    return Head(kind, floats, pooling=pooling, **more)  # type: ignore[arg-type]


def light_or_mask_task(number: int, name: str | None = None) -> Task:
    """A task of the shallow backbone; numbers take bitfit, lora and mask in turn."""
    delta = random_delta(("bitfit", "lora", "mask")[number % 3], shallow().config, 100 + number)
    return make_task(shallow(), name or f"task-{number}", [delta], make_head(np.random.default_rng(number), 64, 3))


def make_task(backbone: Backbone, name: str, deltas: Sequence[Delta], head: Head, **more: Any) -> Task:
    labels = tuple(f"label-{i}" for i in range(head.outputs)) if head.type != "question-answering" else ()
    return Task(name, backbone.ref(), tuple(deltas), head, labels, **more)


def random_delta(method: str, config: BackboneConfig, seed: int = 0, **settings: Any) -> Delta:
    return METHODS[method].init(np.random.default_rng(seed), {**SETTINGS[method], **settings}, config, 0.1)


def method_tasks(backbone: Backbone) -> list[Task]:
    """One task a method, heads of all kinds, and two tasks that carry several deltas."""
    rng, config = np.random.default_rng(7), backbone.config
    heads = [
        make_head(rng, config.hidden_size, 3, two_layers=True),
        make_head(rng, config.hidden_size, 5, kind="token-classification"),
        make_head(rng, config.hidden_size, 2, pooling="mean"),
        make_head(rng, config.hidden_size, 6, pooling="pooler" if config.pooler else "mean"),
        make_head(rng, config.hidden_size, 4),
        make_head(rng, config.hidden_size, 3, pooling="mean"),
        make_head(rng, config.hidden_size, 2, two_layers=True),
        make_head(rng, config.hidden_size, 3, pooling="mean"),
        make_head(rng, config.hidden_size, 4, kind="token-classification"),
    ]
    tasks = [
        make_task(backbone, method, [random_delta(method, config, seed)], heads[seed % len(heads)])
        for seed, method in enumerate(METHODS)
    ]
    many = ("lora", "adapter", "diff", "bitfit", "ia3")
    several = [random_delta(method, config, 20 + i) for i, method in enumerate(many)]
    last = "pooler" if config.pooler else "mean"
    led = [random_delta("prompt", config, 40, tokens=1), random_delta("prefix", config, 41, tokens=6)]
    led += [random_delta("lora", config, 42)]
    masked = [
        random_delta("mask", config, 30, sites=list(config.linear_sites())),
        random_delta("lora", config, 31),
        random_delta("lora", config, 32),
    ]
    return [
        *tasks,
        make_task(backbone, "led", led, make_head(rng, config.hidden_size, 2, pooling="mean")),
        make_task(backbone, "several", several, make_head(rng, config.hidden_size, 3)),
        make_task(backbone, "masked-lora", masked, make_head(rng, config.hidden_size, 3, pooling=last)),
    ]


class Bench:
    """Tasks in banks, ready to run in any bucket and variant without an engine."""

    def __init__(
        self, backbone: Backbone, tasks: Sequence[Task], dtype: str = "float32", execution: Execution = ORDERED
    ) -> None:
        self.backbone, self.config, self.execution = backbone, backbone.config, execution
        self.encoder = split(self.config)
        self.params = cast_params(device_params(backbone), dtype)
        self.tasks: dict[str | None, Task] = {task.id: task for task in tasks}
        self.banks: dict[ClassKey, Bank] = {}
        self.slots: dict[str | None, dict[ClassKey, int]] = {None: {}}
        self.base, self.dtype = np.asarray(backbone.params["bias"], np.float32), dtype
        for number, task in enumerate(tasks, 1):
            self.slots[task.id] = {}
            for part in self.parts(task):
                key = tightest(part.key, list(self.banks)) or part.key
                if key not in self.banks:
                    self.banks[key] = Bank(key, len(tasks) + 1, self.config, dtype, self.base, first_device().bank)
                self.slots[task.id][key] = number
            self.write(task)
        self._compiled: dict[tuple[Bucket, Variant], Any] = {}

    def parts(self, task: Task) -> list[Contribution]:
        return lower_task(fold_pooler(task, self.config, dict(self.backbone.params)), self.config)

    def contents(self, task: Task) -> Iterator[tuple[ClassKey, int, Mapping[str, Any]]]:
        """What a task of known shape holds in the slots of its id."""
        for part in self.parts(task):
            for key, slot in self.slots[task.id].items():
                if key.covers(part.key):
                    yield key, slot, slot_arrays(part, key, self.config, self.dtype, self.base)

    def write(self, task: Task) -> None:
        for key, slot, arrays in self.contents(task):
            self.banks[key].write(slot, arrays)

    def row(self, task: str | None, ids: np.ndarray) -> Row:
        """A row of as many tokens as there are ``ids``; virtual tokens take the places of the first."""
        lead = task_lead(self.tasks[task]) if task is not None else NO_LEAD
        text = ids[lead.tokens :].astype(np.int32)
        head = self.tasks[task].head if task is not None else None
        pooling = POOLINGS.index(head.pooling if head else "mean")
        if head and any(f"pooler/{w}" in d.tensors for d in self.tasks[task].deltas for w in ("A", "bits", "rows")):
            pooling = 0 if head.pooling == "pooler" else pooling
        return led_by(Row.of_tokens(text, np.zeros(len(text), np.int32), self.slots[task], pooling), lead, INPUTS)

    def run(self, rows: Sequence[Row], bucket: Bucket, variant: Variant) -> tuple[Assembled, Outputs]:
        assembled = assemble(rows, bucket, variant, INPUTS)
        if (bucket, variant) not in self._compiled:
            program = functools.partial(EncoderNetwork(self.config).run, bucket, variant, self.execution)
            self._compiled[bucket, variant] = jax.jit(program)
        banks = tuple(self.banks[key].arrays for key in variant.classes())
        _, outputs = self._compiled[bucket, variant](self.params, banks, (), assembled.batch, assembled.views)
        return assembled, jax.tree.map(np.asarray, outputs)


def row_answer(assembled: Assembled, outputs: Outputs, query: int, labels: int) -> dict[str, np.ndarray]:
    """What the device says about one query: pooled vector, finite flag and logits."""
    row, place = int(assembled.order[query]), assembled.heads[query]
    answer = {"pooled": np.asarray(outputs.pooled[row]), "finite": np.asarray(outputs.finite[row])}
    if place is not None:
        answer["logits"] = np.asarray(outputs.logits[place.head][place.cells])[:, :labels]
    return answer


ACTIVATE: Mapping[str, Callable[[Any], Any]] = {
    "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh,
    "swish": lambda x: x / (1 + np.exp(-x)),
}


def erf(x: np.ndarray) -> np.ndarray:
    from math import erf as scalar

    return np.vectorize(scalar)(x)


def dense_hidden(backbone: Backbone, task: Task | None, ids: np.ndarray, types: np.ndarray | None = None) -> Any:
    """Final hidden states [L, d] and pooler output in numpy f64, from dense merged weights and the rest inline.

    Independent of the served path: no banks, no packing, no gathers, no jpets.model.
    """
    config, layout = backbone.config, backbone.config.bias_layout()
    params = device_params(backbone)
    inline: dict[str, list[Delta]] = {"adapter": [], "prefix": [], "prompt": []}
    for delta in in_merge_order(task.deltas if task else ()):
        if delta.method in inline:
            inline[delta.method].append(delta)
        else:
            params = METHODS[delta.method].merge(delta, config, params)
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def bias(layer: int, site: str) -> np.ndarray:
        return p["bias"][layout[layer, site]]

    def norm(x: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config.norm_eps) * scale + shift

    def adapt(site: str, layer: int, y: np.ndarray, normed: np.ndarray) -> np.ndarray:
        for delta in inline["adapter"]:
            settings = delta.settings
            if site in settings["sites"] and layer in settings["layers"]:
                at = list(settings["layers"]).index(layer)
                part = {name: delta.tensors[f"{site}/{name}"][at] for name in ("down", "down_bias", "up", "up_bias")}
                read = normed if settings["input"] == "normed" else y
                hidden = ACTIVATE[settings["activation"]](read @ part["down"] + part["down_bias"])
                y = y + hidden @ part["up"] + part["up_bias"]
        return y

    words = np.concatenate([*(delta.tensors["embeddings/prompt"][0] for delta in inline["prompt"]), p["word"][ids]])
    length, d, heads = len(words), config.hidden_size, config.heads
    first = sum(delta.settings.get("first_position", 0) for delta in inline["prefix"])
    x = words + p["position"][first : first + length]
    if config.type_vocab_size:
        given = types if types is not None else np.zeros(len(ids), int)
        x = x + p["token_type"][np.pad(given, (length - len(ids), 0))]
    x = norm(x, p["embeddings_norm"], bias(0, "embeddings_norm"))
    if config.embedding_size:
        x = x @ p["embeddings_project"] + bias(0, "embeddings_project")
    for layer in range(config.layers):
        w = p["layers"][layer]
        q, k, v = (
            (x @ w["qkv"][:, i * d : (i + 1) * d] + bias(layer, site)).reshape(length, heads, -1)
            for i, site in enumerate(("query", "key", "value"))
        )
        for delta in inline["prefix"]:
            if layer in (layers := delta.settings.get("layers", list(range(config.layers)))):
                own = (delta.tensors[f"attn_kv/{part}"][layers.index(layer)] for part in ("key", "value"))
                k, v = (np.concatenate([a.reshape(-1, *b.shape[1:]), b]) for a, b in zip(own, (k, v), strict=True))
        scores = np.einsum("qhs,khs->hqk", q, k) / np.sqrt(d // heads)
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        context = np.einsum("hqk,khs->qhs", probs, v).reshape(length, d)
        y = context @ w["attn_out"] + bias(layer, "attn_out")
        y = adapt("after_attn_out", layer, y, norm(y + x, w["attn_norm"], bias(layer, "attn_norm")))
        x = norm(y + x, w["attn_norm"], bias(layer, "attn_norm"))
        h = x @ w["ffn_in"] + bias(layer, "ffn_in")
        h = h * 0.5 * (1 + erf(h / np.sqrt(2)))
        y = h @ w["ffn_out"] + bias(layer, "ffn_out")
        y = adapt("after_ffn_out", layer, y, norm(y + x, w["ffn_norm"], bias(layer, "ffn_norm")))
        x = norm(y + x, w["ffn_norm"], bias(layer, "ffn_norm"))
    pooled = np.tanh(x[0] @ p["pooler"] + bias(0, "pooler")) if config.pooler else None
    return x, pooled


def dense_answer(
    backbone: Backbone, task: Task | None, ids: np.ndarray, types: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Pooled vector and logits that ``row_answer`` should agree with."""
    hidden, pooler = dense_hidden(backbone, task, ids, types)
    if task is None:
        return {"pooled": hidden.mean(0)}
    head = task.head
    pooled = {"cls": hidden[0], "mean": hidden.mean(0), "pooler": pooler}[head.pooling]
    read = hidden[-len(ids) :] if head.reads_tokens else pooled[None]
    if head.dense:
        read = ACTIVATE[head.activation](read @ head.tensors["dense_kernel"] + head.tensors["dense_bias"])
    return {"pooled": pooled, "logits": read @ head.tensors["kernel"] + head.tensors["bias"]}


def houlsby(config: BackboneConfig, **more: Any) -> dict[str, Any]:
    return {**adapter_placement("houlsby", config), **more}


def logits_of(result: Result) -> np.ndarray:
    assert isinstance(result, Classification | Regression | Tokens | Span), result
    return result.logits


def embedding_of(result: Result) -> np.ndarray:
    assert isinstance(result, Embedding), result
    return result.embedding


def load_json(path: pathlib.Path) -> Any:
    return json.loads(path.read_text())


Found = TypeVar("Found")


def wait_until(look: Callable[[], Found], seconds: float = 300) -> Found:
    """What ``look`` finds, once that is true. The slowest machine may need long: a test that is well does not."""
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, f"after {seconds:g} s still {found!r}"
        time.sleep(0.01)
    return found


class paused:
    """Holds the owner thread between two batches, so that what is submitted meanwhile waits."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._resume = threading.Event()
        self._held = threading.Event()

    def __enter__(self) -> None:
        def hold(pendings: object) -> None:
            self._held.set()
            self._resume.wait(30)

        self._hook = hold
        self._engine.hooks.append(hold)
        self._future = self._engine.submit([Query(None, "some text")])[0]
        assert self._held.wait(30)

    def __exit__(self, *exception: object) -> None:
        self._engine.hooks.remove(self._hook)
        self._resume.set()
        self._future.result(30)


def pendings(engine: Engine, tasks: Sequence[str | None], length: int = 9) -> list[Pending]:
    """Queries of these tasks, ready to be planned; lengths go up and down by two."""
    prepared = [
        engine.intake.prepare(Query(task, input_ids=[7] * (length + at % 3)), None, 0, "default")
        for at, task in enumerate(tasks)
    ]
    engine.intake.give_back(prepared)
    return [item for item in prepared if isinstance(item, Pending)]


@dataclasses.dataclass
class FakeCompiling:
    """Notes what is wanted; says that ``foremost`` are missed most, and that ``never`` are barred."""

    foremost: Sequence[ProgramKey] = ()
    never: Sequence[ProgramKey] = ()
    wanted: list[tuple[ProgramKey, float]] = dataclasses.field(default_factory=list)

    def want(self, key: ProgramKey, seconds: float) -> None:
        self.wanted.append((key, seconds))

    def missed(self) -> Sequence[ProgramKey]:
        return self.foremost

    def barred(self, key: ProgramKey) -> bool:
        return key in self.never
