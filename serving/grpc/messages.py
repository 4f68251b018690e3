"""The messages of ``inference.proto``.

They are in a pool of their own: Triton's client declares the same names in the process's common one, and both can be in
one process.
"""

from __future__ import annotations

import importlib.resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

SERVICE = "inference.GRPCInferenceService"
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    compiled = importlib.resources.files(__package__).joinpath("inference.binpb").read_bytes()
    for file in descriptor_pb2.FileDescriptorSet.FromString(compiled).file:
        pool.Add(file)
    for other in (health_pb2, reflection_pb2):
        pool.AddSerializedFile(other.DESCRIPTOR.serialized_pb)
    return pool


POOL = _pool()
"""What reflection tells of."""
METHODS = {method.name: method for method in POOL.FindServiceByName(SERVICE).methods}


def message(name: str) -> Any:
    """The class of a message."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"inference.{name}"))


InferResponse = message("ModelInferResponse")
OutputTensor = message("ModelInferResponse.InferOutputTensor")
StreamResponse = message("ModelStreamInferResponse")
ModelMetadata = message("ModelMetadataResponse")
TensorMetadata = message("ModelMetadataResponse.TensorMetadata")
ModelIndex = message("RepositoryIndexResponse.ModelIndex")
