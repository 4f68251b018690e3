"""What a server, a model and a request are to the Open Inference Protocol, whatever carries it: a task is a model, the
plain backbone is the model of its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from jpets.errors import InvalidInput, NotFound, Saturated
from jpets.types import Query, Result, Task
from serving.protocols.oip.inputs import TASK, inputs_of, queries_of, several_of
from serving.protocols.oip.outputs import ANSWERS, REPLACED, answers_of, outputs_of, tensors_of
from serving.protocols.oip.tensors import Array, Tensor
from serving.requests.ask import raise_first_error
from serving.requests.context import Context

BACKBONE_VERSION = "1"
MOST_ID = 1024
"""Characters of a request's id, which comes back."""
EXTENSIONS = ("binary_tensor_data", "model_repository")


class Model(NamedTuple):
    """A task, or None for the plain backbone, and the version that is served."""

    name: str
    task: Task | None
    version: str
    vector_size: int
    is_named_version: bool = False
    """Whether the request asked for this one."""

    @property
    def outputs(self) -> list[dict[str, Any]]:
        return outputs_of(self.task, self.vector_size)

    @property
    def metadata(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "versions": [self.version],
            "platform": "jpets_jax",
            "inputs": inputs_of(self.task),
            "outputs": self.outputs,
        }


@dataclasses.dataclass(frozen=True)
class Inference:
    """A request: its inputs, the names of the outputs that are wanted, None for all, and what each ``Query`` says."""

    tensors: Sequence[Tensor]
    outputs: Sequence[str] | None = None
    truncate: bool | None = None
    prompt: str | None = None


@dataclasses.dataclass(frozen=True)
class Asked:
    """The queries of a request, and the outputs that their results are to have; ``several``: each is for a task of its
    own."""

    model: Model
    queries: Sequence[Query]
    wanted: Sequence[str]
    several: bool = False

    def version(self, results: Sequence[Result]) -> str:
        """That of the task which made the results. Raises ``Saturated`` where another one than a named version did, or
        more than one."""
        found = {str(result.version) for result in results if result.version is not None}
        if self.several or not found:
            return self.model.version
        if len(found) > 1 or (self.model.is_named_version and found != {self.model.version}):
            raise Saturated(REPLACED)
        return found.pop()

    def arrays(self, results: Sequence[Result]) -> Mapping[str, Array]:
        """Raises the first row's error, where all are for one task, and ``Saturated`` where that was replaced by
        another kind meanwhile."""
        if not self.several:
            raise_first_error(results)
        tensors = answers_of(results) if self.several else tensors_of(results)
        if not tensors.keys() >= set(self.wanted):
            raise Saturated(REPLACED)
        return {name: tensors[name] for name in self.wanted}


async def find_model(here: Context, name: str, version: str | None = None) -> Model:
    """Raises ``NotFound``."""
    task = await here.find(name)
    if task is None:
        number, size = BACKBONE_VERSION, here.services.first.backbone.config.hidden_size
    else:
        with here.services.owning(here.named(name)) as own:
            number, size = str(own.tasks.version(here.named(name))), task.vector_size
    if version not in (None, number):
        raise NotFound(f"model {name[:128]!r} has version {number} loaded, and no other")
    return Model(name, task, number, size, version is not None)


async def read_inference(here: Context, model: Model, asked: Inference) -> Asked:
    """Raises ``InvalidInput`` that names the tensor or output, what was expected and what was found; ``TooLarge``."""
    several = model.task is None and any(tensor.name == TASK for tensor in asked.tensors)
    known = [each["name"] for each in (ANSWERS if several else model.outputs)]
    wanted = known if asked.outputs is None else asked.outputs
    if unknown := [name[:64] for name in wanted if name not in known]:
        raise InvalidInput(f"outputs: expected some of {known}, found {unknown[:4]}")
    if len(set(wanted)) < len(wanted):
        raise InvalidInput(f"outputs: expected each name once, found {len(wanted)} with {len(set(wanted))} names")
    task, most = model.task.id if model.task is not None else None, here.settings.max_inputs
    pattern = Query(task, truncate=asked.truncate, prompt=asked.prompt)
    if several:
        read = partial(several_of, asked.tensors, here.task_id, pattern, most)
    else:
        read = partial(queries_of, asked.tensors, pattern, most)
    queries = await here.aside.do(sum(tensor.values for tensor in asked.tensors), read)
    return Asked(model, queries, wanted, several)
