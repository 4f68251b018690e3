"""A server as the commands see it: HTTP requests with the standard library, and jpets errors where it refuses."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, BinaryIO, Self, TypeVar, cast

import pydantic
import typer

from jpets.app.commands.client.kept_connection import KeptConnections
from jpets.app.commands.output import LARGE, progress_bars
from jpets.errors import DeadlineExceeded, InvalidInput, JpetsError, NotFound, Unparseable

KEY = "JPETS_KEY"
"""The variable that holds a key: an option would show it to everyone who lists the machine's processes."""
ServerUrl = Annotated[
    str,
    typer.Option("--server", envvar="JPETS_SERVER", help=f"URL of the server; {KEY} holds the key, if it needs one"),
]
DEFAULT_SERVER = "http://127.0.0.1:8080"
TIMEOUT = 120.0
"""Seconds that a server may say nothing."""
MOST_REFUSAL_BYTES = 1 << 20
BLOCK = 1 << 20
LOOPBACK = ("localhost", "127.0.0.1", "::1")
FILE_TYPE = "application/octet-stream"
Model = TypeVar("Model", bound=pydantic.BaseModel)


class NoAnswer(NotFound):
    """No server answers at the URL."""


class Server:
    """The server at ``url``, with the key that the environment holds, if any. Requests raise the ``JpetsError`` that it
    names, ``NoAnswer`` where none answers.

    ``with`` keeps its connection for the requests inside.
    """

    def __init__(self, url: str) -> None:
        parts = _split(url)
        if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
            found = "" if "@" in url else f", found {url!r}"  # there may be a password in it
            raise typer.BadParameter(f"--server must be a URL such as {DEFAULT_SERVER}{found}")
        if "@" in parts.netloc:
            raise typer.BadParameter(f"--server: expected a URL without a user or password; {KEY} holds the key")
        self._url = url.rstrip("/")
        # Proxies of the environment are for other machines.
        self._proxies = [urllib.request.ProxyHandler({})] if parts.hostname in LOOPBACK else []
        self._opener = urllib.request.build_opener(*self._proxies)
        self._kept = KeptConnections()

    def __enter__(self) -> Self:
        self._opener = urllib.request.build_opener(*self._proxies, self._kept)
        return self

    def __exit__(self, *exception: object) -> None:
        self._opener = urllib.request.build_opener(*self._proxies)
        self._kept.close()

    def ask(self, model: type[Model], method: str, path: str, body: object = None) -> Model:
        """The answer to a JSON request. Raises ``Unparseable`` where it is no ``model``."""
        data = None if body is None else json.dumps(body).encode()
        headers = {} if data is None else {"Content-Type": "application/json"}
        return self._parsed(model, self._send(method, path, data, headers))

    def upload(
        self, model: type[Model], path: str, file: Path, headers: Mapping[str, str], method: str = "PUT"
    ) -> Model:
        """The answer to a file's bytes."""
        length = file.stat().st_size
        framing = {"Content-Type": FILE_TYPE, "Content-Length": str(length)}
        alone = threading.current_thread() is threading.main_thread()  # two bars would write over each other
        with (
            progress_bars(enabled=alone and length > LARGE) as bars,
            bars.open(file, "rb", description="upload") as content,
        ):
            return self._parsed(model, self._send(method, path, content, {**framing, **headers}))

    def delete(self, path: str) -> None:
        self._send("DELETE", path, None, {})

    def download(self, path: str) -> bytes:
        return self._send("GET", path, None, {})

    def _send(self, method: str, path: str, data: bytes | BinaryIO | None, headers: Mapping[str, str]) -> bytes:
        request = urllib.request.Request(self._url + path, data, dict(headers), method=method)
        if key := _key():
            request.add_unredirected_header("Authorization", f"Bearer {key}")  # another host must not get it
        try:
            with self._opener.open(request, timeout=TIMEOUT) as response:
                return _received(response)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error.code, error.read(MOST_REFUSAL_BYTES)) from None
        except TimeoutError as error:
            self._kept.drop()  # the rest of this answer is not the next one's
            raise DeadlineExceeded(f"{self._url} said nothing for {TIMEOUT:g} seconds; try again later") from error
        except (OSError, http.client.HTTPException) as error:
            self._kept.drop()
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise NoAnswer(
                    f"{self._url} has a certificate that is not trusted here ({reason.verify_message}); "
                    "SSL_CERT_FILE names a file of trusted ones"
                ) from error
            why = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
            raise NoAnswer(
                f"no answer from {self._url} ({why}); check --server, or start one: python -m jpets.serve --demo"
            ) from error

    def _parsed(self, model: type[Model], content: bytes) -> Model:
        try:
            return model.model_validate_json(content)
        except pydantic.ValidationError as error:
            raise self.strange() from error

    def _refusal(self, status: int, content: bytes) -> JpetsError:
        try:
            told = json.loads(content)["error"]
            code, message = str(told["code"]), str(told["message"])
            if status == 500 and (number := told.get("request_id")):
                message = f"{message} (request {number})"  # the server's log has it
        except (ValueError, RecursionError, KeyError, TypeError):
            return self.strange(f" (HTTP {status})")
        return next((kind for kind in _kinds(JpetsError) if kind.code == code), JpetsError)(message)

    def strange(self, what: str = "") -> Unparseable:
        """The error for an answer that this version of jpets does not give."""
        return Unparseable(f"the answer of {self._url} is not that of a jpets server{what}; check --server")


def _split(url: str) -> urllib.parse.SplitResult | None:
    """The URL's parts; None where it is none."""
    try:
        parts = urllib.parse.urlsplit(url)
        return parts if parts.port != 0 else None  # which raises for a port that is no number
    except ValueError:
        return None


def _key() -> str:
    """Raises ``InvalidInput`` for what cannot be a key, without its text."""
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise InvalidInput(f"{KEY}: expected a key, as jpets key create printed it")
    return key


def _received(response: http.client.HTTPResponse) -> bytes:
    length = int(response.headers.get("Content-Length") or 0)
    with progress_bars(enabled=length > LARGE) as bars:
        body = bars.wrap_file(cast(BinaryIO, response), length, description="download")
        content = b"".join(iter(lambda: body.read(BLOCK), b""))
    if len(content) < length:
        raise http.client.IncompleteRead(content, length - len(content))
    return content


def _kinds(base: type[JpetsError]) -> Iterator[type[JpetsError]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)
