"""What a group of students learns from: the vectors and answers of a teacher, computed once and kept on disk.

Axes: n texts, d the teacher's hidden size, c outputs of its head.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Integer
from safetensors.numpy import load_file, save

from jpets.deltas import task_lead
from jpets.deltas.fold import fold_pooler
from jpets.errors import InvalidInput
from jpets.files import space_errors, write_atomic
from jpets.model.encoder import split
from jpets.training.checkpoints import digest_of
from jpets.training.data import Example
from jpets.training.labels import make_rows
from jpets.training.metrics import scores
from jpets.training.predict import Predictor
from jpets.training.tokens import encoded, text_encoder
from jpets.types import Head, LoadedBackbone, Query, Task


@dataclasses.dataclass(frozen=True)
class Lessons:
    """``vectors`` [n, d] are what the teacher's head reads, ``logits`` [n, c] what it answers (before softmax)."""

    vectors: Float[np.ndarray, "n d"]
    logits: Float[np.ndarray, "n c"]

    def take(self, chosen: Integer[np.ndarray, " _"]) -> Lessons:
        """Those of some texts."""
        return Lessons(self.vectors[chosen], self.logits[chosen])


def check_teacher(head: Head) -> None:
    """Raises ``InvalidInput`` for a head whose answer is not read from one vector of a text: a group adds up such
    vectors and nothing else."""
    if head.reads_tokens or head.type == "embedding":
        raise InvalidInput(
            f"a group of students answers with classes, label sets or values of a whole text; the teacher's head is "
            f"{head.type}"
        )


class Teacher:
    """A task over its backbone: one of deltas, or of a backbone that was fine-tuned for it (then without deltas).

    ``kept`` is a folder for what it says of texts, so that several groups that learn from it ask once; without one,
    each keeps that in its own.
    """

    def __init__(self, task: Task, backbone: LoadedBackbone, kept: Path | None = None) -> None:
        check_teacher(task.head)
        self.task, self.kept = task, kept
        self._params = dict(backbone.params)
        self._text = text_encoder(backbone, task_lead(task))
        self._folded = fold_pooler(task, backbone.config, self._params)
        self._fingerprint = backbone.fingerprint
        self.layers = backbone.config.layers
        self._predictor = Predictor(split(backbone.config), self._text, self._folded.head, self._folded.deltas)

    def keeping(self, kept: Path) -> Teacher:
        """The same teacher with a folder, unless it has one."""
        if self.kept is not None:
            return self
        own = copy.copy(self)
        own.kept = kept
        return own

    def lessons(self, examples: Sequence[Example]) -> Lessons:
        """What the teacher says of texts; with a folder, it is not asked again for the same ones. Raises
        ``InvalidInput`` for texts that the task does not take."""
        kept = self.kept
        path = kept / f"lessons-{self._name(examples)}.safetensors" if kept is not None else None
        if path is not None and path.exists():
            return Lessons(**load_file(path))
        rule = self.task.preprocessing
        tokens = [encoded(self._text, Query(None, each.plain, each.text_pair), rule) for each in examples]
        both = self._predictor.both(self._params, self._folded.head, tokens, self._folded.deltas)
        lessons = Lessons(np.stack([own[0] for own in both]), np.stack([own[1] for own in both]))
        if not (np.isfinite(lessons.vectors).all() and np.isfinite(lessons.logits).all()):
            raise InvalidInput("the teacher gives numbers that are not finite; train it again with a lower rate")
        if path is not None:
            with space_errors():
                path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, save(vars(lessons)))
        return lessons

    def scores(self, examples: Sequence[Example], lessons: Lessons | None = None) -> dict[str, float]:
        """The teacher's own scores on labelled texts; ``lessons`` are what it says of them, if that is known."""
        rows = make_rows(examples, self.task.head, self.task.labels, self._text, self.task.preprocessing)
        limits = self.task.preprocessing.thresholds or ()
        logits = (lessons or self.lessons(examples)).logits
        return scores(self.task.head, self.task.labels, list(logits), rows.targets, limits)

    @property
    def head(self) -> Head:
        """The head that reads the vectors of ``lessons``."""
        return self._folded.head

    def _name(self, examples: Sequence[Example]) -> str:
        task = dataclasses.replace(self.task, id="", created=None, description=None)
        return digest_of(self._fingerprint, task, [(each.plain, each.text_pair) for each in examples])[:32]
