"""The gRPC server, on the event loop of the HTTP server."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from serving.grpc.arrivals import Arrivals, BoundedReflection
from serving.grpc.health import Health
from serving.grpc.keys import KeyInterceptor
from serving.grpc.messages import HEALTH, POOL, SERVICE
from serving.grpc.service import InferenceService
from serving.http.settings import ConnectionLimits
from serving.requests.context import Context

ALONE = (("grpc.so_reuseport", 0),)
"""Another server on the port is an error: the system would spread calls over both."""


CALLS_EACH = 256
"""Calls at a time on one connection."""


class GrpcServer:
    """Listens from ``start`` to ``stop``, on at most as many connections, and for at most as many calls at a time, as
    ``limits`` allow. Event loop only."""

    def __init__(self, here: Context, limits: ConnectionLimits, tls: tuple[bytes, bytes] | None = None) -> None:
        """``tls``: private key and certificates, in PEM."""
        bounds = (
            ("grpc.max_receive_message_length", here.settings.max_body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_allowed_incoming_connections", limits.most),
            ("grpc.max_connection_idle_ms", int(limits.keep_alive * 1000)),
            ("grpc.max_concurrent_streams", CALLS_EACH),
        )
        self._credentials = None if tls is None else grpc.ssl_server_credentials([tls])
        self._keys = KeyInterceptor(here)
        self._server = grpc.aio.server(
            options=(*ALONE, *bounds),
            maximum_concurrent_rpcs=limits.most,
            interceptors=[self._keys, Arrivals(max(1, limits.most // 4))],
        )
        self._server.add_generic_rpc_handlers((InferenceService(here, max(1, limits.most // 2)).handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(Health(here, max(1, limits.most // 8)), self._server)
        own = BoundedReflection((SERVICE, HEALTH, reflection.SERVICE_NAME), POOL, max(1, limits.most // 16))
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(own, self._server)

    async def start(self, address: str) -> int:
        """Returns the port that it listens on. Raises ``OSError``."""
        try:
            if self._credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, self._credentials)
        except RuntimeError as error:  # the only one: the address cannot be bound
            raise OSError(f"cannot listen on {address}") from error
        self._keys.port = port
        await self._server.start()
        return port

    async def stop(self, grace: float) -> None:
        """Takes no more calls; running ones get ``grace`` seconds."""
        await self._server.stop(grace)
