"""Jobs are their tenants': lists, looks, cancellations, and the places for those that wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clients import client_of

from checkpoints.access import Access
from jpets.app.hosting import outlines_of
from jpets.errors import Saturated
from serving.hosted.service import Service
from serving.hosted.services import Services
from serving.http.settings import ServingSettings
from serving.jobs.request import FineTune
from serving.jobs.service import Jobs
from serving.tenants.keyring import Keyring

ASKED: dict[str, Any] = {"params": {"task": "new", "settings": '{"rank": 4}'}, "content": b"x"}


@pytest.fixture
def jobs(service: Service, tmp_path: Path) -> Iterator[Jobs]:
    """Jobs that only wait."""
    made = Jobs(tmp_path / "jobs", Services(service), lambda job: [], outlines_of)
    yield made
    made.runner.close()


def test_jobs_are_their_tenants(
    service: Service, settings: ServingSettings, jobs: Jobs, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {name: access.create(name, ("manage",))[1] for name in ("acme", "globex")}
    keys["operator"] = access.create("default", ("manage", "admin"))[1]
    bare = client_of(service, settings, jobs, Keyring(access))

    def call(who: str, method: str, path: str, **request: Any) -> Any:
        return bare(method, path, headers={"X-API-Key": keys[who]}, **request)

    id = call("acme", "POST", "/v1/jobs", **ASKED).json()["id"]
    listed = {who: call(who, "GET", "/v1/jobs").json()["jobs"] for who in keys}
    assert [(item["id"], item["tenant"]) for item in listed["acme"]] == [(id, "acme")]
    assert listed["globex"] == [] and listed["operator"] == listed["acme"], "admin sees all"
    for method, path in (("GET", ""), ("GET", "/log"), ("DELETE", "")):
        foreign = call("globex", method, f"/v1/jobs/{id}{path}")
        unknown = call("globex", method, f"/v1/jobs/{id[:-1]}x{path}")
        assert foreign.status_code == unknown.status_code == 404
    monkeypatch.setattr("serving.jobs.service.MOST_OF_ONE", 1)
    assert call("acme", "POST", "/v1/jobs", **ASKED).status_code == 503
    assert call("globex", "POST", "/v1/jobs", **ASKED).status_code == 202
    with pytest.raises(Saturated), jobs.folders.draft(jobs.folders.get(id).request, "acme") as draft:
        jobs.commit(draft)  # accepted while there was a place, and its data took longer
    assert call("operator", "DELETE", f"/v1/jobs/{id}").status_code == 202


def test_jobs_whose_data_are_on_their_way_count_too(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may write as much as a job's data may have before it is committed."""
    monkeypatch.setattr("serving.jobs.service.MOST_OF_ONE", 1)
    request = jobs.accept(FineTune(task="new", settings={"rank": 4}), "acme")
    with jobs.draft(request, "acme") as draft:
        with pytest.raises(Saturated, match="jobs of yours wait"), jobs.draft(request, "acme"):
            pass
        with jobs.draft(request, "globex"):
            pass
        draft.data.write_text("text,label\na,b\n")
        job = jobs.commit(draft)
    with pytest.raises(Saturated), jobs.draft(request, "acme"):
        pass
    jobs.folders.remove(job)
    with jobs.draft(request, "acme"):
        pass
