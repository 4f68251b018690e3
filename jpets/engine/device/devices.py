"""The devices of a host to serve on."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jpets.errors import InvalidInput


def choose_devices(text: str, together: int = 1) -> Sequence[jax.Device]:
    """``all``, a number of devices, or a list of their numbers (``0,2``; a single one with a comma, ``3,``);
    ``together`` of them compute each batch.

    Raises ``InvalidInput`` naming the devices that there are.
    """
    found = jax.local_devices()
    kinds = f"this host has {len(found)} of {found[0].device_kind}, numbered from 0"
    if text == "all":
        text = str(len(found))
    try:
        if "," in text:
            numbers = [int(part) for part in text.split(",") if part.strip()]
        else:
            numbers = list(range(min(int(text), len(found) + 1)))  # one too many is refused, however many are asked
    except ValueError:
        raise InvalidInput(
            f"--devices: expected all, how many, or numbers like 0,2, got {text[:64]!r}; {kinds}"
        ) from None
    if not numbers or len(set(numbers)) != len(numbers) or not all(0 <= number < len(found) for number in numbers):
        hint = "; JAX_NUM_CPU_DEVICES makes a CPU several" if found[0].platform == "cpu" else ""
        raise InvalidInput(f"--devices: cannot take {text[:64]!r}; {kinds}{hint}")
    if len(numbers) % together:
        raise InvalidInput(f"--tensor-parallel: {len(numbers)} devices cannot be taken {together} at a time")
    return [found[number] for number in numbers]
