"""Checkpoints of a training run, by orbax: whole or not there, the newest ones kept."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jpets.errors import InvalidInput
from jpets.files import write_atomic
from jpets.training.fit import State
from jpets.training.run import Progress

KEPT = 2
RUN = "run.sha256"


def claim(folder: Path, *run: Any) -> None:
    """Binds ``folder`` to a run, described by all that decides what it computes: texts, options, where it starts.

    Raises ``InvalidInput`` where the folder has the progress of another one, which must not be taken for this one's.
    """
    digest = hashlib.sha256()
    for part in _parts(run):
        digest.update(len(part).to_bytes(8, "little") + part)
    path = folder / RUN
    known = path.read_text() if path.exists() else None
    if known not in (None, digest.hexdigest()):
        raise InvalidInput(
            f"{folder.name}: it holds the progress of a run with other texts, options or backbone; give an empty folder"
        )
    if known is None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, digest.hexdigest().encode())


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape}".encode()
        yield value.tobytes()
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _parts((field.name, getattr(value, field.name)))
    elif isinstance(value, Mapping):
        for name in sorted(value):
            yield from _parts((name, value[name]))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield str(len(value)).encode()
        for each in value:
            yield from _parts(each)
    else:
        yield repr(value).encode()


class Checkpoints:
    """A run's progress in ``folder``."""

    def __init__(self, folder: Path) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def load(self, first: Progress) -> Progress:
        newest = self._manager.latest_step()
        if newest is None:
            return first
        shapes = jax.tree.map(lambda leaf: np.empty(np.shape(leaf), np.asarray(leaf).dtype), _tree(first))
        found = self._manager.restore(newest, args=ocp.args.StandardRestore(shapes))
        known, structure = jax.tree.flatten(first.state.optimiser)
        leaves = [found["optimiser"][str(at)] for at in range(len(known))]
        state = State(found["trained"], jax.tree.unflatten(structure, leaves), int(found["step"]))
        return Progress(state, found["best"], found["best_loss"], found["waited"], np.array(found["losses"]))

    def save(self, progress: Progress) -> None:
        self._manager.save(int(progress.state.step), args=ocp.args.StandardSave(_tree(progress)))

    def close(self) -> None:
        self._manager.close()


def _tree(progress: Progress) -> Any:
    """Plain containers of arrays: the names of tuples' fields would become part of the file."""
    state = progress.state
    leaves = jax.tree.leaves(state.optimiser)
    return {
        "trained": state.trained,
        "optimiser": {str(at): leaf for at, leaf in enumerate(leaves)},
        "step": np.asarray(state.step),
        "best": progress.best,
        "best_loss": progress.best_loss,
        "waited": progress.waited,
        "losses": progress.losses,
    }
