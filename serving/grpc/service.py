"""The methods of the Open Inference Protocol over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from jpets.errors import (
    SHUTTING_DOWN,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    InvalidInput,
    JpetsError,
    NotFound,
    OutOfSpace,
    OverQuota,
    Saturated,
    Unauthorized,
    Unparseable,
)
from serving.grpc.arrivals import ARRIVED
from serving.grpc.inference import (
    FINAL,
    check_counts,
    check_unload,
    inference_of,
    parameters_of,
    response_of,
    seconds_of,
)
from serving.grpc.keys import PROBES, key_in
from serving.grpc.messages import METHODS, SERVICE, ModelIndex, ModelMetadata, StreamResponse, TensorMetadata, message
from serving.http.body_budget import FREE
from serving.http.errors import log_failure, log_unexpected, numbered
from serving.protocols.oip.inference import EXTENSIONS, find_model, read_inference
from serving.protocols.oip.parameters import Parameters
from serving.protocols.oip.repository import index, is_ready, load, unload
from serving.requests.ask import answer
from serving.requests.context import Context, server_version
from serving.requests.deadlines import in_time
from serving.tenants.asker import NOBODY, Asker
from serving.tenants.scopes import METHODS as SCOPES

Call: TypeAlias = Any
"""``grpc.aio.ServicerContext``; the package has no types."""
CODES = (
    (InvalidInput, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (Unauthorized, grpc.StatusCode.UNAUTHENTICATED),
    (Forbidden, grpc.StatusCode.PERMISSION_DENIED),
    (OverQuota, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Conflict, grpc.StatusCode.ABORTED),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (Saturated, grpc.StatusCode.UNAVAILABLE),
    (OutOfSpace, grpc.StatusCode.RESOURCE_EXHAUSTED),
)
FULL = "the messages of other requests take all memory that there is for them; try again"
AHEAD = 64
"""Requests of a stream that are worked on at a time."""
MOST_UNREAD = 8 << 20
"""Bytes of answers that a stream's client has not read, with which no more of its requests are."""
PAUSE, LOOK = 0.02, 0.5
"""Seconds between looks whether they were read, and whether a stream has to end."""
ALL_STREAMS = 1.25
"""Streams of all tenants together, in those that one of them may have: calls of one message need places too."""
SILENT = 600.0
"""Seconds after which a stream ends on which nothing comes and nothing is worked on."""


def code_of(error: JpetsError) -> grpc.StatusCode:
    return next((code for kind, code in CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


class InferenceService:
    """One method for each of the protocol's; ``handlers`` has them for a server. A tenant has at most ``streams`` open.
    Event loop only."""

    def __init__(self, here: Context, streams: int) -> None:
        self._here = here
        self._streams, self._most_streams = Counter[str](), streams
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
        self, name: str, method: Callable[[Context, Any, Call], Awaitable[Any]], content: bytes, call: Call
    ) -> Any:
        """A method's answer, or its error as a status, which is counted before it is sent."""
        with self._counted(name) as count:
            try:
                here = self._here.asked_by(self._asker(name, call), ARRIVED.get())
                return await method(here, _read(name, content), call)
            except JpetsError as error:
                code, problem = code_of(error), _told(error)
                if error.retry_after is not None:
                    call.set_trailing_metadata((("retry-after", str(error.retry_after)),))
            except Exception as error:  # noqa: BLE001 (the last handler: the client gets a status, the log the place)
                code, problem = grpc.StatusCode.INTERNAL, _told_unexpected(error)
            count(code)
        return await call.abort(code, problem)

    def _asker(self, method: str, call: Call) -> Asker:
        """For whom a request is. Raises ``Unauthorized``, ``Forbidden``, ``OverQuota``."""
        if method in PROBES:
            return NOBODY
        asker = self._here.keyring.asker(key_in(call.invocation_metadata()))
        asker.allowance.request()
        asker.check(SCOPES[method])
        return asker

    @contextlib.contextmanager
    def _counted(self, name: str) -> Iterator[Callable[[grpc.StatusCode], None]]:
        """Counts a request by the status that it is told, by default that all went well."""
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

    async def _server_live(self, here: Context, request: Any, call: Call) -> Any:
        return message("ServerLiveResponse")(live=here.services.live)

    async def _server_ready(self, here: Context, request: Any, call: Call) -> Any:
        return message("ServerReadyResponse")(ready=here.services.first.ready)

    async def _server_metadata(self, here: Context, request: Any, call: Call) -> Any:
        return message("ServerMetadataResponse")(name="jpets", version=server_version(), extensions=EXTENSIONS)

    async def _model_ready(self, here: Context, request: Any, call: Call) -> Any:
        try:
            able = await is_ready(here, request.name, request.version or None)
        except NotFound:  # as Triton answers
            able = False
        return message("ModelReadyResponse")(ready=able)

    async def _model_metadata(self, here: Context, request: Any, call: Call) -> Any:
        found = (await find_model(here, request.name, request.version or None)).metadata
        tensors = {side: [TensorMetadata(**each) for each in found.pop(side)] for side in ("inputs", "outputs")}
        return ModelMetadata(**found, **tensors)

    async def _infer(self, here: Context, request: Any, call: Call) -> Any:
        return await self._result(here, request, call)

    async def _result(self, here: Context, request: Any, call: Call, *, streamed: bool = False) -> Any:
        """The answer to a request of a call. Raises ``JpetsError``."""
        with self._holding(request.ByteSize()):
            parameters = parameters_of(request, streamed=streamed)
            seconds = seconds_of(parameters, _waits(here, call), here.settings)
            inference = inference_of(request, parameters)
            model = await in_time(here, seconds, find_model(here, request.model_name, request.model_version or None))
            asked = await in_time(here, seconds, read_inference(here, model, inference))
            return await answer(here, asked.queries, partial(response_of, request, asked), seconds)

    @contextlib.contextmanager
    def _holding(self, size: int) -> Iterator[None]:
        """Counts a message in memory; small ones pass when large ones take all room, as over HTTP. Raises
        ``Saturated``."""
        counted = max(0, size - FREE)
        if counted and self._held and self._held + counted > self._here.settings.max_bodies_bytes:
            raise Saturated(FULL)
        self._held += counted
        try:
            yield
        finally:
            self._held -= counted

    async def _stream(self, contents: AsyncIterator[bytes], call: Call) -> None:
        """A stream counts as a request when it opens. Each of its own counts again."""
        try:
            tenant = self._asker("ModelStreamInfer", call).tenant
            if self._streams[tenant] >= self._most_streams:
                raise Saturated(f"{self._most_streams} streams of yours are open already; end some")
            if self._streams.total() >= ALL_STREAMS * self._most_streams:
                raise Saturated("too many streams are open; try again")
        except JpetsError as error:
            await call.abort(code_of(error), error.message)
            return
        self._streams[tenant] += 1
        try:
            await self._streamed_all(contents, call)
        finally:
            self._streams[tenant] -= 1

    async def _streamed_all(self, contents: AsyncIterator[bytes], call: Call) -> None:
        """Answers in the order of the requests, of which a few are worked on at a time. One that fails is told so in
        its place, and the stream goes on. No more are read while the client leaves many answers unread, and none once
        the server drains, or nothing has come for long: then it ends with an error, as clients take another end for one
        that they asked for, and wait for answers to what they send."""
        coming: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue(AHEAD)
        unread, working, active = 0, 0, time.monotonic()
        ended: JpetsError | None = None
        whole = False

        async def read() -> None:
            nonlocal working, whole
            async for content in contents:
                working += 1
                while unread > MOST_UNREAD:
                    await asyncio.sleep(PAUSE)
                await coming.put(group.create_task(answered(content, time.monotonic())))
            whole = True
            await coming.put(None)

        async def answered(content: bytes, came: float) -> Any:
            nonlocal unread
            response = await self._streamed(content, call, came)
            unread += response.ByteSize()
            return response

        async def end() -> None:
            nonlocal ended
            while (ended := self._end_of(None if working else active)) is None:
                await asyncio.sleep(LOOK)
            reading.cancel()
            await coming.put(None)

        try:
            async with asyncio.TaskGroup() as group:
                reading, ending = group.create_task(read()), group.create_task(end())
                while (task := await coming.get()) is not None:
                    response = await task
                    await call.write(response)
                    unread -= response.ByteSize()
                    working, active = working - 1, time.monotonic()
                reading.cancel()
                ending.cancel()
        except BaseExceptionGroup as several:  # gRPC knows what to do with each alone: mostly that the client left
            raise several.exceptions[0] from None
        if ended is not None and not whole:
            await call.abort(code_of(ended), ended.message)

    def _end_of(self, idle_since: float | None) -> JpetsError | None:
        """Why a stream may not stay open, apart from its key."""
        if self._here.services.first.tasks.closing:
            return Saturated(SHUTTING_DOWN)
        if idle_since is not None and time.monotonic() > idle_since + SILENT:
            return Saturated(f"nothing came for {SILENT:g} seconds; open a new stream")
        return None

    async def _streamed(self, content: bytes, call: Call, came: float) -> Any:
        """The answer to a request of a stream, which came then (``time.monotonic``)."""
        name, id = "ModelStreamInfer", ""
        with self._counted(name) as count:
            try:
                here = self._here.asked_by(self._asker(name, call), came)
                request = _read(name, content)
                id = request.id
                own = await self._result(here, request, call, streamed=True)
                own.parameters[FINAL].bool_param = True
                return StreamResponse(infer_response=own)
            except JpetsError as error:
                count(code_of(error))
                problem = _told(error)
            except Exception as error:  # noqa: BLE001 (as for a request alone)
                count(grpc.StatusCode.INTERNAL)
                problem = _told_unexpected(error)
            response = StreamResponse(error_message=problem)
            response.infer_response.id = id
            response.infer_response.parameters[FINAL].bool_param = True
            return response

    async def _index(self, here: Context, request: Any, call: Call) -> Any:
        found = await index(here, ready=request.ready)
        return message("RepositoryIndexResponse")(models=[ModelIndex(**each) for each in found])

    async def _load(self, here: Context, request: Any, call: Call) -> Any:
        check_counts(request, "parameters")
        seconds = seconds_of(Parameters(), _waits(here, call), here.settings)
        await load(here, request.model_name, dict(request.parameters), seconds)
        return message("RepositoryModelLoadResponse")()

    async def _unload(self, here: Context, request: Any, call: Call) -> Any:
        check_unload(request)
        await unload(here, request.model_name)
        return message("RepositoryModelUnloadResponse")()


def _waits(here: Context, call: Call) -> float | None:
    """Seconds for which the client of a request waits, counted as its deadline is."""
    left = call.time_remaining()
    return None if left is None else time.monotonic() + left - here.arrived


def _read(name: str, content: bytes) -> Any:
    """A method's request. Raises ``Unparseable``; gRPC itself would log a traceback."""
    kind = METHODS[name].input_type.name
    try:
        return message(kind).FromString(content)
    except DecodeError as error:
        raise Unparseable(f"expected a {kind}, found other bytes") from error


def _told(error: JpetsError) -> str:
    """What a client is told. A failure of this server is in the log too, by the number that the client is told."""
    if code_of(error) is not grpc.StatusCode.INTERNAL:
        return error.message
    number = uuid.uuid4().hex
    log_failure(error, number)
    return numbered(error, number)


def _told_unexpected(error: Exception) -> str:
    """What a client is told of an unforeseen error; the log has it under the same number."""
    number = uuid.uuid4().hex
    log_unexpected(error, number)
    return f"the server failed; the log has the details, as request {number}"


def _serializer(name: str) -> Callable[[Any], bytes]:
    written: Callable[[Any], bytes] = message(METHODS[name].output_type.name).SerializeToString
    return written
