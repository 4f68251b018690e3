"""An encoder's run as a chain of functions: embeddings, layers, and what is read of the last one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Int

from jpets.config import NORM_SITES, BackboneConfig
from jpets.deltas import class_method
from jpets.deltas.operators import Operators
from jpets.deltas.prompt import SITE as EMBEDDINGS
from jpets.deltas.protocol import ClassKey
from jpets.deltas.sites import BiasRange, BoundClass
from jpets.engine.batch.bucket import Variant
from jpets.engine.programs.network import Link, Params
from jpets.model.batch import PackedBatch
from jpets.model.encoder import SplitEncoder
from jpets.model.forward import bind_sites, read_out

EMBED = "embed"
READ = "read"


def encoder_chain(config: BackboneConfig, variant: Variant) -> Sequence[Link]:
    """Layers on which the same classes act are links of one name, that of the first of them. ``Link.moved`` is how many
    layers a link is behind that one, and for each class how many entries of its bank."""
    classes = variant.classes()
    first: dict[tuple[ClassKey, ...], int] = {}
    links = [_outside(EMBED, [key for key in classes if class_method(key.method).kind != "head"])]
    for layer in range(config.layers):
        acting = tuple(key for key in classes if _acts_in(key, layer))
        like = first.setdefault(acting, layer)
        entries = (_entry(key, layer) - _entry(key, like) for key in acting)
        links.append(Link(f"layer {like}", acting, (layer - like, *entries), layer))
    read = [key for key in classes if class_method(key.method).kind == "head" or _has_biases(key)]
    return (*links, _outside(READ, read))


def link_params(link: Link, params: Params) -> Params:
    """Of a layer its own, as if it were the first one of its name; outside the layers all that is not a layer's."""
    if link.layer is None:
        return {name: own for name, own in params.items() if name != "layers"}
    return {"layers": {link.layer - link.moved[0]: params["layers"][link.layer]}, "bias": params["bias"]}


def run_link(
    link: Link,
    encoder: SplitEncoder,
    params: Params,
    carried: Any,
    layers: Int[Array, ""],
    batch: PackedBatch,
    bound: Sequence[BoundClass],
    operators: Operators,
) -> Any:
    """``layers`` is how many layers the link that runs is behind ``link``."""
    model, part = encoder.bind(params), _biases(encoder.config, link)
    sites = bind_sites(encoder, params, batch, bound, operators, part._replace(moved=layers * part.size))
    if link.name == EMBED:
        return model.embed(batch, sites)
    if link.name == READ:
        return read_out(model, carried, batch, sites, bound)
    assert link.layer is not None
    return model.layers[link.layer](link.layer, carried, batch, sites)


def _outside(name: str, classes: Sequence[ClassKey]) -> Link:
    return Link(name, tuple(classes), (0,) * (1 + len(classes)))


def _has_biases(key: ClassKey) -> bool:
    method = class_method(key.method)
    return method.kind == "row" and method.step == "bias"


def _acts_in(key: ClassKey, layer: int) -> bool:
    inside = class_method(key.method).kind != "head" and any(site != EMBEDDINGS for site, _ in key.sites)
    return _has_biases(key) or (inside and layer in key.layers)


def _entry(key: ClassKey, layer: int) -> int:
    return key.layers.index(layer) if layer in key.layers else 0


def _biases(config: BackboneConfig, link: Link) -> BiasRange:
    """Those of the link's part of the network."""
    layout = config.bias_layout()
    if link.name == READ:
        pooler = layout.get((0, "pooler"), slice(0, 0))
        return BiasRange(pooler.start, pooler.stop - pooler.start)
    layer = link.layer or 0
    start = layout[layer, "query"].start
    if link.name == EMBED:
        return BiasRange(0, start)
    return BiasRange(start, layout[layer, NORM_SITES[-1]].stop - start)
