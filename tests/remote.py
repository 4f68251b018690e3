"""A gRPC client of the Open Inference Protocol."""

from __future__ import annotations

from typing import Any

import grpc

from serving.grpc.messages import METHODS, SERVICE, StreamResponse, message

InferRequest = message("ModelInferRequest")


def streaming(channel: grpc.Channel) -> Any:
    """The method that answers a stream of requests."""
    path = f"/{SERVICE}/ModelStreamInfer"
    return channel.stream_stream(path, InferRequest.SerializeToString, StreamResponse.FromString)


class Remote:
    """The protocol's methods by name, with the fields of their requests."""

    def __init__(self, channel: grpc.Channel, key: str | None = None) -> None:
        self.channel = channel
        self.signed = () if key is None else (("authorization", f"Bearer {key}"),)

    def __call__(self, method: str, *, timeout: float | None = 30, **fields: Any) -> Any:
        called = METHODS[method]
        path = f"/{SERVICE}/{method}"
        request, response = message(called.input_type.name), message(called.output_type.name)
        call = self.channel.unary_unary(path, request.SerializeToString, response.FromString)
        return call(request(**fields), timeout=timeout, metadata=self.signed)
