"""A server with keys: what is open, what a key may do, and how keys are made and revoked."""

from __future__ import annotations

import base64
import datetime
from typing import Any

import pytest
from clients import Call
from fastapi import FastAPI
from signed import Signed, operations

from checkpoints.access import Access
from jpets.access import Limits
from serving.requests.context import Context
from serving.tenants.gate import is_open
from serving.tenants.keyring import Keyring
from serving.tenants.scopes import METHODS, NEEDED, scope_of

BODY = {"model": "topic", "input": "hello"}
ADMIN = {
    ("POST", "/v1/domains"),
    ("DELETE", "/v1/domains/{name}"),
    ("PUT", "/v1/backbones/{name}"),
    ("DELETE", "/v1/backbones/{name}"),
    ("POST", "/v1/jobs/further-pretrain"),
    ("GET", "/v1/students"),
    ("GET", "/v1/keys"),
    ("POST", "/v1/keys"),
    ("DELETE", "/v1/keys/{id}"),
    ("GET", "/v1/tenants"),
    ("PUT", "/v1/tenants/{name}"),
}


def test_every_route_has_a_scope(app: FastAPI) -> None:
    found = operations(app)
    assert NEEDED.keys() <= found, "no route that is not there"
    assert found - NEEDED.keys() == ADMIN, "a new route needs a line in serving.tenants.scopes, or admin"
    assert {scope_of(*each) for each in ADMIN} == {"admin"}


def test_figures_may_be_read_by_a_key_that_may_nothing_else(signed: Signed) -> None:
    reader, admin, other = signed("acme", "metrics"), signed("acme", "admin"), signed("acme")
    assert [call("GET", "/metrics").status_code for call in (reader, admin, other)] == [200, 200, 403]
    for method, path in (("GET", "/v1/keys"), ("POST", "/v1/classify"), ("DELETE", "/v1/tasks/topic")):
        assert reader(method, path, json=BODY).status_code == 403


def test_without_keys_everything_is_open(bare: Call, keyring: Keyring) -> None:
    assert not keyring.required
    assert bare("POST", "/v1/classify", json=BODY).status_code == 200
    assert bare("GET", "/v1/keys").json() == {"keys": []}


def test_with_keys_every_route_but_health_needs_one(app: FastAPI, bare: Call, signed: Signed) -> None:
    signed()
    for method, path in sorted(operations(app)):
        answer = bare(method, path.replace("{id:path}", "{id}"))
        if is_open(path):
            assert answer.status_code == 200
            continue
        assert answer.status_code == 401, (method, path)
        assert answer.headers["www-authenticate"].split()[0] in ("Bearer", "Basic")
        if not path.startswith("/v2"):
            assert answer.json()["error"]["code"] == "unauthorized"
    for path in ("/docs", "/openapi.json", "/v2/health/live", "/v2/health/ready"):
        assert bare("GET", path).status_code == 200
    assert bare("GET", "/no-such-path").status_code == 401
    assert bare("OPTIONS", "/v1/tasks").status_code == 401


def test_a_body_is_not_read_without_a_key(bare: Call, signed: Signed) -> None:
    signed()

    async def body() -> Any:
        pytest.fail("the body was read")
        yield b""

    assert bare("POST", "/v1/classify", content=body()).status_code == 401


@pytest.mark.parametrize("scope", ["infer", "manage", "metrics", "admin", None])
def test_each_scope_opens_its_routes_and_no_others(app: FastAPI, signed: Signed, scope: Any) -> None:
    call = signed("acme", *([scope] if scope else ["infer", "manage", "admin"]))
    for method, path in sorted(operations(app)):
        needed = scope_of(method, path)
        answer = call(method, path.replace("{id:path}", "{id}").replace("{", "no-").replace("}", ""))
        refused = answer.status_code == 403
        opens = needed in (None, scope) or scope is None or (needed, scope) == ("metrics", "admin")
        assert refused == (not opens), (method, path, answer.text)
        assert answer.status_code != 401


def test_keys_come_in_every_usual_header(bare: Call, access: Access, keyring: Keyring) -> None:
    _, key = access.create("acme", ("infer",))
    keyring.refresh()
    basic = base64.b64encode(f"me:{key}".encode()).decode()
    right = [{"Authorization": f"Bearer {key}"}, {"authorization": f"bearer  {key}"}, {"X-API-Key": key}]
    wrong = [{}, {"Authorization": key}, {"Authorization": "Bearer"}, {"Authorization": "Basic !!"},
             {"X-API-Key": key[:-1]}, {"X-API-Key": key + "x"}, {"X-API-Key": ""}, {"X-API-Key": "jpets__"},
             {"Authorization": f"Bearer {key.replace('jpets_', 'jpets_0')}"}]  # fmt: skip
    assert [bare("GET", "/v1/tasks", headers=headers).status_code for headers in right] == [200] * len(right)
    assert [bare("GET", "/v1/tasks", headers=headers).status_code for headers in wrong] == [401] * len(wrong)
    page = bare("GET", "/", headers={})
    assert page.status_code == 401 and page.headers["www-authenticate"].startswith("Basic")
    as_password = {"Authorization": f"Basic {basic}"}
    assert "topic" in bare("GET", "/", headers=as_password).text
    for method, path in (("GET", "/v1/tasks"), ("POST", "/v1/classify"), ("POST", "/")):
        assert bare(method, path, headers=as_password).status_code == 401, "browsers send it to other routes too"
    for value in ("!!", "\xff", base64.b64encode(b"\xff").decode(), ""):
        assert bare("GET", "/", headers={"Authorization": f"Basic {value}".encode("latin-1")}).status_code == 401


def test_keys_are_made_listed_and_revoked(bare: Call, signed: Signed, access: Access) -> None:
    admin = signed("default", "admin", "infer")
    made = admin("POST", "/v1/keys", json={"tenant": "acme", "scopes": ["manage", "infer"], "note": "for tests"})
    assert made.status_code == 201 and made.headers["cache-control"] == "no-store"
    new = made.json()
    headers = {"X-API-Key": new["key"]}
    assert (new["tenant"], new["scopes"], new["expires"]) == ("acme", ["infer", "manage"], None)
    assert bare("POST", "/v1/classify", json=BODY, headers=headers).status_code == 200, "at once"
    listed = admin("GET", "/v1/keys?tenant=acme").json()["keys"]
    assert [(each["id"], each["note"]) for each in listed] == [(new["id"], "for tests")]
    for text in (admin("GET", "/v1/keys").text, str(access.known())):
        assert new["key"] not in text and new["key"].rpartition("_")[2] not in text
    assert admin("DELETE", f"/v1/keys/{new['id']}").json()["revoked"] is not None
    assert bare("POST", "/v1/classify", json=BODY, headers=headers).status_code == 401, "at once"
    assert admin("DELETE", "/v1/keys/nothing").status_code == 404


def test_a_server_never_opens_again(bare: Call, signed: Signed, access: Access, keyring: Keyring) -> None:
    signed()
    (key,) = access.known().keys
    access.revoke(key.id)
    keyring.refresh()
    assert bare("GET", "/v1/tasks").status_code == 401 and keyring.required


def test_a_key_expires(bare: Call, access: Access, keyring: Keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    key, text = access.create("acme", ("infer",), days=2)
    keyring.refresh()
    assert bare("GET", "/v1/tasks", headers={"X-API-Key": text}).status_code == 200
    end = datetime.datetime.fromisoformat(str(key.expires)).timestamp()
    monkeypatch.setattr("serving.tenants.keyring.time.time", lambda: end)
    assert bare("GET", "/v1/tasks", headers={"X-API-Key": text}).status_code == 401


@pytest.mark.parametrize(
    "body",
    [
        {"scopes": []},
        {"scopes": ["all"]},
        {"tenant": "Not/An/Id"},
        {"tenant": ""},
        {"default_task": "../x"},
        {"days": 0},
        {"days": 1e9},
        {"note": "x" * 201},
        {"more": 1},
    ],
)
def test_keys_that_are_no_keys(signed: Signed, access: Access, body: dict[str, Any]) -> None:
    admin = signed("default", "admin")
    assert admin("POST", "/v1/keys", json=body).status_code == 422
    assert len(access.known().keys) == 1


def test_the_default_task_of_a_key(signed: Signed) -> None:
    routed = signed("acme", "infer", default_task="topic")
    answer = routed("POST", "/classify", json={"inputs": "hello"})
    assert len(answer.json()) == 3 and abs(sum(each["score"] for each in answer.json()) - 1) < 0.02
    refused = signed("acme", "infer")("POST", "/classify", json={"inputs": "hello"})
    assert refused.status_code == 422 and "a key with a default task" in refused.text


def test_pages_show_what_the_key_may_see(signed: Signed, theirs: str) -> None:
    assert theirs not in signed("acme")("GET", "/").text
    assert theirs in signed("globex")("GET", "/").text
    assert "queries answered" not in signed("acme")("GET", "/").text
    assert "queries answered" in signed("acme", "admin")("GET", "/").text
    assert signed("acme")("GET", "/v1/backbones").json()["backbones"][0]["tasks"] is None


def test_limits_of_requests_and_tokens(signed: Signed, bare: Call) -> None:
    admin, acme, other = signed("default", "admin"), signed("acme"), signed("globex")
    limited = admin("PUT", "/v1/tenants/acme", json={"requests_per_minute": 60, "priority": 3})
    assert limited.json() == {
        "name": "acme", "requests_per_minute": 60, "tokens_per_minute": None, "priority": 3, "keys": None
    }  # fmt: skip
    statuses = [acme("POST", "/v1/classify", json=BODY).status_code for _ in range(4)]
    assert statuses == [200, 200, 429, 429], "two seconds' worth"
    refused = acme("POST", "/v1/classify", json=BODY)
    assert refused.json()["error"]["code"] == "over_quota" and int(refused.headers["retry-after"]) == 1
    assert other("POST", "/v1/classify", json=BODY).status_code == 200
    admin("PUT", "/v1/tenants/acme", json={"tokens_per_minute": 60})
    long = {"model": "topic", "input": ["hello world " * 8] * 2}
    assert acme("POST", "/v1/classify", json=long).status_code == 200, "more than the bucket holds, from a full one"
    refused = acme("POST", "/v1/classify", json=BODY)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 5, "its tokens were counted"
    assert acme("GET", "/v1/tasks").status_code == 200
    admin("PUT", "/v1/tenants/acme", json={})
    assert acme("POST", "/v1/classify", json=BODY).status_code == 200
    names = {each["name"]: each["keys"] for each in admin("GET", "/v1/tenants").json()["tenants"]}
    assert names["acme"] == 1 and names["globex"] == 1


def test_priority_and_tenant_of_a_key(app: FastAPI, signed: Signed, access: Access, keyring: Keyring) -> None:
    access.limit("acme", Limits(priority=5))
    _, key = access.create("acme", ("infer",))
    keyring.refresh()
    asker = keyring.asker(key)
    context: Context = app.state.context
    assert (asker.tenant, asker.priority) == ("acme", 5)
    assert context.asked_by(asker, 0.0).own("topic") == ("acme", "topic")


def test_the_methods_of_grpc_have_scopes() -> None:
    from serving.grpc.messages import METHODS as ALL

    assert METHODS.keys() == ALL.keys()


def test_a_file_needs_its_scope_at_every_path(signed: Signed) -> None:
    raw = {"Accept": "application/octet-stream"}
    reader, owner = signed("acme", "infer"), signed("acme", "manage")
    for path, headers in (("/v1/tasks/topic/file", {}), ("/v1/tasks/topic", raw), ("/v1/tasks/topic?version=1", raw)):
        assert reader("GET", path, headers=headers).status_code == 403
        assert owner("GET", path, headers=headers).headers["content-type"] == "application/octet-stream"


def test_a_body_that_is_too_large_tells_nothing_without_a_key(bare: Call, signed: Signed) -> None:
    signed()
    assert bare("POST", "/v1/classify", content=b" " * (1 << 21)).status_code == 401


def test_what_a_revoked_key_was_uploading_is_not_stored(
    signed: Signed, access: Access, keyring: Keyring, upload: Any
) -> None:
    call = signed("acme", "manage")
    (key,) = access.known().keys
    content = upload("late")

    async def slow() -> Any:
        yield content[:100]
        access.revoke(key.id)
        keyring.refresh()
        yield content[100:]

    assert call("PUT", "/v1/tasks/late", content=slow()).status_code == 401
    assert signed("acme")("GET", "/v1/tasks/late").status_code == 404


def test_a_catalogue_that_lost_its_keys_opens_nothing(
    bare: Call, signed: Signed, access: Access, keyring: Keyring
) -> None:
    signed()
    with access._catalog.write() as connection:
        connection.exec_driver_sql("DELETE FROM keys")
        connection.exec_driver_sql("UPDATE access SET number = number + 1")
    keyring.refresh()
    assert bare("GET", "/v1/keys").status_code == 401
