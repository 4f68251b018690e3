"""A loaded backbone: everything that an engine needs of a shared model, on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import tokenizers

from checkpoints.canonical import FloatArray, Params, from_params, to_params
from checkpoints.fingerprint import fingerprint
from checkpoints.finite import check_finite
from jpets.config import BackboneConfig
from jpets.errors import InvalidBackbone
from jpets.types import BY_MEAN, BackboneRef, EmbeddingRule, RowSource


@dataclasses.dataclass(frozen=True, eq=False)
class Backbone:
    """``params`` is the encoder's parameter tree in f32 NumPy arrays; weights are [in, out].

    ``tokenizer_json`` is the text of ``tokenizer.json``, for ``tokenizers.Tokenizer.from_str``. ``embeds`` is how it
    embeds texts without a task; the fingerprint does not cover it, as no task depends on it. Where tokens are looked up
    in ``tables``, ``root`` is the digest of the n-gram layers of their root, which the fingerprint covers.
    """

    name: str
    config: BackboneConfig
    params: Params
    tokenizer_json: str
    fingerprint: str
    embeds: EmbeddingRule = BY_MEAN
    kind: str = "encoder"
    root: str | None = None
    tables: RowSource | None = None

    @classmethod
    def of_tensors(
        cls,
        name: str,
        config: BackboneConfig,
        tensors: Mapping[str, FloatArray],
        tokenizer_json: str,
        embeds: EmbeddingRule = BY_MEAN,
        root: str | None = None,
    ) -> Backbone:
        """A backbone from canonical tensors of the right shapes. Raises ``InvalidBackbone`` for a broken tokenizer, and
        for numbers that are not finite."""
        check_finite(tensors)
        _check_tokenizer(tokenizer_json, config)
        own = fingerprint(tensors, tokenizer_json, config, root)
        return cls(name, config, to_params(tensors, config), tokenizer_json, own, embeds, root=root)

    def computed_fingerprint(self) -> str:
        """The fingerprint of the parameters as they are now."""
        return fingerprint(from_params(self.params, self.config), self.tokenizer_json, self.config, self.root)

    def ref(self) -> BackboneRef:
        """How task files name this backbone."""
        return BackboneRef.of(self)


def _check_tokenizer(tokenizer_json: str, config: BackboneConfig) -> None:
    try:
        vocab = tokenizers.Tokenizer.from_str(tokenizer_json).get_vocab()
    except Exception as error:  # the tokenizers library raises bare Exception for a file that it cannot read
        raise InvalidBackbone("tokenizer.json cannot be read; save the fast tokenizer again") from error
    largest = max(vocab.values(), default=-1)
    if largest >= config.vocab_size:
        raise InvalidBackbone(
            f"tokenizer.json has token id {largest}, expected ids below the model's vocab_size {config.vocab_size}"
        )
