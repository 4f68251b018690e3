"""What a server, a model and a request are to the Open Inference Protocol, whatever carries it: a task is a model, the
plain backbone is the model of its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jpets.errors import InvalidInput, NotFound, Saturated
from jpets.types import Query, Result, Task
from serving.protocols.embeddings import check_dimensions
from serving.protocols.head_options import check_options
from serving.protocols.long_texts import check_windows, render_windows
from serving.protocols.oip.inputs import TASK, inputs_of, queries_of, several_of
from serving.protocols.oip.outputs import ANSWERS, JSON, answers_of, as_json, outputs_of, tensors_of
from serving.protocols.oip.parameters import Parameters
from serving.protocols.oip.tensors import Array, Tensor
from serving.protocols.results import shortened
from serving.requests.answers import REPLACED, render
from serving.requests.ask import raise_first_error
from serving.requests.context import Context
from serving.requests.windows import Cut, in_windows

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
    """A request: its inputs, the names of the outputs that are wanted, None for all but ``JSON``, and parameters."""

    tensors: Sequence[Tensor]
    outputs: Sequence[str] | None
    parameters: Parameters


@dataclasses.dataclass(frozen=True)
class Asked:
    """The queries of a request, and the outputs that their results are to have; ``several``: each is for a task of its
    own."""

    model: Model
    queries: Sequence[Query]
    wanted: Sequence[str]
    parameters: Parameters
    several: bool = False
    windows: Sequence[Cut] | None = None
    """Of each row's text, which the queries ask for."""

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
        tensors = answers_of(results, self._rendered) if self.several else self._tensors(results)
        if not tensors.keys() >= set(self.wanted):
            raise Saturated(REPLACED)
        return {name: tensors[name] for name in self.wanted}

    def _tensors(self, results: Sequence[Result]) -> dict[str, Array]:
        task, asked = self.model.task, self.parameters
        if self.windows is not None and task is not None:
            how = asked.aggregation or "simple"
            return {JSON: as_json(render_windows(task, self.windows, results, asked.top_k, how))}
        raise_first_error(results)
        tensors = tensors_of(results) if {*self.wanted} - {JSON} else {}
        if JSON in self.wanted:
            tensors[JSON] = as_json(map(self._rendered, results))
        if asked.dimensions is not None and "embedding" in tensors:
            tensors["embedding"] = np.stack([shortened(own, asked.dimensions) for own in tensors["embedding"]])
        return tensors

    def _rendered(self, result: Result) -> dict[str, Any]:
        return render(result, self.parameters.top_k, self.parameters.aggregation or "simple")


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
    wanted = [name for name in known if name != JSON] if asked.outputs is None else asked.outputs
    if unknown := [name[:64] for name in wanted if name not in known]:
        raise InvalidInput(f"outputs: expected some of {known}, found {unknown[:4]}")
    if len(set(wanted)) < len(wanted):
        raise InvalidInput(f"outputs: expected each name once, found {len(wanted)} with {len(set(wanted))} names")
    parameters = asked.parameters
    _check_parameters(here, model, parameters, wanted, several=several)
    task, most = model.task.id if model.task is not None else None, here.settings.max_inputs
    pattern = Query(task, truncate=parameters.truncate, prompt=parameters.prompt_name)
    if several:
        read = partial(several_of, asked.tensors, here.task_id, pattern, most)
    else:
        read = partial(queries_of, asked.tensors, pattern, most)
    queries = await here.aside.do(sum(tensor.values for tensor in asked.tensors), read)
    if not parameters.windows or model.task is None:
        return Asked(model, queries, wanted, parameters, several)
    if queries[0].text is None:
        raise InvalidInput("windows: expected the input text, found input_ids")
    check_windows(model.task, queries)
    windows = await in_windows(here, model.task, queries)
    return Asked(model, [query for own in windows for query in own.queries], wanted, parameters, windows=windows)


def _check_parameters(
    here: Context, model: Model, parameters: Parameters, wanted: Sequence[str], *, several: bool
) -> None:
    """Raises ``InvalidInput`` for parameters that mean nothing to the model, or to the outputs that are wanted."""
    task = model.task
    if parameters.dimensions is not None:
        if several or (task is not None and task.head.type != "embedding"):
            raise InvalidInput("dimensions: only vectors can be shortened; leave it out")
        check_dimensions(here, model.name, task, parameters.dimensions)
    if parameters.windows and (list(wanted) != [JSON] or parameters.truncate or parameters.prompt_name is not None):
        raise InvalidInput(f"windows: expected the output {JSON} alone, without truncate and prompt_name")
    given = [name for name in ("top_k", "aggregation") if getattr(parameters, name) is not None]
    if given and not several and JSON not in wanted:
        raise InvalidInput(f"{given[0]}: it shapes the output {JSON}; name that among the outputs")
    if task is not None:
        check_options(task, parameters.top_k, parameters.aggregation)
