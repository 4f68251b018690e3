"""The Open Inference Protocol's binary tensor data extension: answers with tensors as bytes behind the JSON."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from serving.http.responses import FastJSONResponse
from serving.protocols.oip.tensors import Array, datatype_of, raw_of
from serving.requests.bodies import HEADER_LENGTH, INFLATERS

FAST = 1
"""zlib's level: answers are numbers, of which higher levels save little more."""


def outputs_of(arrays: Mapping[str, Array], raw: Mapping[str, bool]) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Outputs as JSON has them, and the bytes behind it of those that are ``raw``."""
    outputs, behind = [], []
    for name, array in arrays.items():
        own = {"name": name, "shape": list(array.shape), "datatype": datatype_of(array)}
        if raw[name]:
            behind.append(raw_of(array))
            outputs.append({**own, "parameters": {"binary_data_size": len(behind[-1])}})
        else:
            flat = array.ravel()
            outputs.append({**own, "data": flat.tolist() if own["datatype"] == "BYTES" else flat})
    return outputs, behind


def response(content: Mapping[str, Any], behind: Sequence[bytes]) -> Response:
    """``content`` as JSON, and what stands behind it."""
    header = FastJSONResponse(content).body
    headers = {HEADER_LENGTH: str(len(header))}
    return Response(b"".join([header, *behind]), headers=headers, media_type="application/octet-stream")


def coding_of(accepted: str) -> str | None:
    """The coding that a client asks for: it names only that one. Those that list all that they could read ask for
    none."""
    coding = accepted.strip().lower()
    return coding if coding in INFLATERS else None


def packed(response: Response, coding: str) -> Response:
    """The same in that coding."""
    packer = zlib.compressobj(FAST, wbits=INFLATERS[coding])
    response.body = packer.compress(response.body) + packer.flush()
    response.headers["content-encoding"] = coding
    response.headers["content-length"] = str(len(response.body))
    return response
