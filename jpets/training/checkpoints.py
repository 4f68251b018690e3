"""Checkpoints of a training run, by orbax: complete or absent, the newest ones kept."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jpets.errors import InvalidInput, OutOfSpace
from jpets.files import SHORTAGES, space_errors, sweep, write_atomic
from jpets.training.fit import State
from jpets.training.run import TrainingProgress

log = logging.getLogger(__name__)

KEPT = 2
PASSING = (*SHORTAGES, errno.EIO)
"""Errors that may be gone at the next try."""
RUN, LOCK = "run.sha256", "run.lock"


@contextlib.contextmanager
def claimed(folder: Path | None, *run: Any) -> Iterator[None]:
    """Binds ``folder`` to a run, described by all that decides its results: texts, options, the start. No other process
    trains in it meanwhile.

    Raises ``InvalidInput`` if another process trains in it, and if the folder has the progress of another run, which
    must not be taken for this one's; ``OutOfSpace``.
    """
    if folder is None:
        yield
        return
    digest = digest_of(*run)
    with space_errors():
        folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidInput(f"{_name(folder)}: another process trains in it; give another folder") from error
        path = folder / RUN
        known = path.read_text(encoding="utf-8") if path.exists() else None
        if known not in (None, digest):
            raise InvalidInput(
                f"{_name(folder)}: it holds the progress of a run with other texts, options or backbone; give an empty "
                "folder"
            )
        if known is None:
            write_atomic(path, digest.encode())
        yield


def digest_of(*parts: Any) -> str:
    """A name for arrays, dataclasses, mappings, sequences and what ``repr`` tells apart: equal ones have the same."""
    digest = hashlib.sha256()
    for part in _parts(parts):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _name(folder: Path) -> str:
    """The folder as the user gave it, with the number of the run if there are several."""
    return f"{folder.parent.name}/{folder.name}"


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
        self._folder = folder
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def load(self, first: TrainingProgress) -> TrainingProgress:
        """The newest progress that is whole, or ``first``. Raises ``InvalidInput`` where all that was kept is
        damaged."""
        shapes = jax.tree.map(lambda leaf: np.empty(np.shape(leaf), np.asarray(leaf).dtype), _tree(first))
        steps, problem = sorted(self._manager.all_steps(), reverse=True), None
        for step in steps:
            try:
                found = self._manager.restore(step, args=ocp.args.StandardRestore(shapes))
            except (OSError, ValueError, KeyError, TypeError) as error:
                if isinstance(error, OSError) and error.errno in PASSING:
                    raise
                problem = error
                continue
            for damaged in (other for other in steps if other > step):
                log.warning("checkpoint %s of %s is damaged: going on from an older one", damaged, _name(self._folder))
                self._manager.delete(damaged)  # that step comes again, and could not be saved
            return self._progress(first, found)
        if problem is not None:
            raise InvalidInput(
                f"{_name(self._folder)}: its checkpoint {steps[0]} is damaged; remove the folder to start anew"
            ) from problem
        return first

    def _progress(self, first: TrainingProgress, found: Any) -> TrainingProgress:
        known, structure = jax.tree.flatten(first.state.optimiser)
        leaves = [found["optimiser"][str(at)] for at in range(len(known))]
        state = State(found["trained"], jax.tree.unflatten(structure, leaves), int(found["step"]))
        return TrainingProgress(state, found["best"], found["best_loss"], found["waited"], np.array(found["losses"]))

    def save(self, progress: TrainingProgress) -> None:
        """Raises ``OutOfSpace``; then nothing of this checkpoint is left."""
        step = int(progress.state.step)
        try:
            with space_errors():
                self._manager.save(step, args=ocp.args.StandardSave(_tree(progress)))
        except OutOfSpace:
            sweep(self._folder, f"{step}.", 0)
            raise

    def close(self) -> None:
        self._manager.close()


def _tree(progress: TrainingProgress) -> Any:
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
