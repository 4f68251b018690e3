"""Connections whose clients do not read: a call's status waits behind its answers, and gRPC ends no call without it."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
from collections.abc import Iterator
from urllib.parse import unquote

log = logging.getLogger(__name__)

DESCRIPTORS = "/dev/fd"
"""A folder of the process's own, on Linux and macOS."""
Address = tuple[str, int]


def close_connection(peer: str, port: int) -> None:
    """Closes the connection that a call came on, with all other calls there; ``peer`` is what gRPC says of it, ``port``
    the server's own: the same client may have come from there to another one."""
    wanted = _address_of(peer)
    for connection in _connections():
        with connection, contextlib.suppress(OSError):  # it is no longer connected, or never was
            own = connection.getsockname()[1]
            if own == port and _plain(*connection.getpeername()[:2]) == wanted:
                connection.shutdown(socket.SHUT_RDWR)
                log.warning("closed a connection: its key has ended, and its client reads nothing")


def _address_of(peer: str) -> Address:
    """That of ``ipv4:127.0.0.1:8081`` or ``ipv6:%5B::1%5D:8081``."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return _plain(host.strip("[]"), int(port))


def _plain(host: str, port: int) -> Address:
    """An address in one spelling: sockets for both families have those of the older one in the newer one's."""
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address), port


def _connections() -> Iterator[socket.socket]:
    """The process's sockets, duplicated: what is closed meanwhile, or opened in its place, is none of them."""
    for name in os.listdir(DESCRIPTORS):
        try:
            own = os.dup(int(name))
        except OSError:  # closed since
            continue
        try:
            found = socket.socket(fileno=own)
        except OSError:  # a file
            os.close(own)
            continue
        if found.family in (socket.AF_INET, socket.AF_INET6):
            yield found
        else:
            found.close()
