"""Health and reflection, by their own packages' clients; the compiled messages are those of the source."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator

import grpc
import pytest
from fastapi import FastAPI
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from listening_grpc import listening

from serving.grpc import arrivals
from serving.grpc.messages import SERVICE
from serving.http.settings import ConnectionLimits

FOLDER = pathlib.Path(__file__).parents[3] / "serving" / "grpc"
SERVING = health_pb2.HealthCheckResponse.SERVING
REFUSED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""Of a call that gives way, before it is heard or after."""


@pytest.fixture
def channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address)


def test_health(channel: grpc.Channel) -> None:
    with channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            assert stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10).status == SERVING
        with pytest.raises(grpc.RpcError) as unknown:
            stub.Check(health_pb2.HealthCheckRequest(service="other"), timeout=10)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        watching = stub.Watch(health_pb2.HealthCheckRequest(), timeout=10)
        assert next(watching).status == SERVING
        watching.cancel()


def test_reflection(channel: grpc.Channel) -> None:
    with channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
        file = database.FindFileContainingSymbol(SERVICE)
        assert [service.name for service in file.service] == ["GRPCInferenceService"]


def test_streams_of_reflection_are_bounded_and_end_where_they_are_silent(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "SILENT_SECONDS", 8.0)  # the slowest machine asks in that time
    never = threading.Event()

    def silent() -> Iterator[reflection_pb2.ServerReflectionRequest]:
        never.wait(60)
        yield from ()

    with listening(app, limits=ConnectionLimits(most=32)) as address, grpc.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        held = [stub.ServerReflectionInfo(silent(), timeout=60) for _ in range(2)]
        with pytest.raises(grpc.RpcError) as refused:
            for _ in range(100):  # until both have come
                assert not list(stub.ServerReflectionInfo(iter(()), timeout=60))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert [list(each) for each in held] == [[], []], "they end by themselves"
        assert not list(stub.ServerReflectionInfo(iter(()), timeout=60))
    never.set()


def test_a_call_whose_message_does_not_come_ends(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "ARRIVAL_SECONDS", 0.3)
    never = threading.Event()

    def silent() -> Iterator[bytes]:
        never.wait(20)
        yield from ()

    def code(channel: grpc.Channel, messages: Iterator[bytes]) -> grpc.StatusCode:
        call = channel.stream_unary(f"/{SERVICE}/ServerLive")  # what is not sent makes no difference to the server
        with pytest.raises(grpc.RpcError) as ended:
            call(messages, timeout=20)
        return ended.value.code()

    with listening(app) as address, grpc.insecure_channel(address) as channel:
        assert code(channel, silent()) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert code(channel, iter(())) is grpc.StatusCode.INVALID_ARGUMENT
        stub = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status == SERVING
    never.set()


def test_calls_that_send_nothing_keep_no_other_out(app: FastAPI) -> None:
    """The one that has waited for longest ends for a newcomer, whatever it asks."""
    never = threading.Event()

    def silent() -> Iterator[bytes]:
        never.wait(20)
        yield from ()

    with listening(app, limits=ConnectionLimits(most=16)) as address, grpc.insecure_channel(address) as channel:
        call = channel.stream_unary("/grpc.health.v1.Health/Check")
        held = [call.future(silent(), timeout=20) for _ in range(16)]
        stub = health_pb2_grpc.HealthStub(channel)
        for _ in range(100):
            assert stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status == SERVING
        ended = [each for each in held if each.done()]
        assert ended and all(each.code() in REFUSED for each in ended)
        never.set()


def test_messages_are_compiled_of_their_source(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("grpc_tools")
    made = tmp_path / "made.binpb"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{FOLDER}", f"--descriptor_set_out={made}"]
    subprocess.run([*command, FOLDER / "inference.proto"], check=True)
    files = [
        descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()) for path in (made, FOLDER / "inference.binpb")
    ]
    assert files[0] == files[1]
