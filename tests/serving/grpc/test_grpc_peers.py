"""The connection of a call is found by what gRPC says of its peer."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from serving.grpc.peers import close_connection

FAMILIES = {
    "127.0.0.1": (socket.AF_INET, "127.0.0.1"),
    "::1": (socket.AF_INET6, "::1"),
    "::": (socket.AF_INET6, "127.0.0.1"),  # both families
}


@pytest.fixture
def connections(request: pytest.FixtureRequest) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Two connections to one server, each by the server's end and the client's."""
    family, host = FAMILIES[request.param]
    with socket.socket(family) as server:
        if family is socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind((request.param, 0))
        server.listen()
        port, found = server.getsockname()[1], []
        for _ in range(2):
            client = socket.create_connection((host, port), timeout=10)
            found.append((server.accept()[0], client))
        yield found
        for own in found:
            for end in own:
                end.close()


@pytest.mark.parametrize("connections", FAMILIES, indirect=True)
def test_no_other_connection_is_closed(connections: list[tuple[socket.socket, socket.socket]]) -> None:
    (first, client), (server, other) = connections
    host, port = client.getsockname()[:2]
    peer, own = f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}", first.getsockname()[1]
    close_connection(peer, own + 1)
    first.sendall(b"b")
    assert client.recv(1) == b"b"
    close_connection(peer, own)
    assert client.recv(1) == b""
    server.sendall(b"a")
    assert other.recv(1) == b"a"
