"""The unified representation inside a program: the calls of the model wherever a delta may act (PetS section 3.1).

``Sites`` runs the steps in their fixed order over all rows of any mixture of tasks: weight, sums, bias, scale, adapter,
norm. It exists only while a program is traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Float, Int, Num

from jpets.config import BackboneConfig
from jpets.deltas.operators import REFERENCES, Operators
from jpets.deltas.parts import Size, own_part, summed
from jpets.deltas.protocol import ClassKey, Method, Place
from jpets.deltas.view import ClassView, SlotView, TokenView
from pallas_kernels.linear import linear
from pallas_kernels.numerics import LayerIndex, dot, take_range, take_rows, unit_norm
from pallas_kernels.packed_attention import Prefix


@dataclasses.dataclass(frozen=True)
class BoundClass:
    """A class with its bank and its rows' places in this batch.

    ``stream`` numbers the device stream of its operators, from 1 (the shared operators run on 0); None: it has none.
    """

    key: ClassKey
    bank: Mapping[str, Num[Array, "slots ..."]]
    view: ClassView
    method: Method
    stream: int | None = None
    moved: LayerIndex = 0
    """What is added to a layer's place in the bank: traced where several layers are one compiled function."""
    replaces: bool = False
    """Every row of the batch has a delta of this class, which has weights of its own: the shared product is not
    needed."""
    operators: Operators = REFERENCES

    @property
    def tokens(self) -> TokenView:
        """The view of a light or heavy class."""
        assert isinstance(self.view, TokenView)
        return self.view

    def acts_on(self, layer: int, site: str) -> bool:
        return layer in self.key.layers and any(name == site for name, _ in self.key.sites)

    def entry(self, layer: int) -> LayerIndex:
        """The place of a layer in the bank's arrays."""
        return self.key.layers.index(layer) + self.moved

    def launch(self, operator: Callable[..., Array], *arguments: Any) -> Num[Array, " ..."]:
        """``operator(*arguments)``, as one call that XLA runs in parallel to others if the class has a stream."""
        if self.stream is None:
            return operator(*arguments)
        called = jax.jit(operator)(*arguments)
        # On the call alone: XLA makes an asynchronous pair of an annotated call, which must not be inlined before that.
        annotated: Array = set_xla_metadata(called, _xla_stream_annotation=str(self.stream), inlineable="false")
        return annotated


class BiasRange(NamedTuple):
    """The part of all biases that a function reads: ``size`` of them from ``first + moved`` on."""

    first: int
    size: int
    moved: LayerIndex = 0

    @property
    def start(self) -> LayerIndex:
        return self.first + self.moved


class Sites:
    """``rows`` is the number of rows N; ``row_of_token`` [T] is None in a rectangular bucket, where T = N L.
    ``operators`` are those that the model itself calls.

    Within one step the classes act in the order of ``bound``. ``biases`` are those that its caller reads, by default
    all.
    """

    def __init__(
        self,
        config: BackboneConfig,
        base_bias: Float[Array, " b"],
        rows: int,
        row_of_token: Int[Array, " t"] | None,
        bound: Sequence[BoundClass] = (),
        operators: Operators = REFERENCES,
        biases: BiasRange | None = None,
    ) -> None:
        self.config = config
        self.operators = operators
        self.rows = rows
        self.row_of_token = row_of_token
        self.classes = [b for b in bound if b.method.kind in ("light", "heavy")]
        biases = biases or BiasRange(0, config.bias_size())
        first, end = biases.first, biases.first + biases.size
        self.layout = {
            place: slice(part.start - first, part.stop - first)
            for place, part in config.bias_layout().items()
            if first <= part.start and part.stop <= end
        }
        self.base_bias = jax.lax.dynamic_slice_in_dim(base_bias, biases.start, biases.size)
        self.row_classes = [b for b in bound if b.method.kind == "row"]
        bias = next((b for b in self.row_classes if b.method.step == "bias"), None)
        self.row_bias: Float[Array, "n b"] | None = None
        if bias is not None:
            assert isinstance(bias.view, SlotView)
            self.row_bias = take_range(bias.bank["bias"], bias.view.slots, biases.start, biases.size)

    def embed(self, x: Float[Array, "t d"], first_token: Int[Array, " n"]) -> Float[Array, "t d"]:
        """Word embeddings with the tasks' own in the places of virtual tokens."""
        for bound in self.row_classes:
            x = bound.method.embed(bound, x, first_token)
        return x

    def context(self, layer: int) -> list[Prefix]:
        """Keys and values besides the rows' own in this layer's attention."""
        found = (b.method.context(b, layer) for b in self.row_classes if b.acts_on(layer, "attn_kv"))
        return [prefix for prefix in found if prefix is not None]

    def linear(
        self, layer: int, sites: Sequence[str], x: Float[Array, "t i"], w: Float[Array, "i o"]
    ) -> tuple[Float[Array, "t p"], ...]:
        """Steps 1 to 4 for sites that share one product: weight, sums, bias, scale. f32, one array a site.

        The sites have equal sizes. ``w`` is smaller than they are where it is a device's part; ``x`` then is one too
        if it has fewer rows, and the parts of the sums are added up before the bias.
        """
        places = [Place(layer, s, Size(*self.config.dims(s)), Size(len(w), w.shape[1] // len(sites))) for s in sites]
        if len(sites) == 1:
            for bound in self.classes:
                if bound.acts_on(layer, f"into_{sites[0]}"):
                    x = bound.method.inputs(bound, places[0], x)
        x = x.astype(w.dtype)
        needed = not all(any(b.replaces and b.acts_on(layer, site) for b in self.classes) for site in sites)
        weights = jnp.split(w, len(sites), axis=1)
        if not needed:
            parts = [jnp.zeros((x.shape[0], own.shape[1]), jnp.float32) for own in weights]
        elif len(sites) > 1 and self._written(layer, sites):
            parts = [linear(x, own, self.operators["linear"]) for own in weights]
        else:
            parts = jnp.split(linear(x, w, self.operators["linear"]), len(sites), axis=1)
        return tuple(self._at_site(place, x, y, own) for place, y, own in zip(places, parts, weights, strict=True))

    def _written(self, layer: int, sites: Sequence[str]) -> bool:
        """Whether heavy classes write to outputs of these sites without a loop. Then each site has a product of its
        own, which takes no longer: parts of a common one would be copied first."""
        return self.operators.static_runs and any(
            bound.method.kind == "heavy" and bound.acts_on(layer, site) for bound in self.classes for site in sites
        )

    def _at_site(
        self, place: Place, x: Float[Array, "t i"], y: Float[Array, "t p"], w: Float[Array, "i p"]
    ) -> Float[Array, "t p"]:
        acting = [bound for bound in self.classes if bound.acts_on(place.layer, place.site)]
        products = [bound.method.product(bound, place, x, w) for bound in acting]
        additions = [bound.method.addition(bound, place, x) for bound in acting]
        for bound, product in zip(acting, products, strict=True):
            y = bound.method.weight(bound, place, x, y, w) if product is None else bound.tokens.replace(y, product)
        for bound, addition in zip(acting, additions, strict=True):
            y = bound.method.total(bound, place, x, y) if addition is None else bound.tokens.add(y, addition)
        y = y.astype(jnp.float32)
        if place.own.inputs < place.whole.inputs:
            y = summed(y)
        y = y + self.bias(place.layer, place.site, *y.shape)
        for bound in acting:
            y = bound.method.scale(bound, place, y)
        return y

    def bias(self, layer: int, site: str, tokens: int, outputs: int) -> Float[Array, "#t o"]:
        """Step 3: the bias of a site, or of the device's ``outputs`` of it, for each token its task's own, f32."""
        part = self.layout[layer, site]
        if self.row_bias is None:
            return own_part(self.base_bias[part], outputs).astype(jnp.float32)[None]
        each = own_part(self.row_bias[:, part], outputs).astype(jnp.float32)  # [N, o]
        if self.row_of_token is not None:
            return take_rows(each, self.row_of_token)
        length = tokens // self.rows
        return jnp.broadcast_to(each[:, None], (self.rows, length, outputs)).reshape(tokens, -1)

    def pooler(self, x: Float[Array, "n d"], w: Float[Array, "d d"]) -> Float[Array, "n d"]:
        """The pooler's product and bias, on rows; weight deltas of this site are folded into the task's head."""
        part = self.layout[0, "pooler"]
        bias = self.base_bias[None, part] if self.row_bias is None else self.row_bias[:, part]
        return dot(x, w) + bias.astype(jnp.float32)

    def norm(self, layer: int, site: str, x: Float[Array, "t d"], scale: Float[Array, " d"]) -> Float[Array, "t d"]:
        """Layer norm in f32 with the task's own bias."""
        return unit_norm(x, self.config.norm_eps) * scale.astype(jnp.float32) + self.bias(layer, site, *x.shape)

    def close(
        self, layer: int, site: str, y: Float[Array, "t d"], residual: Float[Array, "t d"], scale: Float[Array, " d"]
    ) -> Float[Array, "t d"]:
        """Steps 5 and 6 after ``attn_out`` or ``ffn_out``: adapters, residual, norm."""
        after, norm = f"after_{site}", site.split("_")[0] + "_norm"
        total = y + residual
        adapters = [bound for bound in self.classes if bound.acts_on(layer, after)]
        if adapters:
            normed = self.norm(layer, norm, total, scale)
            for bound in adapters:
                total = bound.method.after(bound, layer, after, y, residual, normed, total)
        return self.norm(layer, norm, total, scale)
