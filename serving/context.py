"""What every endpoint needs, as one FastAPI dependency."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from typing import Annotated

from fastapi import Depends, Request

from serving.metrics import Metrics
from serving.service import Service
from serving.settings import ServingSettings


@dataclasses.dataclass(frozen=True)
class Context:
    service: Service
    settings: ServingSettings
    metrics: Metrics


async def find_context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


Here = Annotated[Context, Depends(find_context)]


@functools.cache
def server_version() -> str:
    try:
        return importlib.metadata.version("jpets")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "0+checkout"
