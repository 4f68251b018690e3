"""What probes ask over gRPC needs no key, as over HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from fastapi import FastAPI
from listening_grpc import listening
from remote import Remote
from signed import Signed


@pytest.fixture
def channel(app: FastAPI, signed: Signed) -> Iterator[grpc.Channel]:
    """Of a server that has keys."""
    signed()
    with listening(app) as address, grpc.insecure_channel(address) as channel:
        yield channel


@pytest.mark.parametrize("key", [None, "jpets_none_such"])
def test_probes_need_no_key(channel: grpc.Channel, key: str | None) -> None:
    remote = Remote(channel, key)
    assert remote("ServerLive").live and remote("ServerReady").ready
    for method in ("ServerMetadata", "RepositoryIndex"):
        with pytest.raises(grpc.RpcError) as refused:
            remote(method)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
