"""Bottleneck adapters: y + act(y Wdown + c) Wup + d behind a sub-layer's output (PetS section 2.3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Array, Float

from jpets.config import ADAPTER_SITES, BackboneConfig
from jpets.deltas.merge import Params
from jpets.deltas.protocol import (
    SUM_BYTES,
    ArraySpec,
    Bound,
    ClassKey,
    Contribution,
    Method,
    TensorSpec,
    Work,
    covered_layers,
    full_shape,
    layer_bytes,
    normal,
    size_step,
)
from jpets.deltas.recipe import INIT_SCALE, Course
from jpets.deltas.view import RowView, SegmentView
from jpets.errors import InvalidTask
from jpets.types import Delta
from pallas_kernels.low_rank import low_rank
from pallas_kernels.numerics import ACTIVATIONS, value_dtype

INPUTS = ("output", "normed", "residual")
PARTS = ("down", "down_bias", "up", "up_bias")


def adapter_placement(name: str, config: BackboneConfig) -> dict[str, Any]:
    """Settings of a published placement.

    ``houlsby``: both sites, all layers, on the sub-layer's output (Houlsby et al. 2019; AdapterHub ``double_seq_bn``).
    ``pfeiffer``: feed-forward only; reads norm(y + residual), adds to y (Pfeiffer et al. 2020; AdapterHub ``seq_bn``).
    ``parallel``: feed-forward only; reads what the sub-layer reads (He et al. 2022; AdapterHub ``par_bn``).
    ``attention_upper``: attention only, upper half of the layers, ReLU (HMI section 3.2.2).
    """
    every = list(range(config.layers))
    if name == "houlsby":
        return {"sites": list(ADAPTER_SITES), "layers": every, "activation": "swish", "input": "output"}
    if name == "pfeiffer":
        return {"sites": ["after_ffn_out"], "layers": every, "activation": "relu", "input": "normed"}
    if name == "parallel":
        return {"sites": ["after_ffn_out"], "layers": every, "activation": "relu", "input": "residual"}
    if name == "attention_upper":
        upper = every[config.layers // 2 :]
        return {"sites": ["after_attn_out"], "layers": upper, "activation": "relu", "input": "output"}
    raise ValueError(f"adapter placement must be houlsby, pfeiffer, parallel or attention_upper, got {name!r}")


class Adapter(Method):
    """Settings: ``sites``, ``layers``, ``bottleneck``, ``activation``, ``input`` (what the down projection reads:
    ``output`` = y, ``normed`` = norm(y + residual), ``residual``).
    Tensors: ``site/down``, ``down_bias``, ``up``, ``up_bias``."""

    name = "adapter"
    kind = "light"
    shares_layers = True
    step = "adapter"
    repeatable = False  # there is no convention whether the second one reads the first one's output
    usual: ClassVar[Mapping[str, Any]] = {"bottleneck": 64}
    standard = True
    course = Course(
        rate=2e-3,
        takes=frozenset({"placement", "bottleneck", "sites", "layers", "activation", "input"}),
        sizes=("bottleneck",),
    )

    def tensors(self, settings: Mapping[str, Any], config: BackboneConfig) -> Mapping[str, TensorSpec]:
        layers, m, d = len(covered_layers(settings, config)), settings.get("bottleneck"), config.hidden_size
        sites = settings.get("sites", ADAPTER_SITES)
        if not sites or set(sites) - set(ADAPTER_SITES):
            raise InvalidTask(f"adapter: sites must be some of {list(ADAPTER_SITES)}, got {list(sites)}")
        if not isinstance(m, int) or not 0 < m <= 4 * d:
            raise InvalidTask(f"adapter: bottleneck must be a number from 1 to {4 * d}, got {m!r}")
        if settings.get("activation", "relu") not in ACTIVATIONS:
            raise InvalidTask(
                f"adapter: activation must be one of {sorted(ACTIVATIONS)}, got {settings['activation']!r}"
            )
        if settings.get("input", "output") not in INPUTS:
            raise InvalidTask(f"adapter: input must be one of {list(INPUTS)}, got {settings['input']!r}")
        shapes = {"down": (layers, d, m), "down_bias": (layers, m), "up": (layers, m, d), "up_bias": (layers, d)}
        return {f"{site}/{part}": TensorSpec(shapes[part]) for site in sites for part in PARTS}

    def init(
        self, rng: np.random.Generator, settings: Mapping[str, Any], config: BackboneConfig, scale: float
    ) -> Delta:
        full = {**adapter_placement("houlsby", config), "bottleneck": 64, **settings}
        tensors = {name: normal(rng, scale, full_shape(spec)) for name, spec in self.tensors(full, config).items()}
        return Delta("adapter", full, tensors)

    def start(
        self, rng: np.random.Generator, settings: Mapping[str, Any], config: BackboneConfig, base: Params
    ) -> Delta:
        """``placement`` is a published one, Houlsby's by default. All but the down projection starts at zero."""
        given = dict(settings)
        placed = adapter_placement(str(given.pop("placement", "houlsby")), config)
        delta = self.init(rng, {**placed, **given}, config, INIT_SCALE)
        zero = {name: np.zeros_like(own) for name, own in delta.tensors.items() if not name.endswith("/down")}
        return dataclasses.replace(delta, tensors={**delta.tensors, **zero})

    def lower(self, delta: Delta, config: BackboneConfig) -> Sequence[Contribution]:
        settings = delta.settings
        sites = [site for site in ADAPTER_SITES if site in settings.get("sites", ADAPTER_SITES)]
        key = ClassKey(
            "adapter",
            tuple((site, size_step(settings["bottleneck"])) for site in sites),
            covered_layers(settings, config),
            (("activation", settings.get("activation", "relu")), ("input", settings.get("input", "output"))),
        )
        return [Contribution(key, {f"{s}/{part}": delta.tensors[f"{s}/{part}"] for s in sites for part in PARTS})]

    def bank_arrays(self, key: ClassKey, config: BackboneConfig) -> Mapping[str, ArraySpec]:
        specs: dict[str, ArraySpec] = {}
        layers, d = len(key.layers), config.hidden_size
        for site, m in key.sites:
            shapes = {"down": (layers, d, m), "down_bias": (layers, m), "up": (layers, m, d), "up_bias": (layers, d)}
            specs |= {f"{site}/{part}": ArraySpec(shape) for part, shape in shapes.items()}
        return specs

    def work(self, key: ClassKey, config: BackboneConfig, tokens: int, tasks: int) -> Work:
        """Two thin products a site; the sub-layer's output is read, the sum with the residual is read and written."""
        flops = sum(4 * tokens * config.hidden_size * size for _, size in key.sites)
        moved = 3 * SUM_BYTES * config.hidden_size * len(key.sites)
        return Work(flops, tasks * layer_bytes(self.bank_arrays(key, config)) + tokens * moved)

    def after(
        self,
        bound: Bound,
        layer: int,
        site: str,
        y: Float[Array, "t d"],
        residual: Float[Array, "t d"],
        normed: Float[Array, "t d"],
        total: Float[Array, "t d"],
    ) -> Float[Array, "t d"]:
        view, bank = bound.view, bound.bank
        assert isinstance(view, (RowView, SegmentView))
        read = {"output": y, "normed": normed, "residual": residual}[bound.key.option("input")]
        at, activation = bound.entry(layer), bound.key.option("activation")
        candidate = bound.operators["low_rank"]

        def operator(x: Array, slots: Array, down: Array, down_bias: Array, up: Array, up_bias: Array) -> Array:
            biases = {"down_bias": down_bias, "up_bias": up_bias}
            return low_rank(x, down, up, slots, at, activation=activation, candidate=candidate, **biases)

        # Cut out first, so that only the window's rows are converted.
        x = view.segments(read).astype(value_dtype(bank[f"{site}/down"]))
        return view.add(total, bound.launch(operator, x, view.slots, *(bank[f"{site}/{part}"] for part in PARTS)))
