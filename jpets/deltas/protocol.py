"""The delta protocol: the parts of one PET method that one file in this folder defines.

Data goes three ways through it. A task file's tensors are checked against ``tensors``. ``lower`` turns a delta into
*contributions*, the arrays of one bank slot for one or more classes (a sparse difference gives one to ``diff`` and one
to ``bias``). Inside a program ``Sites`` calls the hooks of every class in the batch in the order of the unified
representation: ``inputs``, ``product``, ``addition``, then the bias, then ``scale`` and ``after``. Two hooks act once
for each row: ``embed`` before the first layer, ``context`` in each layer's attention.

``merge`` is the independent, dense form of the same delta: it serves one-copy-a-task baselines, tests and training.

``course`` says how a method is trained, ``start`` makes its first numbers: see ``recipe.py``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from jaxtyping import Array, Float, Int, Num, Shaped

from jpets.config import OUTSIDE_SITES, BackboneConfig
from jpets.deltas.class_key import ClassKey as ClassKey
from jpets.deltas.merge import Params
from jpets.deltas.operators import Operators
from jpets.deltas.parts import BY_INPUTS, Size
from jpets.deltas.recipe import INIT_SCALE, Course
from jpets.deltas.view import ClassView
from jpets.errors import InvalidInput, InvalidTask
from jpets.types import Delta
from pallas_kernels.numerics import AnyArray, LayerIndex
from pallas_kernels.packed_attention import Prefix

Kind = Literal["light", "heavy", "row", "head"]
"""How a class sees a batch: a window of it, runs of tokens in a loop, a slot for every row, or pooled rows."""
Step = Literal["embeddings", "weight", "sums", "bias", "scale", "attention", "adapter"]
"""Steps of the unified representation; classes of one step may act in any order."""
PARAM_BYTES = 2
SUM_BYTES = 4
"""Bytes of a weight or an input of a product (bf16), and of a number of the residual stream or a sum (f32)."""


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """One bank array without its slot axis. Integer arrays are indices padded with ``fill``; bits are ``uint8``.

    ``split`` is the axis that several devices share as they share the site (``jpets.deltas.parts``); each has the whole
    of other arrays. ``planes``: the last axis holds bit planes, in which columns are not in their order.
    """

    shape: tuple[int, ...]
    dtype: Literal["param", "uint8", "uint16", "int32", "float32"] = "param"
    fill: int = 0
    split: int | None = None
    planes: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one slot, parameters in bf16."""
        return (
            math.prod(self.shape)
            * {"param": PARAM_BYTES, "uint8": 1, "uint16": 2, "int32": 4, "float32": 4}[self.dtype]
        )


@dataclasses.dataclass(frozen=True)
class Contribution:
    """The arrays of a delta for one slot of ``key``'s bank: no larger than the class's."""

    key: ClassKey
    arrays: Mapping[str, Shaped[AnyArray, " ..."]]


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Shape and kind that a task file's tensor must have; ``None`` in a shape is any size."""

    shape: tuple[int | None, ...]
    kind: Literal["float", "index", "bits"] = "float"


class Place(NamedTuple):
    """A linear site inside a program: its size, and that of the device's own part of it."""

    layer: int
    site: str
    whole: Size
    own: Size


class Work(NamedTuple):
    """The cost of one operator: floating-point operations, and the bytes that it moves if each array moves once.

    A multiply-add is two operations; element-wise parts count only if there is nothing else.
    """

    flops: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Lead:
    """The part that a delta sets before a query's own tokens: the number of virtual tokens, and the first position."""

    tokens: int = 0
    first_position: int = 0

    def __add__(self, other: Lead) -> Lead:
        return Lead(self.tokens + other.tokens, self.first_position + other.first_position)

    def room(self, longest: int, positions: int) -> int:
        """Most tokens of a text behind it, where a query takes ``longest`` and the backbone so many ``positions``."""
        return min(longest, positions - self.first_position) - self.tokens


NO_LEAD = Lead()
LEAST_ROOM = 3
"""Tokens that a task must leave for a text: one, between two special ones."""


class Bound(Protocol):
    """A class inside a program: its key, its bank's arrays [slots, layers, ...] and the places of its rows."""

    @property
    def key(self) -> ClassKey: ...
    @property
    def bank(self) -> Mapping[str, Num[Array, "slots ..."]]: ...
    @property
    def view(self) -> ClassView: ...
    @property
    def operators(self) -> Operators:
        """The candidate of each operator that the program calls."""
        ...

    def entry(self, layer: int) -> LayerIndex:
        """The place of a layer in the bank's arrays, traced where several layers are one compiled function."""
        ...

    def launch(self, operator: Callable[..., Array], *arguments: Any) -> Num[Array, " ..."]:
        """``operator(*arguments)``, on the class's own stream if it has one."""
        ...


class Method:
    """Base of every method; the hooks do nothing unless a method overrides them.

    It has more than 20 methods, as it is all that the engine, training and import ask of a method.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    step: ClassVar[Step]
    repeatable: ClassVar[bool] = True
    """Whether one task may carry several deltas of this method."""
    usual: ClassVar[Mapping[str, Any]] = {}
    """Settings of a usual task, besides the defaults of ``init``: benchmarks draw their tasks with them."""
    standard: ClassVar[bool] = False
    """Whether a server makes room for a usual task of this method before it has seen any task."""
    course: ClassVar[Course | None] = None
    """How it is trained; None: it is not trained here."""
    shares_layers: ClassVar[bool] = False
    """Whether its operators tell layers apart by ``Bound.entry`` alone. Layers that are alike may then be one compiled
    function, which is traced for the first of them."""

    @property
    def in_copies(self) -> bool:
        """Whether a merged copy of a hot task holds its deltas: ``merge`` changes linear weights alone, and rows are
        computed faster without it."""
        return self.kind == "heavy"

    def tensors(self, settings: Mapping[str, Any], config: BackboneConfig) -> Mapping[str, TensorSpec]:
        """The tensors a task file must hold. Raises ``InvalidTask`` for settings without sense."""
        raise NotImplementedError

    def first_layer(self, settings: Mapping[str, Any], config: BackboneConfig) -> int:
        """The first layer where a delta of these settings acts: 0 also if they name no ``layers`` or it acts on the
        embeddings, all layers where it acts behind them alone."""
        sites = {name.partition("/")[0] for name in self.tensors(settings, config)}
        if sites <= {"pooler"}:
            return config.layers
        everywhere = "layers" not in settings or any(site.startswith("embeddings") for site in sites)
        return 0 if everywhere else covered_layers(settings, config)[0]

    def check(self, delta: Delta, config: BackboneConfig) -> None:
        """Checks beyond names and shapes (index ranges, order). Raises ``InvalidTask``."""

    def init(
        self, rng: np.random.Generator, settings: Mapping[str, Any], config: BackboneConfig, scale: float
    ) -> Delta:
        """A random delta, every tensor drawn with standard deviation ``scale`` (tests, benchmarks)."""
        raise NotImplementedError

    def start(
        self, rng: np.random.Generator, settings: Mapping[str, Any], config: BackboneConfig, base: Params
    ) -> Delta:
        """The start of training of the stored numbers: a delta that changes nothing yet, or little. ``settings`` are
        the requested ones, ``base`` the backbone's parameters. Raises ``InvalidTask``, ``ValueError``."""
        return self.init(rng, settings, config, INIT_SCALE)

    def check_training(self, settings: Mapping[str, Any], config: BackboneConfig) -> None:
        """Raises ``InvalidInput`` for settings that training does not take, and for invalid sizes, before arrays of
        that size are made."""
        assert self.course is not None
        known = self.course.takes
        if unknown := sorted(settings.keys() - known):
            takes = f"takes the settings {sorted(known)}" if known else "takes no settings"
            raise InvalidInput(f"{self.name} {takes}, found {unknown}")
        most = config.hidden_size
        for name in self.course.sizes:
            value = settings.get(name, 1)
            if type(value) is not int or not 1 <= value <= most:
                raise InvalidInput(
                    f"{self.name}: {name} must be a whole number up to the hidden size, {most}, found {value!r}"
                )

    def lower(self, delta: Delta, config: BackboneConfig) -> Sequence[Contribution]:
        """The slot contents of this delta, in f32."""
        raise NotImplementedError

    def lead(self, delta: Delta) -> Lead:
        """The virtual tokens that this delta sets before each query's tokens."""
        return NO_LEAD

    def bank_arrays(self, key: ClassKey, config: BackboneConfig) -> Mapping[str, ArraySpec]:
        """The arrays of one slot of ``key``'s bank."""
        raise NotImplementedError

    def typical(self, key: ClassKey, config: BackboneConfig) -> Contribution | None:
        """Contents with the cost of a real delta, if an empty slot costs less: profiles measure with them."""
        return None

    def work(self, key: ClassKey, config: BackboneConfig, tokens: int, tasks: int) -> Work:
        """The cost of this class in one layer, all its sites together, for ``tokens`` tokens of ``tasks`` slots in
        bf16."""
        raise NotImplementedError

    def embed(self, bound: Bound, x: Float[Array, "t d"], first_token: Int[Array, " n"]) -> Float[Array, "t d"]:
        """Word embeddings, before positions and types are added; ``first_token`` of each row, T if there is none."""
        return x

    def context(self, bound: Bound, layer: int) -> Prefix | None:
        """Keys and values that each row attends to besides its own."""
        return None

    def inputs(self, bound: Bound, place: Place, x: Float[Array, "t i"]) -> Float[Array, "t i"]:
        """Before step 1, for classes with a site ``into_...``: the input of a linear site that no other site reads."""
        return x

    def product(
        self, bound: Bound, place: Place, x: Float[Array, "t i"], w: Float[Array, "i p"]
    ) -> Float[Array, "g s p"] | None:
        """Step 1, for rows with changed weights: the outputs of the view's cells, in the place of the shared product;
        ``w`` is the shared weight. None: ``weight`` takes the step."""
        return None

    def addition(self, bound: Bound, place: Place, x: Float[Array, "t i"]) -> Float[Array, "g s p"] | None:
        """Step 2: what the site adds to the outputs of the view's cells. It reads no outputs, so the operators of
        several classes can run at the same time. None: ``total`` takes the step."""
        return None

    def weight(
        self,
        bound: Bound,
        place: Place,
        x: Float[Array, "t i"],
        y: Float[Array, "t p"],
        w: Float[Array, "i p"],
    ) -> Float[Array, "t p"]:
        """Step 1 within the site's outputs, where that is faster (loops on a CPU): ``y`` with some rows replaced."""
        return y

    def total(self, bound: Bound, place: Place, x: Float[Array, "t i"], y: Float[Array, "t p"]) -> Float[Array, "t p"]:
        """Step 2 within the site's outputs: ``y`` with something added to some rows."""
        return y

    def scale(self, bound: Bound, place: Place, y: Float[Array, "t o"]) -> Float[Array, "t o"]:
        """Step 4: the site's outputs with their bias, scaled."""
        return y

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
        """Step 5: after the bias of ``attn_out`` or ``ffn_out``; returns ``total`` with this method's part added.

        ``y`` is the sub-layer's output, ``residual`` its input, ``total`` their sum (which is added to first, so that
        no copy of y has to be kept), ``normed`` the norm of the sum.
        """
        return total

    @property
    def merges(self) -> bool:
        """Whether its deltas have a dense form."""
        return type(self).merge is not Method.merge

    def merge(self, delta: Delta, config: BackboneConfig, params: Params) -> Params:
        """Backbone parameters with this delta folded in densely; differentiable in the delta's float tensors.

        Raises ``NotImplementedError`` for methods that do not change the weights.
        """
        raise NotImplementedError(f"{self.name} cannot be merged into dense weights")


def plane_spec(site: str, shape: tuple[int, int, int], fill: int = 0) -> ArraySpec:
    """Bit planes of a site's weights: layers, inputs, outputs / 8."""
    return ArraySpec(shape, "uint8", fill, split=1 if site in BY_INPUTS else 2, planes=True)


def plane_bytes(method: str, site: str, config: BackboneConfig) -> tuple[int, int]:
    """Inputs of a site and bytes of its outputs' bits. Raises ``InvalidTask`` where the outputs fill no whole bytes."""
    inputs, outputs = config.dims(site)
    if outputs % 8:
        raise InvalidTask(f"{method}: expected a backbone with outputs of {site} in multiples of 8, found {outputs}")
    return inputs, outputs // 8


def layer_bytes(specs: Mapping[str, ArraySpec]) -> int:
    """Bytes that one slot holds for one layer; the arrays have a leading layer axis."""
    return sum(spec.nbytes // spec.shape[0] for spec in specs.values())


def covered_layers(settings: Mapping[str, Any], config: BackboneConfig) -> tuple[int, ...]:
    """``settings['layers']``, all layers by default; checked."""
    layers = tuple(settings.get("layers", range(config.layers)))
    valid = all(isinstance(layer, int) and 0 <= layer < config.layers for layer in layers)
    if not layers or not valid or list(layers) != sorted(set(layers)):
        raise InvalidTask(f"layers must be increasing numbers from 0 to {config.layers - 1}, got {list(layers)}")
    return layers


def covered_sites(settings: Mapping[str, Any], config: BackboneConfig) -> tuple[str, ...]:
    """``settings['sites']``, the six linear sites of a layer by default; checked and in canonical order."""
    known = config.linear_sites()
    sites = settings.get("sites", known[:6])
    unknown = [site for site in sites if site not in known]
    if not sites or unknown:
        raise InvalidTask(f"sites must be a non-empty subset of {list(known)}, got {list(sites)}")
    return tuple(site for site in known if site in sites)


def site_layers(site: str, layers: tuple[int, ...]) -> tuple[int, ...]:
    """The layers on a tensor's leading axis for one site; sites outside the layers have one layer, 0."""
    return (0,) if site in OUTSIDE_SITES else layers


def weight_places(settings: Mapping[str, Any], config: BackboneConfig) -> Iterator[tuple[int, int, str]]:
    """(place on the tensors' layer axis, layer, site) of every weight that a delta covers."""
    layers = covered_layers(settings, config)
    for site in covered_sites(settings, config):
        for at, layer in enumerate(site_layers(site, layers)):
            yield at, layer, site


def layers_of(parts: Mapping[str, Mapping[int, Any]]) -> tuple[int, ...]:
    """The layers that ``parts[site][layer]`` cover; 0 if only the pooler is covered."""
    return tuple(sorted({layer for site in parts if site != "pooler" for layer in parts[site]})) or (0,)


def size_step(size: int) -> int:
    """Rounds a rank, bottleneck or label count up to its class's step: 4, 8, 16, 24, 32, 48, 64, 96, ..."""
    power = 4
    while power < size:
        power *= 2
    return power * 3 // 4 if power >= 32 and size <= power * 3 // 4 else power


def normal(rng: np.random.Generator, scale: float, shape: tuple[int, ...]) -> Float[np.ndarray, " ..."]:
    return (rng.standard_normal(shape, np.float32) * np.float32(scale)).astype(np.float32)


def full_shape(spec: TensorSpec) -> tuple[int, ...]:
    """The shape of a spec without open sizes."""
    assert None not in spec.shape
    return tuple(size for size in spec.shape if size is not None)


def virtual_tokens(method: str, settings: Mapping[str, Any], config: BackboneConfig) -> int:
    """``settings['tokens']``, the length of a prefix or prompt; checked."""
    tokens = settings.get("tokens")
    if not isinstance(tokens, int) or not 0 < tokens < config.max_positions:
        raise InvalidTask(
            f"{method}: tokens must be a whole number from 1 to {config.max_positions - 1}, got {tokens!r}"
        )
    return tokens
