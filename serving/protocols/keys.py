"""``/v1/keys`` and ``/v1/tenants``: who may ask for what, and how much."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from jpets.access import MOST_PRIORITY, Limits, Scope
from jpets.types import DEFAULT_TENANT
from serving.http.fields import Text
from serving.http.responses import FastJSONResponse
from serving.protocols.schemas import KeyItem, KeyList, NewKey, TenantItem, TenantList
from serving.requests.context import Context, Here
from serving.requests.routes import JSONRoute

router = APIRouter(tags=["tenants"])
KEYS, TENANTS = "/v1/keys", "/v1/tenants"
Name = Annotated[Text, Field(max_length=128)]
Number = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Changed = TypeVar("Changed")


class KeyRequest(BaseModel):
    """``days`` until it expires; never by default."""

    model_config = ConfigDict(extra="forbid")
    tenant: Name = DEFAULT_TENANT
    scopes: list[Scope] = ["infer"]
    default_task: Name | None = None
    days: Number | None = None
    note: Text = ""


class LimitsRequest(BaseModel):
    """Null: no limit."""

    model_config = ConfigDict(extra="forbid")
    requests_per_minute: Number | None = None
    tokens_per_minute: Number | None = None
    priority: Annotated[int, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY)] = 0


@router.get(KEYS, response_model=KeyList, summary="List the keys")
async def list_keys(here: Here, tenant: Annotated[str | None, Query(max_length=128)] = None) -> KeyList:
    """Those of all tenants, or of one; revoked ones too, and none with its secret."""
    known = await asyncio.to_thread(here.keyring.store.known)
    return KeyList(keys=[KeyItem.of(key) for key in known.keys if tenant in (None, key.tenant)])


async def create_key(here: Here, body: KeyRequest) -> Response:
    """The only answer that has the key itself. The server's first key closes it: from then on every request needs one,
    so make one of scope `admin` first."""
    asked = body.model_dump(exclude={"tenant", "scopes"})
    key, text = await _changed(here, lambda: here.keyring.store.create(body.tenant, body.scopes, **asked))
    return FastJSONResponse(NewKey.made(key, text).model_dump(), 201, {"Cache-Control": "no-store"})


@router.delete(KEYS + "/{id}", response_model=KeyItem, summary="Revoke a key")
async def revoke_key(here: Here, id: str) -> KeyItem:
    """No request of it is accepted from now on; other servers of the repository see that within a second."""
    return KeyItem.of(await _changed(here, lambda: here.keyring.store.revoke(id)))


@router.get(TENANTS, response_model=TenantList, summary="List the tenants")
async def list_tenants(here: Here) -> TenantList:
    """Those that have tasks, keys or limits."""

    def read() -> TenantList:
        known = here.keyring.store.known()
        return TenantList.of(known.keys, known.limits, here.services.repository.tenants())

    return await asyncio.to_thread(read)


async def limit_tenant(here: Here, name: str, body: LimitsRequest) -> Response:
    """Replaces all limits of a tenant. They are of each server: two servers accept twice as much."""
    limits = Limits(**body.model_dump())
    await _changed(here, lambda: here.keyring.store.limit(name, limits))
    return FastJSONResponse(TenantItem.of(name, limits).model_dump())


async def _changed(here: Context, change: Callable[[], Changed]) -> Changed:
    """Does it, and sees to it that the next request finds it done."""

    def both() -> Changed:
        changed = change()
        here.keyring.refresh()
        return changed

    return await here.turns.change_keys(both)


def _add(path: str, endpoint: Callable[..., Any], **how: Any) -> None:
    router.add_api_route(path, endpoint, route_class_override=JSONRoute, **how)


_add(KEYS, create_key, methods=["POST"], response_model=NewKey, status_code=201, summary="Make a key")
_add(TENANTS + "/{name}", limit_tenant, methods=["PUT"], response_model=TenantItem, summary="Limit a tenant")
