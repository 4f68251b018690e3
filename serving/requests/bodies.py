"""JSON bodies: from a request's headers and bytes to a checked model, within limits; errors name what is wrong."""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from collections.abc import Collection
from email.message import Message
from typing import Any, NoReturn

from fastapi import Request
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect

from jpets.errors import InvalidInput, TooLarge, Unparseable, UnsupportedMedia
from serving.http.aside import SHORT
from serving.http.body_bounds import Bounds, check_bounds
from serving.http.body_budget import BODY
from serving.http.errors import worded
from serving.requests.context import Context

JSON = "application/json"
HEADER_LENGTH = "Inference-Header-Content-Length"
"""Of the binary tensor data extension: bytes of the JSON, behind which tensors stand."""
ALSO_JSON = re.compile(r"(?:application|text)/(?:x-)?json|[a-z0-9.-]+/[a-z0-9.-]+\+json")
LONGEST_TYPE = 256
"""Characters of a Content-Type."""
CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii")
INFLATERS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""zlib's window bits for each encoding."""
PLAIN = re.compile(r"[\w.+/-]{1,64}", re.ASCII)
PER_CHARACTER = 16
"""Bytes of JSON that take as long to read and check as a character takes to tokenise."""
BOM = b"\xef\xbb\xbf"


async def read_body(
    request: Request, here: Context, adapter: TypeAdapter[Any], default: Any, *, bytes_behind: bool = False
) -> tuple[Any, bytes]:
    """The body as ``adapter``'s type; ``default`` for an empty one, or ``...`` where it has to be there. Also the bytes
    behind the JSON, which only a route with ``bytes_behind`` takes.

    Raises ``InvalidInput``, ``Unparseable``, ``TooLarge``, ``UnsupportedMedia``, and ``NoRoom`` for what was packed.
    """
    headers = request.headers
    length = headers.get(HEADER_LENGTH)
    if length is not None and not bytes_behind:
        raise InvalidInput(f"{HEADER_LENGTH}: nothing may stand behind the JSON here; only POST /v2/.../infer takes it")
    encoding = _encoding(headers.get("content-encoding", ""))
    if length is None:
        _check_type(headers.get("content-type", JSON))
    try:
        body = await request.body()
    except ClientDisconnect as error:
        raise Unparseable("the client left before its body had come") from error
    if not body:
        if default is ...:
            raise Unparseable("the body is empty; send JSON")
        return default, b""
    limit, bounds = here.settings.max_body_bytes, Bounds.of(here.settings.max_inputs)

    def read() -> tuple[Any, bytes, int]:
        content = body if encoding is None else _inflated(body, encoding, limit)
        ends = len(content) if length is None else _header_length(length, len(content))
        document = content[:ends]
        check_bounds(document, bounds)
        return _parsed(document.removeprefix(BOM), adapter), content[ends:], len(content)

    effort = SHORT + 1 if encoding else len(body) // PER_CHARACTER
    found, behind, size = await here.aside.do(effort, read)
    if encoding:
        request.scope[BODY].unpacked(size)
    return found, behind


def _encoding(given: str) -> str | None:
    names = [name for each in given.lower().split(",") if (name := each.strip()) not in ("", "identity")]
    if len(names) > 1 or (names and names[0] not in INFLATERS):
        raise UnsupportedMedia(f"expected Content-Encoding: gzip, deflate or none, found {_shown(given)}")
    return names[0] if names else None


def _check_type(given: str) -> None:
    if given in (JSON, ""):
        return
    try:
        kind, charset = _type_and_charset(given)
    except (TypeError, ValueError, LookupError):  # of parameters that make no sense
        kind, charset = "", None
    if ALSO_JSON.fullmatch(kind) is None:
        raise UnsupportedMedia(
            f"expected Content-Type: {JSON}, found {_shown(given)}; send JSON and say so in that header"
        )
    if charset is not None and charset not in CHARSETS:
        raise UnsupportedMedia(f"expected Content-Type: {JSON} in UTF-8, found charset {_shown(charset)}")


def _type_and_charset(given: str) -> tuple[str, str | None]:
    """Raises ``ValueError``, also for a type so long that reading it takes long."""
    if len(given) > LONGEST_TYPE:
        raise ValueError
    message = Message()
    message["content-type"] = given
    return message.get_content_type(), message.get_content_charset()


def _header_length(given: str, most: int) -> int:
    if not (given.isascii() and given.isdecimal() and len(given) < 12 and int(given) <= most):
        raise Unparseable(f"{HEADER_LENGTH}: expected a number of bytes up to the body's {most}, found {_shown(given)}")
    return int(given)


def _shown(given: str) -> str:
    found = PLAIN.match(given.strip())
    return found[0] if found else "something else"


def _inflated(body: bytes, encoding: str, limit: int) -> bytes:
    """The unpacked body, of which never more than ``limit`` bytes are made."""
    inflater = zlib.decompressobj(INFLATERS[encoding])
    try:
        content = inflater.decompress(body, limit + 1)
    except zlib.error as error:
        raise Unparseable(f"the body is not valid {encoding}, which its Content-Encoding says it is") from error
    if len(content) > limit:
        raise TooLarge(f"the body has more than {limit} bytes once it is unpacked; send fewer inputs in one request")
    if not inflater.eof or inflater.unused_data:
        ends = "goes on behind its end" if inflater.eof else "ends early"
        raise Unparseable(f"the body is not valid {encoding}: it {ends}")
    return content


def _parsed(body: bytes, adapter: TypeAdapter[Any]) -> Any:
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        problem = error
    if (less := _without_nulls(body, problem, ("extra_forbidden",))) is not None:
        return _parsed(less, adapter)
    if (less := _without_nulls(body, problem)) is not None:
        with contextlib.suppress(ValidationError):  # of an option that must be there
            return adapter.validate_json(less)
    if problem.error_count() == 1 and (found := problem.errors(include_url=False)[0])["type"] == "json_invalid":
        document = _lenient(body, found["ctx"]["error"])
        try:
            return adapter.validate_python(document)
        except ValidationError as error:
            problem = error
    raise InvalidInput(worded(problem.errors(include_url=False, include_context=False, include_input=False)))


def _without_nulls(body: bytes, problem: ValidationError, kinds: Collection[str] = ()) -> bytes | None:
    """The body without the options at its top that are null and a problem, of these kinds or of any: some clients send
    them for what their caller left out, also options that there are not. None if it has none."""
    errors = problem.errors(include_url=False, include_context=False)
    names = {str(e["loc"][-1]) for e in errors if e["input"] is None and (not kinds or e["type"] in kinds)}
    document = json.loads(body) if names else None
    if not isinstance(document, dict):
        return None
    left = {name: value for name, value in document.items() if name not in names or value is not None}
    return json.dumps(left).encode() if len(left) < len(document) else None


def _lenient(body: bytes, problem: str) -> Any:
    """JSON that spells half a surrogate pair: only the field where it stands is wrong, not the whole body."""
    try:
        return json.loads(body.decode(), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise Unparseable("the body is not valid JSON: it is not in UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise Unparseable(f"the body is not valid JSON: {problem}") from error


def _no_number(constant: str) -> NoReturn:
    raise ValueError(constant)
