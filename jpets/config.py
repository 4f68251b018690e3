"""Frozen settings: the shape of a backbone, and how an engine runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

LINEAR_SITES = ("query", "key", "value", "attn_out", "ffn_in", "ffn_out")
"""The six linear sites of a layer, in the order in which their biases are laid out."""
NORM_SITES = ("attn_norm", "ffn_norm")
OUTSIDE_SITES = ("embeddings_norm", "embeddings_project", "pooler")
"""Sites that a backbone has once or not at all, outside its layers."""
ADAPTER_SITES = ("after_attn_out", "after_ffn_out")

PADDING_SKIPPED = ("roberta", "xlm-roberta", "camembert")
"""Families in which positions do not count padding tokens: a padding token in a text has a position of its own."""

Policy = Literal["fixed", "alpha", "beta", "coordinated", "turbo", "packed", "length-buffer", "auto", "steady"]
Trigger = Literal["hungry", "lazy"]
Kernels = Literal["auto", "reference", "batched", "dense", "cudnn", "mosaic", "narrow"]
TablePlace = Literal["auto", "mapped", "staged"]
DType = Literal["bfloat16", "float32"]
TableFormat = Literal["bfloat16", "float8"]
"""Numbers of n-gram vectors: bf16, or E4M3 with a power of two for each 32 of them (OCP Microscaling, MXFP8)."""
SCALED = 32
"""Numbers that share a scale."""


@dataclasses.dataclass(frozen=True)
class BackboneConfig:
    """Shape and constants of an encoder of the BERT family.

    ``family`` is the ``model_type`` of its checkpoints; everything that changes results is a field.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    intermediate_size: int
    max_positions: int
    """Tokens that a query may have; position 0 is the first token's, under any number in the checkpoint."""
    type_vocab_size: int = 2
    activation: str = "gelu"
    norm_eps: float = 1e-12
    pooler: bool = True
    embedding_size: int = 0
    """Width of the embeddings if a projection takes them to ``hidden_size`` (ELECTRA); 0: they have that width
    already."""
    padding_id: int = 1
    """Id of the padding token, if positions do not count it (``skips_padding``); else it has no meaning."""
    usual_length: int = 0
    """Tokens to which texts are cut unless the query or task says otherwise: the tokenizer's ``model_max_length`` if
    that is less than ``max_positions``; 0: as many as there are positions. Longer texts can be computed."""
    window: tuple[int, int] = (0, 0)
    """Tokens before and after a token in its n-gram, if the layers work on tables of n-gram vectors (``jpets.plot``),
    which stand for word embeddings and lower layers."""
    table_rows: int = 0
    """Rows of the tables of a ``window``, or of a device's copies of some, that programs take as a parameter."""
    table_format: TableFormat = "bfloat16"

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size {self.hidden_size} must be a multiple of heads {self.heads}")

    @property
    def skips_padding(self) -> bool:
        """Whether padding tokens in a text take no position, but share one of their own (RoBERTa)."""
        return self.family in PADDING_SKIPPED

    @property
    def looks_up(self) -> bool:
        """Whether tokens come as the rows of their n-grams in tables, and not as their ids."""
        return self.window != (0, 0)

    @property
    def table_shape(self) -> tuple[int, int, int]:
        """Of the tables in memory: rows, vectors of a row, numbers of a vector, or bytes of one in 8 bits."""
        return self.table_rows, sum(self.window) + 1, stored_width(self.table_format, self.hidden_size)

    @property
    def table_dtype(self) -> str:
        """Of the tables in memory."""
        return stored_dtype(self.table_format)

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings and of their norm."""
        return self.embedding_size or self.hidden_size

    def dims(self, site: str) -> tuple[int, int]:
        """(inputs, outputs) of a linear site's weight."""
        d, f = self.hidden_size, self.intermediate_size
        return {"ffn_in": (d, f), "ffn_out": (f, d), "embeddings_project": (self.embedding_width, d)}.get(site, (d, d))

    def linear_sites(self) -> tuple[str, ...]:
        return (*LINEAR_SITES, "pooler") if self.pooler else LINEAR_SITES

    def layer_weights(self) -> int:
        """Weights of one layer's linear sites."""
        return sum(a * b for a, b in map(self.dims, LINEAR_SITES))

    def site_layers(self, site: str) -> tuple[int, ...]:
        """The layers that have ``site``; sites outside the layers count as one layer, 0."""
        return (0,) if site in OUTSIDE_SITES else tuple(range(self.layers))

    def bias_layout(self) -> Mapping[tuple[int, str], slice]:
        """The place of each bias in the one flat bias vector that a row gathers: (layer, site) -> slice."""
        layout: dict[tuple[int, str], slice] = {}
        start = 0

        def place(layer: int, site: str, size: int) -> None:
            nonlocal start
            layout[layer, site] = slice(start, start + size)
            start += size

        place(0, "embeddings_norm", self.embedding_width)
        if self.embedding_size:
            place(0, "embeddings_project", self.hidden_size)
        for layer in range(self.layers):
            for site in LINEAR_SITES:
                place(layer, site, self.dims(site)[1])
            for site in NORM_SITES:
                place(layer, site, self.hidden_size)
        if self.pooler:
            place(0, "pooler", self.hidden_size)
        return layout

    def bias_size(self) -> int:
        return max(part.stop for part in self.bias_layout().values())

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BackboneConfig:
        return cls(**{**data, "window": tuple(data.get("window", (0, 0)))})


def stored_width(given: TableFormat, width: int) -> int:
    """Elements of a stored n-gram vector of ``width`` numbers: its scales stand behind it."""
    return width + width // SCALED if given == "float8" else width


def stored_dtype(given: TableFormat) -> str:
    return "uint8" if given == "float8" else "bfloat16"


NAMED_BACKBONES: Mapping[str, BackboneConfig] = {
    "minilm-l6": BackboneConfig("bert", 30522, 384, 6, 12, 1536, 512),
    "distilbert": BackboneConfig("distilbert", 30522, 768, 6, 12, 3072, 512, type_vocab_size=0, pooler=False),
    "bert-base": BackboneConfig("bert", 30522, 768, 12, 12, 3072, 512),
    "bert-large": BackboneConfig("bert", 30522, 1024, 24, 16, 4096, 512),
    "roberta-base": BackboneConfig("roberta", 50265, 768, 12, 12, 3072, 512, type_vocab_size=1, norm_eps=1e-5),
    "electra-small": BackboneConfig("electra", 30522, 256, 12, 4, 1024, 512, pooler=False, embedding_size=128),
}
"""Sizes that can be initialised at random (benchmarks)."""


def about(help: str, **bounds: float) -> Mapping[str, Any]:
    """The rest of a setting's declaration, besides name, type and default. Its server option, its variable, its key in
    a file and its line in the manual follow from all of these.

    ``bounds`` are ``ge``, ``gt`` and ``le``; for a mapping they apply to its values. Servers and commands refuse values
    beyond them. An engine made in Python does not: tests go below some.
    """
    return {"help": help, "bounds": bounds}


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """How one engine batches, compiles and bounds itself. Times are seconds."""

    dtype: DType = field(default="bfloat16", metadata=about("number format"))
    max_length: int = field(default=512, metadata=about("longest text in tokens", ge=8))
    """Longest query in tokens; lowered to what the backbone's positions allow."""
    max_batch_tokens: int = field(
        default=0, metadata=about("most tokens in a batch, 0 for as many as make a token cheaper", ge=0)
    )
    max_batch_rows: int = field(default=0, metadata=about("most texts in a batch, 0 for an eighth of its tokens", ge=0))
    slots: int = field(default=32, metadata=about("fewest tasks that each class has room for", ge=1))
    """Fewest task slots a class's bank is made with; it also gets room for twice the tasks known at start. Heads and
    biases get as many for each class of deltas."""
    max_slots: int = field(
        default=1023, metadata=about("most tasks of a class on the device; more take turns there", ge=1)
    )
    """Most task slots that a class's bank is made with for tasks that may leave the device for others. Heads and biases
    get as many for each class of deltas."""
    policy: Policy = field(default="auto", metadata=about("how waiting texts are batched"))
    """How waiting queries are batched (``jpets.scheduling.policies``), over the shapes of the programs that are ready.
    ``fixed``: ``fixed_batch`` in order of arrival. ``alpha``: the least summed cost of the shared part. ``beta``: each
    task's mini-batches by themselves. ``coordinated``: PetS's Algorithm 1. ``turbo``: TurboTransformers' Algorithm 3.
    ``length-buffer``: bins of like length. ``packed``: batches as full as they get, by length or task by task.
    ``auto``: the plan that is predicted to take least. ``steady``: a query's length and task choose its program, so
    that its bits never depend on the traffic."""
    fixed_batch: int = field(default=16, metadata=about("texts in a batch of the policy fixed", ge=1))
    trigger: Trigger = field(
        default="hungry", metadata=about("when a batch starts: at once, or after waiting for company")
    )
    lazy_wait: float = field(default=0.005, metadata=about("seconds that the lazy trigger waits at most", ge=0, le=60))
    lazy_size: int = field(default=32, metadata=about("waiting texts with which the lazy trigger starts at once", ge=1))
    latency_target: float = field(
        default=0.1, metadata=about("seconds; the lazy trigger starts when half of them would pass", gt=0)
    )
    flood_stretch: float = field(
        default=1.0,
        metadata=about(
            "while one tenant floods: how many times as long as the others' batches its own may take, 0 for any length",
            ge=0,
        ),
    )
    """While a tenant floods the engine and others use less than their part of it, its batches take at most this many
    times as long as theirs, one at a time: they wait less, and it gets fewer tokens a second, as short batches are less
    efficient. 0: the policy decides how long batches are."""
    max_queue: int = field(default=4096, metadata=about("most texts that wait; more get 503", ge=1))
    in_flight: int = field(default=2, metadata=about("batches on a device that are not fetched yet", ge=1))
    """Batches dispatched but not yet fetched, per replica."""
    background_compile: bool = field(default=True, metadata=about("compile further programs while texts are answered"))
    device_memory_gb: float = field(
        default=0.0, metadata=about("device memory (10^9 bytes) for everything, 0 for all there is", ge=0)
    )
    """Device memory (10^9 bytes) for parameters, banks and running batches; 0: all that the device has."""
    host_memory_gb: float = field(
        default=1.0, metadata=about("host memory (10^9 bytes) for tasks that are not on the device", ge=0)
    )
    """Host memory (10^9 bytes) for registered tasks that are not on the device, in the form of the device."""
    merged_memory_gb: float = field(
        default=0.0, metadata=about("device memory (10^9 bytes) for merged weights of hot tasks", ge=0)
    )
    """Device memory (10^9 bytes) for merged weights of hot tasks: tasks with heavy or low-rank deltas that cost more
    than a batch of their own; 0: none. They are found by predicted costs."""
    reserved_tasks: Mapping[str, int] = field(
        default_factory=dict, metadata=about("tasks of a tenant that stay on the device: TENANT=NUMBER", ge=0)
    )
    """This many registered tasks of a tenant stay on the device, whatever tasks other tenants need."""
    prefetch: bool = field(default=True, metadata=about("load tasks of waiting texts while others are computed"))
    """Tasks for waiting queries come while others are computed; without it, only when nothing else is left to do."""
    program_memory_mb: int = field(
        default=0,
        metadata=about("host memory (MiB) of compiled programs, 0 for an eighth of the host's, 896 to 4096", ge=0),
    )
    """Host memory for compiled programs of a device (MiB, estimated). Programs that are needed to be ready always stay.
    Left to the host, several devices share the eighth. A program of 13 classes takes 140 MiB, of a few 20."""
    delta_streams: int = field(
        default=1,
        metadata=about(
            "streams of a GPU for delta operators, 1 for the backbone's own, 0 for the order of their classes", ge=0
        ),
    )
    """Streams for the delta operators of a GPU (PetS section 4.2). Nothing was measured there yet, so 1: they share the
    backbone's stream and are only ordered. 0 keeps them in the order of their classes. Other devices have one."""
    delta_stream_tokens: int = field(
        default=0, metadata=about("programs with fewer tokens for each class use two delta streams", ge=0)
    )
    """Programs with fewer tokens for each class use two delta streams; to be profiled on each kind of GPU."""
    kernels: Kernels = field(
        default="auto",
        metadata=about(
            "what computes a GPU's operators: auto for the fastest candidates as measured at the first start, "
            "reference for plain XLA, or a candidate's name"
        ),
    )
    """What computes each operator: ``auto`` for the candidates that are found fastest when an engine first starts on a
    GPU, within a minute; or one name, wherever an operator has a candidate of that name and it takes the operands."""
    tables: TablePlace = field(
        default="auto",
        metadata=about(
            "where a backbone's tables are read: mapped, by a CPU's programs; staged, by the host, for what the device "
            "does not have yet; auto, mapped on a CPU and staged elsewhere"
        ),
    )
    """Where the vectors of a backbone's tables are read: ``mapped``, programs of a CPU read the files themselves;
    ``staged``, the host gathers those that a batch needs and the device does not have, while it computes the batch
    before."""
    table_memory_gb: float = field(
        default=0.5,
        metadata=about("device memory (10^9 bytes) for rows of tables, where they are staged", gt=0),
    )
    """Device memory (10^9 bytes) for the rows of a backbone's tables that batches read last, at most an eighth of what
    the engine may take, and enough for one batch."""
    move_mb_per_second: float = field(
        default=300.0,
        metadata=about("deltas (10^6 bytes a second) that move to balance devices, 0 for any number", ge=0),
    )
    """Most bytes (10^6 a second, all devices together) of deltas that move between devices so that these have equal
    work: a round of balancing may move those of its interval. For the default, a link of 25 GB/s needs 1.2 % of the
    time, as much as multi-GPU PetS spent in its largest round (section 3.4.1: 120 ms of 10 s). 0 sets no limit."""
    response_cache_mb: int = field(
        default=0, metadata=about("host memory (MiB) for answers to texts that come again, 0 keeps none", ge=0)
    )
    """Host memory for answers to repeated queries (MiB); 0 keeps none."""
    stall_seconds: float = field(
        default=60.0, metadata=about("seconds without progress after which the server is not live", gt=0)
    )
    """Work that makes no progress for this long makes the engine not live."""


@dataclasses.dataclass(frozen=True)
class SizingRule:
    """How many students of a group answer (Student Parallelism sections B.4.1 to B.4.3).

    ``groups`` of all students run side by side on a device, by default as many as batches that it may have in flight;
    each computes so many texts ``together`` (the largest element of the paper's buffer), None for as many as take at
    most twice the time of one. Smaller groups run side by side in larger numbers.
    """

    groups: int = 2
    together: int | None = None
    window: float = 120.0
    """Seconds of quiet after which one more student answers."""
    fixed: bool = False
    """Always all students."""
