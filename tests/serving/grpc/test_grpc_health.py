"""Health and reflection, by their own packages' clients; the compiled messages are those of the source."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from serving.grpc.messages import SERVICE

FOLDER = pathlib.Path(__file__).parents[3] / "serving" / "grpc"
SERVING = health_pb2.HealthCheckResponse.SERVING


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


def test_messages_are_compiled_of_their_source(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("grpc_tools")
    made = tmp_path / "made.binpb"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{FOLDER}", f"--descriptor_set_out={made}"]
    subprocess.run([*command, FOLDER / "inference.proto"], check=True)
    files = [
        descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()) for path in (made, FOLDER / "inference.binpb")
    ]
    assert files[0] == files[1]
