"""``/v1/domains``, and answers of tasks of several domains over HTTP."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from clients import Call, client_of, finished
from hierarchical import IN_DOMAIN, opened, write_tables
from listening import listening
from support import ENGINE_BUCKETS, ENGINE_SETTINGS, make_head, make_task, random_delta
from typer.testing import CliRunner

from checkpoints.access import Access
from checkpoints.catalog import Catalog
from checkpoints.native import PLOT
from checkpoints.repository import Repository
from checkpoints.task_file import read_task, task_to_bytes
from jpets.access import SCOPES
from jpets.app.hosting import outlines_of
from jpets.app.jobs.work import do
from jpets.cli import app
from jpets.engine.engine import Engine
from jpets.errors import Conflict
from jpets.plot.domains import DomainTables
from jpets.plot.tree import Branch, Tree, table_path
from jpets.types import Preprocessing
from serving.app import create_app
from serving.hosted.service import Service
from serving.hosted.services import Services
from serving.http.settings import ServingSettings
from serving.jobs.folder import JobFolder, JobFolders
from serving.jobs.request import MakeDomain
from serving.jobs.service import Jobs
from serving.tenants.keyring import Keyring

TEXTS = b"the library reads files and writes files\nsome words of the domain are read again\n" * 1250


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Call, Jobs]]:
    """With a domain that a task uses, and one that none does."""
    domains = (("games", IN_DOMAIN, 2), ("science", ("words of science",), 3))
    backbone = opened(write_tables(tmp_path / "own", domains=domains))

    def validator(data: bytes, id: str) -> object:
        return read_task(data, id=id, config=backbone.config, backbone=backbone.fingerprint)

    repository = Repository(tmp_path / "repository", validator=validator)  # type: ignore[arg-type]
    head = make_head(np.random.default_rng(3), backbone.config.hidden_size, 3)
    delta = random_delta("lora", backbone.config, 5)
    assert backbone.tables is not None
    for domain in ("games", None):
        rule = Preprocessing(truncation=True, domain=domain and backbone.tables.full_name(domain))
        repository.put(domain or "plain", task_to_bytes(make_task(backbone, "own", [delta], head, preprocessing=rule)))
    service = Service(repository, backbone, validator, growing=False)  # type: ignore[arg-type]
    cache = tmp_path / "cache"
    service.start(
        lambda coming: Engine(backbone, (), ENGINE_SETTINGS, coming=coming, cache_dir=cache, buckets=ENGINE_BUCKETS)
    )

    def command(job: JobFolder) -> list[str]:
        source = str(tmp_path / "own")
        return [sys.executable, "-m", "jpets.app.jobs.process", str(job.path), source, backbone.name]

    jobs = Jobs(tmp_path / "jobs", Services(service), command, outlines_of)
    yield client_of(service, ServingSettings(upload_folder=tmp_path), jobs), jobs
    jobs.runner.close()
    service.close()
    repository.close()


def test_domains_are_listed_counted_and_deleted(server: tuple[Call, Jobs]) -> None:
    call, _ = server
    asked = ({"model": model, "input": "some text"} for model in ("games", "plain"))
    one, other = (call("POST", "/v1/classify", json=each).json()["data"][0] for each in asked)
    assert one["probs"] != other["probs"], "the same deltas over other tables"
    items = {item["name"]: item for item in call("GET", "/v1/domains").json()["domains"]}
    assert set(items) == {None, "games", "science"}
    assert items["games"]["found"]["domain"] == 1 and items["games"]["tokens"] > 0 == items["science"]["tokens"]
    assert [items[name]["tasks"] for name in (None, "games", "science")] == [1, 1, 0]
    assert items[None]["full_name"] is None and items["games"]["full_name"].startswith("games@")
    metrics = call("GET", "/metrics").text
    assert 'jpets_looked_up_tokens_total{backbone="tiny-bert-tables",domain="games",level="domain"}' in metrics

    refused = call("DELETE", "/v1/domains/games")
    assert refused.status_code == 409 and "1 tasks use domain 'games'" in refused.json()["error"]["message"]
    assert call("DELETE", f"/v1/domains/{items['games']['full_name']}").status_code == 409, "by any of its names"
    assert call("DELETE", "/v1/domains/games@000000000000").status_code == 409
    assert call("DELETE", "/v1/domains/science@000000000000").status_code == 404
    assert call("DELETE", "/v1/domains/science").status_code == 204
    assert call("DELETE", "/v1/domains/science").status_code == 404
    assert call("DELETE", "/v1/domains/games", params={"backbone": "other"}).status_code == 404
    assert {item["name"] for item in call("GET", "/v1/domains").json()["domains"]} == {None, "games"}


def test_commands_list_and_delete_domains_of_a_server(server: tuple[Call, Jobs]) -> None:
    call, jobs = server
    run = partial(CliRunner().invoke, app)
    with listening(create_app(jobs._services, ServingSettings(), jobs)) as url:
        listed = json.loads(run(["plot", "list", "--server", url, "--json"]).stdout)
        assert {each["name"]: each["tasks"] for each in listed} == {None: 1, "games": 1, "science": 0}
        assert "science" in run(["plot", "list", "--server", url]).stdout
        result = run(["plot", "list", "--json"], env={"JPETS_SERVER": url})
        assert json.loads(result.stdout) == listed
        result = run(["plot", "delete", "tiny-bert-tables", "games"], env={"JPETS_SERVER": url})
        assert result.exit_code == 1 and "1 tasks use domain 'games'" in result.stderr
        assert run(["plot", "delete", "tiny-bert-tables", "science", "--server", url]).exit_code == 0
    assert {item["name"] for item in call("GET", "/v1/domains").json()["domains"]} == {None, "games"}
    assert run(["plot", "list"]).exit_code == 2


def test_a_key_that_is_not_for_the_whole_server_sees_no_figures_of_others(
    server: tuple[Call, Jobs], tmp_path: Path
) -> None:
    _, jobs = server
    with contextlib.closing(Catalog(tmp_path / "keys.sqlite")) as catalog:
        access = Access(catalog)
        keys = {scope: access.create("acme", [scope])[1] for scope in SCOPES}
        call = client_of(jobs._services, ServingSettings(), jobs, Keyring(access))
    for scope, key in keys.items():
        found = call("GET", "/v1/domains", headers={"Authorization": f"Bearer {key}"}).json()["domains"]
        assert [item["name"] for item in found] == [None, "games", "science"]
        assert all(item["full_name"] and item["entries"] for item in found[1:])
        assert {item["tasks"] is None for item in found} == {scope != "admin"}


def test_a_domain_is_made_while_its_backbone_serves(server: tuple[Call, Jobs]) -> None:
    call, jobs = server
    quick = {"dtype": "float32", "max_length": 16, "batch": 8, "sample": 128}
    refused = call("POST", "/v1/domains", params={"domain": "games"}, content=TEXTS)
    assert refused.status_code == 409 and "1 tasks use domain 'games'" in refused.text
    few = call("POST", "/v1/domains", params={"domain": "few", **quick}, content=TEXTS[:100]).json()
    made = call("POST", "/v1/domains", params={"domain": "files", **quick}, content=TEXTS).json()
    more = TEXTS + b"words that no other text of the domain had before\n"
    again = call("POST", "/v1/domains", params={"domain": "games", "epochs": 0, "share": 1}, content=more).json()
    assert (made["kind"], made["domain"], made["task"]) == ("make-domain", "files", None)
    before = {item["name"]: item for item in call("GET", "/v1/domains").json()["domains"]}
    jobs.runner.start()
    item = finished(call, few["id"])
    assert item["state"] == "failed" and "at least 20,000 tokens" in item["problem"]
    item = finished(call, made["id"])
    assert item["state"] == "succeeded" and item["progress"]["step"] > 10, item["problem"]
    assert sorted(item["scores"]) == ["entries", "first_loss", "last_loss"]
    assert finished(call, again["id"])["state"] == "succeeded"
    after = {item["name"]: item for item in call("GET", "/v1/domains").json()["domains"]}
    assert after["files"]["entries"] == item["scores"]["entries"] > 0
    assert after["games"]["full_name"] == before["games"]["full_name"], "tasks that learnt from it are right still"
    assert after["games"]["entries"] != before["games"]["entries"]
    text = "the library reads files and writes files"
    assert call("POST", "/v1/classify", json={"model": "games", "input": text}).status_code == 200
    items = {item["name"]: item for item in call("GET", "/v1/domains").json()["domains"]}
    assert items["games"]["found"]["domain"] == 1


def test_a_table_for_layers_that_a_domain_had_does_not_bring_them_back(
    server: tuple[Call, Jobs], tmp_path: Path
) -> None:
    call, jobs = server
    tables = jobs._services.first.backbone.tables
    assert isinstance(tables, DomainTables)
    asked = call("POST", "/v1/domains", params={"domain": "science", "epochs": 0}, content=TEXTS).json()
    job = jobs.folders.get(asked["id"])
    job.write_result(do(job, [str(tmp_path / "own"), jobs._services.first.backbone.name], lambda step: None))
    other = tables.tree.domains["games"]
    tables.add("science", dataclasses.asdict(other))
    with pytest.raises(Conflict, match="domain 'science' has other n-gram layers by now"):
        jobs._publish(job)
    assert tables.tree.domains["science"].layers == other.layers


def test_a_job_that_trains_in_a_domain_counts_as_one_that_uses_it(server: tuple[Call, Jobs]) -> None:
    call, jobs = server
    data = b"text,label\n" + b"a,x\nb,y\n" * 8
    asked = {"task": "new", "method": "frozen", "domain": "science"}
    unknown = call("POST", "/v1/jobs", params=asked | {"domain": "cooking"}, content=data)
    assert unknown.status_code == 422 and "domain: there is no domain 'cooking'" in unknown.text
    job = call("POST", "/v1/jobs", params=asked, content=data).json()["id"]
    for refused in (
        call("DELETE", "/v1/domains/science"),
        call("POST", "/v1/domains", params={"domain": "science"}, content=TEXTS),
    ):
        assert refused.status_code == 409 and f"job {job} trains a task of domain 'science'" in refused.text
    kept = call("POST", "/v1/domains", params={"domain": "science", "epochs": 0}, content=TEXTS)
    assert kept.status_code == 202
    for id in (job, kept.json()["id"]):
        call("DELETE", f"/v1/jobs/{id}")
    jobs.runner.start()
    assert finished(call, job)["state"] == "cancelled"
    assert call("DELETE", "/v1/domains/science").status_code == 204


def test_a_task_does_not_learn_from_layers_that_a_job_is_to_change(server: tuple[Call, Jobs]) -> None:
    call, _ = server
    made = call("POST", "/v1/domains", params={"domain": "science"}, content=TEXTS).json()["id"]
    asked = {"task": "new", "method": "frozen", "domain": "science"}
    refused = call("POST", "/v1/jobs", params=asked, content=b"text,label\na,x\nb,y\n")
    assert refused.status_code == 409 and f"job {made} makes domain 'science' anew" in refused.text
    call("DELETE", f"/v1/jobs/{made}")
    assert call("POST", "/v1/jobs", params=asked, content=b"text,label\na,x\nb,y\n").status_code == 202


def test_the_backbone_that_a_root_was_made_of_is_one_of_the_server(server: tuple[Call, Jobs]) -> None:
    call, jobs = server
    unknown = call("POST", "/v1/domains", params={"domain": "files", "whole": "nobody"}, content=TEXTS)
    assert (
        unknown.status_code == 422
        and "whole: expected a backbone that GET /v1/backbones lists, found 'nobody'" in unknown.text
    )
    own = jobs._services.first.backbone.name
    job = call("POST", "/v1/domains", params={"domain": "files", "whole": own}, content=TEXTS).json()["id"]
    assert call("GET", f"/v1/jobs/{job}").json()["state"] == "queued"
    assert jobs.folders.get(job).request.model_dump()["whole"] == own


def test_a_job_that_goes_on_from_a_task_keeps_the_domain_of_that(server: tuple[Call, Jobs]) -> None:
    call, _ = server
    data = b"text,label\n" + b"a,x\nb,y\n" * 8
    job = call("POST", "/v1/jobs", params={"task": "new", "start": "games"}, content=data).json()["id"]
    assert call("DELETE", "/v1/tasks/games").status_code == 204
    refused = call("DELETE", "/v1/domains/games")
    assert refused.status_code == 409 and f"job {job} trains a task of domain 'games'" in refused.text


@pytest.mark.parametrize(
    ("path", "asked"), [("extract", {"task": "new", "method": "lora"}), ("further-pretrain", {"name": "new"})]
)
def test_what_needs_all_layers_is_refused_at_once(server: tuple[Call, Jobs], path: str, asked: dict[str, str]) -> None:
    call, _ = server
    refused = call("POST", f"/v1/jobs/{path}", params=asked, content=b"x")
    assert refused.status_code == 422 and "expected one that computes all layers" in refused.text


def test_a_job_over_tables_computes_where_they_are(server: tuple[Call, Jobs], tmp_path: Path) -> None:
    _, jobs = server
    services, command = jobs._services, jobs.runner._command
    elsewhere = Jobs(tmp_path / "others", services, command, outlines_of, platform="cuda")
    request = elsewhere.accept(MakeDomain(domain="files"))
    with elsewhere.folders.draft(request) as draft:
        assert elsewhere.runner._platform(draft) == "cpu"


def test_a_job_waits_until_its_backbone_has_started(
    server: tuple[Call, Jobs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart: nothing says yet that it has tables, which no other platform has room for."""
    _, jobs = server
    services = jobs._services
    elsewhere = Jobs(tmp_path / "others", services, jobs.runner._command, outlines_of, platform="cuda")
    request = elsewhere.accept(MakeDomain(domain="files"))
    with elsewhere.folders.draft(request) as draft:
        assert elsewhere.runner._runnable(draft)
        monkeypatch.setattr(elsewhere, "_service", lambda name: None)
        assert elsewhere.runner._platform(draft) == "cpu"
        hosted = SimpleNamespace(name=request.backbone, state="starting")
        monkeypatch.setattr(services.backbones, "list", lambda: [hosted])
        assert not elsewhere.runner._runnable(draft)
        hosted.state = "ready"
        assert elsewhere.runner._runnable(draft)


def test_what_a_job_made_stays_until_it_has_finished(tmp_path: Path) -> None:
    """Its backbone may not be loaded for days, while others change the tree."""
    folder, folders = write_tables(tmp_path / "own"), JobFolders(tmp_path / "jobs")
    with folders.draft(MakeDomain(backbone="own", domain="files", epochs=0)) as draft:
        draft.data.write_bytes(TEXTS)
        job = folders.commit(draft)
    branch = do(job, [str(folder), "own"], lambda step: None).branch
    assert branch is not None
    table = table_path(folder / PLOT, Branch(**branch))
    os.utime(table, (0, 0))
    Tree.change(folder / PLOT, lambda tree: tree)
    assert table.exists()
    job.finish("cancelled")
    Tree.change(folder / PLOT, lambda tree: tree)
    assert not table.exists()


def test_only_a_backbone_with_tables_has_domains(service: Service, settings: ServingSettings, tmp_path: Path) -> None:
    jobs = Jobs(tmp_path / "jobs", Services(service), lambda job: [], outlines_of)
    refused = client_of(service, settings, jobs)("POST", "/v1/domains", params={"domain": "files"}, content=b"x")
    assert refused.status_code == 422 and "backbone: expected one with tables" in refused.text
