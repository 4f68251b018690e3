"""The methods of the Open Inference Protocol over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from jpets.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidInput,
    JpetsError,
    NotFound,
    OutOfSpace,
    Saturated,
    Unparseable,
)
from serving.grpc.inference import inference_of, parameters_of, response_of
from serving.grpc.messages import METHODS, SERVICE, ModelIndex, ModelMetadata, StreamResponse, TensorMetadata, message
from serving.http.errors import log_unexpected
from serving.protocols.oip.inference import EXTENSIONS, find_model, read_inference
from serving.protocols.oip.repository import index, load, unload
from serving.requests.ask import answer
from serving.requests.context import Context, server_version

Call: TypeAlias = Any
"""``grpc.aio.ServicerContext``; the package has no types."""
CODES = (
    (InvalidInput, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (Conflict, grpc.StatusCode.ABORTED),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (Saturated, grpc.StatusCode.UNAVAILABLE),
    (OutOfSpace, grpc.StatusCode.RESOURCE_EXHAUSTED),
)
FAILED = "the server failed; the log has the details"
FULL = "the messages of other requests take all memory that there is for them; try again"
AHEAD = 64
"""Requests of a stream that are worked on at a time."""


def code_of(error: JpetsError) -> grpc.StatusCode:
    return next((code for kind, code in CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


class InferenceService:
    """One method for each of the protocol's; ``handlers`` has them for a server. Event loop only."""

    def __init__(self, here: Context) -> None:
        self._here = here
        self._held = 0
        """Bytes of the messages that are worked on."""

    def handlers(self) -> grpc.GenericRpcHandler:
        own: dict[str, Callable[..., Any]] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._infer,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                partial(self._answered, name, method), response_serializer=_serializer(name)
            )
            for name, method in own.items()
        }
        stream = grpc.stream_stream_rpc_method_handler(
            self._stream, response_serializer=_serializer("ModelStreamInfer")
        )
        return grpc.method_handlers_generic_handler(SERVICE, {**handlers, "ModelStreamInfer": stream})

    async def _answered(
        self, name: str, method: Callable[[Any, Call], Awaitable[Any]], content: bytes, call: Call
    ) -> Any:
        """A method's answer, or its error as a status."""
        with self._counted(name) as count:
            try:
                return await method(_read(name, content), call)
            except JpetsError as error:
                if error.retry_after is not None:
                    call.set_trailing_metadata((("retry-after", str(error.retry_after)),))
                count(code_of(error))
                await call.abort(code_of(error), error.message)
            except Exception as error:  # noqa: BLE001 (the last handler: the client gets a status, the log the place)
                log_unexpected(error, "")
                count(grpc.StatusCode.INTERNAL)
                await call.abort(grpc.StatusCode.INTERNAL, FAILED)

    @contextlib.contextmanager
    def _counted(self, name: str) -> Iterator[Callable[[grpc.StatusCode], None]]:
        """Counts a request by the status that it is told, by default that of a client that left."""
        started, code = time.monotonic(), grpc.StatusCode.OK

        def count(other: grpc.StatusCode) -> None:
            nonlocal code
            code = other

        try:
            yield count
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        finally:
            self._here.metrics.remote_call(name, code.name, time.monotonic() - started)

    async def _server_live(self, request: Any, call: Call) -> Any:
        return message("ServerLiveResponse")(live=self._here.services.live)

    async def _server_ready(self, request: Any, call: Call) -> Any:
        return message("ServerReadyResponse")(ready=self._here.services.first.ready)

    async def _server_metadata(self, request: Any, call: Call) -> Any:
        return message("ServerMetadataResponse")(name="jpets", version=server_version(), extensions=EXTENSIONS)

    async def _model_ready(self, request: Any, call: Call) -> Any:
        try:
            await find_model(self._here, request.name, request.version or None)
        except NotFound:  # as Triton answers
            return message("ModelReadyResponse")(ready=False)
        return message("ModelReadyResponse")(ready=self._here.services.first.ready)

    async def _model_metadata(self, request: Any, call: Call) -> Any:
        found = (await find_model(self._here, request.name, request.version or None)).metadata
        tensors = {side: [TensorMetadata(**each) for each in found.pop(side)] for side in ("inputs", "outputs")}
        return ModelMetadata(**found, **tensors)

    async def _infer(self, request: Any, call: Call) -> Any:
        return await self._result(request, call.time_remaining())

    async def _result(self, request: Any, left: float | None) -> Any:
        """The answer to a request within ``left`` seconds. Raises ``JpetsError``."""
        here, settings = self._here, self._here.settings
        size = request.ByteSize()
        if self._held and self._held + size > settings.max_bodies_bytes:
            raise Saturated(FULL)
        self._held += size
        try:
            model = await find_model(here, request.model_name, request.model_version or None)
            parameters = parameters_of(request)
            asked = await read_inference(here, model, inference_of(request, parameters))
            given = [left] if left is not None else []
            given += [] if parameters.timeout is None else [parameters.timeout / 1e6]
            seconds = min(settings.longest_timeout, *given) if given else settings.request_timeout
            return await answer(here, asked.queries, partial(response_of, request, model, asked), seconds)
        finally:
            self._held -= size

    async def _stream(self, contents: AsyncIterator[bytes], call: Call) -> None:
        """Answers in the order of the requests, of which a few are worked on at a time. One that fails is told so in
        its place, and the stream goes on."""
        coming: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue(AHEAD)
        async with asyncio.TaskGroup() as group:

            async def read() -> None:
                async for content in contents:
                    await coming.put(group.create_task(self._streamed(content, call.time_remaining())))
                await coming.put(None)

            group.create_task(read())
            while (task := await coming.get()) is not None:
                await call.write(await task)

    async def _streamed(self, content: bytes, left: float | None) -> Any:
        name, id = "ModelStreamInfer", ""
        with self._counted(name) as count:
            try:
                request = _read(name, content)
                id = request.id
                return StreamResponse(infer_response=await self._result(request, left))
            except JpetsError as error:
                count(code_of(error))
                problem = error.message
            except Exception as error:  # noqa: BLE001 (as for a request alone)
                log_unexpected(error, "")
                count(grpc.StatusCode.INTERNAL)
                problem = FAILED
            response = StreamResponse(error_message=problem)
            response.infer_response.id = id
            return response

    async def _index(self, request: Any, call: Call) -> Any:
        found = await index(self._here, ready=request.ready)
        return message("RepositoryIndexResponse")(models=[ModelIndex(**each) for each in found])

    async def _load(self, request: Any, call: Call) -> Any:
        await load(self._here, request.model_name, dict(request.parameters))
        return message("RepositoryModelLoadResponse")()

    async def _unload(self, request: Any, call: Call) -> Any:
        await unload(self._here, request.model_name)
        return message("RepositoryModelUnloadResponse")()


def _read(name: str, content: bytes) -> Any:
    """A method's request. Raises ``Unparseable``; gRPC itself would log a traceback."""
    kind = METHODS[name].input_type.name
    try:
        return message(kind).FromString(content)
    except DecodeError as error:
        raise Unparseable(f"expected a {kind}, found other bytes") from error


def _serializer(name: str) -> Callable[[Any], bytes]:
    written: Callable[[Any], bytes] = message(METHODS[name].output_type.name).SerializeToString
    return written
