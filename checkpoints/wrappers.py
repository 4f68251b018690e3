"""What training code puts before the names of a model's tensors, where it saves the model with what wraps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from jpets.errors import InvalidBackbone

T = TypeVar("T")
ANYWHERE = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Of torch.compile, FSDP and activation checkpointing: no model has modules of these names."""
FIRST = (
    "module.",
    "model.",
    "auto_model.",
    "backbone.",
    "base_model.",
    "encoder.",
    "transformer.",
    "state_dict.",
    "0.",
)
"""Of data parallelism, Lightning, Sentence-Transformers and others: only where all names begin so."""


def unwrapped_name(name: str) -> str:
    """A name without the wrappers that can stand anywhere in it."""
    for wrapper in ANYWHERE:
        name = name.replace(f".{wrapper}", ".").removeprefix(wrapper)
    return name


def unwrapped(tensors: Mapping[str, T]) -> dict[str, T]:
    """The tensors by the names that they have inside the wrapped model.

    Raises ``InvalidBackbone`` where two would have one name.
    """
    names = {name: unwrapped_name(name) for name in tensors}
    while first := next((each for each in FIRST if names and all(own.startswith(each) for own in names.values())), ""):
        names = {name: unwrapped_name(own.removeprefix(first)) for name, own in names.items()}
    found: dict[str, str] = {}
    for name, own in names.items():
        if (other := found.setdefault(own, name)) != name:
            raise InvalidBackbone(
                f"{name[:120]!r} and {other[:120]!r} are one tensor of the model; save the model without its wrappers"
            )
    return {own: tensors[name] for own, name in found.items()}
