"""Who can reach a server: addresses without keys, and TLS on both ports."""

from __future__ import annotations

import contextlib
import dataclasses
import ssl
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme
from clients import Call, client_of
from fastapi import FastAPI
from listening import listening as listening_http
from listening_grpc import listening
from remote import Remote

from checkpoints.access import Access
from checkpoints.repository import Repository
from jpets.app.exposure import check_open_to_all, is_loopback, tls_files
from jpets.errors import InvalidInput
from serving.hosted.service import Service
from serving.http.settings import ServingSettings
from serving.options.options import Options, read_options
from serving.tenants.keyring import Keyring


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
    ],
)
def test_other_machines_need_keys(host: str, expected: bool, tmp_path: Path) -> None:
    options = read_options({"demo": True, "host": host})
    with contextlib.closing(Repository(tmp_path)) as repository:
        assert is_loopback(host) == expected
        with contextlib.nullcontext() if expected else pytest.raises(InvalidInput, match="--insecure"):
            check_open_to_all(options, Keyring(repository.access))
        check_open_to_all(options.model_copy(update={"insecure": True}), Keyring(repository.access))
        repository.access.create()
        check_open_to_all(options, Keyring(repository.access))


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls(authority: trustme.CA, tmp_path: Path) -> Options:
    """Options with a certificate of the authority for this machine."""
    made = authority.issue_cert("127.0.0.1", "localhost")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made.private_key_pem.write_to_path(str(key))
    for part in made.cert_chain_pems:
        part.write_to_path(str(certificate), append=True)
    return read_options({"demo": True, "tls_key": key, "tls_certificate": certificate})


def test_both_protocols_over_tls(app: FastAPI, tls: Options, authority: trustme.CA) -> None:
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    how: dict[str, Any] = {"ssl_keyfile": tls.tls_key, "ssl_certfile": tls.tls_certificate}
    with listening_http(app, **how) as plain:
        url = plain.replace("http", "https")
        with httpx.Client(verify=trusted, base_url=url) as client:
            for text, status in (("hello", 200), ("hello " * 150_000, 200), ("hello " * 200_000, 413)):
                body = {"model": "topic", "input": text, "truncate": True}  # of one record, of many, of too many
                assert client.post("/v1/classify", json=body).status_code == status
            assert client.get("/v2/health/ready").json() == {"ready": True}
        with pytest.raises(httpx.ConnectError):
            httpx.get(url + "/v2/health/ready")
    files = tls_files(tls)
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    with listening(app, files) as address, grpc.secure_channel(address, credentials) as channel:
        assert Remote(channel)("ServerReady").ready


def test_certificates_that_are_none(tls: Options) -> None:
    other = trustme.CA().issue_cert("localhost")
    assert tls.tls_key is not None and tls.tls_certificate is not None
    with pytest.raises(InvalidInput, match="give both"):
        read_options({"demo": True, "tls_key": tls.tls_key})
    other.private_key_pem.write_to_path(str(tls.tls_key))
    with pytest.raises(InvalidInput, match="a certificate and its key"):
        tls_files(tls)
    tls.tls_certificate.write_text("nothing")
    with pytest.raises(InvalidInput, match="a certificate and its key"):
        tls_files(tls)
    tls.tls_key.unlink()
    with pytest.raises(OSError, match="cannot be read"):
        tls_files(tls)


def _sent(call: Call, **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return int(call("POST", "/v1/classify", json={"model": "topic", "input": "hello"}, headers=named).status_code)


def test_a_page_of_another_site_does_nothing_on_a_server_without_keys(
    service: Service, settings: ServingSettings, access: Access
) -> None:
    """Browsers let any page post to this machine, though it cannot read the answer."""
    keyring = Keyring(access)
    call = client_of(service, settings, None, keyring)
    for headers in (
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site", "Origin": "http://server:3000"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
    ):
        assert _sent(call, **headers) == 403, headers
        assert call("POST", "/v1/keys", content=b"{}", headers={"Origin": "https://evil.example"}).status_code == 403
    for headers in (
        {},
        {"Sec_Fetch_Site": "same-origin", "Origin": "https://behind.a.proxy"},
        {"Sec_Fetch_Site": "none"},
        {"Origin": "http://server"},
    ):
        assert _sent(call, **headers) == 200, headers
    assert call("GET", "/v1/tasks", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200  # a link
    local = client_of(service, dataclasses.replace(settings, local=True), None, keyring)
    for host, status in (
        ("evil.example:8080", 403),  # it leads to this machine since a moment ago (DNS rebinding)
        ("127.0.0.1.evil.example", 403),
        ("localhost:8080", 200),
        ("app.localhost", 200),
        ("127.0.0.1:8080", 200),
        ("[::1]:8080", 200),
        ("[::1]", 200),
    ):
        assert _sent(local, Host=host, Origin=f"http://{host}") == status, host
        assert local("GET", "/v1/tasks", headers={"Host": host}).status_code == status, host
    assert local("GET", "/v2/health/live", headers={"Host": "probe.example"}).status_code == 200
    _, key = access.create("default", ("infer",))
    keyring.refresh()
    assert _sent(call, X_API_Key=key, Origin="https://page.with.a.key") == 200
    assert _sent(local, X_API_Key=key, Host="evil.example") == 200
