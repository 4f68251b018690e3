"""``/v1/domains``, and answers of tasks of several domains over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from clients import Call, client_of
from hierarchical import IN_DOMAIN, opened, write_tables
from support import ENGINE_BUCKETS, ENGINE_SETTINGS, make_head, make_task, random_delta

from checkpoints.repository import Repository
from checkpoints.task_file import read_task, task_to_bytes
from jpets.engine.engine import Engine
from jpets.types import Preprocessing
from serving.hosted.service import Service
from serving.http.settings import ServingSettings


@pytest.fixture
def call(tmp_path: Path) -> Iterator[Call]:
    """A server with a domain that a task uses, and one that none does."""
    domains = (("games", IN_DOMAIN, 2), ("science", ("words of science",), 3))
    backbone = opened(write_tables(tmp_path / "own", domains=domains))

    def validator(data: bytes, id: str) -> object:
        return read_task(data, id=id, config=backbone.config, backbone=backbone.fingerprint)

    repository = Repository(tmp_path / "repository", validator=validator)  # type: ignore[arg-type]
    head = make_head(np.random.default_rng(3), backbone.config.hidden_size, 3)
    delta = random_delta("lora", backbone.config, 5)
    for domain in ("games", None):
        rule = Preprocessing(truncation=True, domain=domain)
        repository.put(domain or "plain", task_to_bytes(make_task(backbone, "own", [delta], head, preprocessing=rule)))
    service = Service(repository, backbone, validator, growing=False)  # type: ignore[arg-type]
    cache = tmp_path / "cache"
    service.start(
        lambda coming: Engine(backbone, (), ENGINE_SETTINGS, coming=coming, cache_dir=cache, buckets=ENGINE_BUCKETS)
    )
    yield client_of(service, ServingSettings(upload_folder=tmp_path))
    service.close()
    repository.close()


def test_domains_are_listed_counted_and_deleted(call: Call) -> None:
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
    assert call("DELETE", "/v1/domains/science").status_code == 204
    assert call("DELETE", "/v1/domains/science").status_code == 404
    assert call("DELETE", "/v1/domains/games", params={"backbone": "other"}).status_code == 404
    assert {item["name"] for item in call("GET", "/v1/domains").json()["domains"]} == {None, "games"}
