"""The backbone that a root was made of, by whose hidden states domains are trained."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np

from checkpoints.backbone import Backbone
from checkpoints.source import load_backbone
from jpets.errors import InvalidInput, JpetsError
from jpets.plot.layers import NGramLayers
from jpets.plot.tree import Tree
from jpets.training.checkpoints import digest_of


def load_whole(tree: Tree) -> Backbone:
    """The backbone that a root was made of. Raises ``InvalidInput`` where it is not there any more."""
    source = (tree.root.details.get("whole") or {}).get("source")
    if source is None:
        raise InvalidInput("a domain is trained by the backbone that its root was made of: name it (`whole`)")
    try:
        return load_backbone(source)
    except JpetsError as error:
        raise InvalidInput(
            f"a domain is trained by the backbone that its root was made of, {Path(source).name!r}, which cannot be "
            f"loaded: {error.message}; name it where it is now (`whole`)"
        ) from error


def check_whole(whole: Backbone, tree: Tree, layers: NGramLayers) -> None:
    """Raises ``InvalidInput`` for another backbone than the one that the root was made of, or that with lower layers
    trained further on a domain's texts (HMI section 5.1)."""
    expected, known = layers.config, tree.root.details.get("whole") or {}
    alike = dataclasses.replace(whole.config, usual_length=expected.usual_length) == expected
    same = known.get("fingerprint", whole.fingerprint) == whole.fingerprint
    if alike and not same and "above" not in known:
        raise InvalidInput(
            "this root does not say what its backbone's upper layers are; give the backbone that it was made of, "
            "or make the root again"
        )
    if not alike or not (same or known["above"] == digest_above(whole, layers)):
        raise InvalidInput(
            "expected the backbone that the root was made of, or that with its lower layers trained further (`jpets "
            f"backbone pretrain`), found another one, {whole.name!r}"
        )


def digest_above(backbone: Backbone, layers: NGramLayers) -> str:
    """A digest of a backbone's tokenizer and of what is not in its lower layers."""
    upper = jax.tree.leaves(layers.start_upper(dict(backbone.params)))
    return digest_of([np.asarray(leaf) for leaf in upper], backbone.tokenizer_json)
