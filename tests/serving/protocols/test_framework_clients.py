"""LangChain's and LlamaIndex's own clients: their recorded requests, and where they are installed the clients."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from clients import client_of
from fixtures.framework_clients import (
    CLIENTS,
    COHERES,
    EMBEDDERS,
    EMBEDS,
    FIXTURES,
    KEY,
    QUERY,
    RANKERS,
    RANKS,
    TEXTS,
    TOP,
    Client,
)
from listening import listening

from checkpoints.access import Access
from checkpoints.catalog import Catalog
from checkpoints.task_file import task_to_bytes
from jpets.engine.engine import Engine
from jpets.engine.results.numbers import sigmoid
from jpets.types import Embedding, Query, Regression, Task
from serving.app import create_app
from serving.hosted.service import Service
from serving.http.settings import ServingSettings
from serving.tenants.keyring import Keyring

Outcomes = Callable[[str], dict[str, Any]]
"""A client's name -> what each of its calls gives."""


def is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def sources(clients: Mapping[str, Client]) -> list[tuple[str, str]]:
    """Each client by its recorded requests, and where it is installed as it is."""
    live = [name for name, client in clients.items() if is_installed(client.package)]
    return [(name, "recorded") for name in clients] + [(name, "live") for name in live]


@pytest.fixture(scope="module")
def keyring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Keyring, str]]:
    """Keys of a server, and one of them."""
    folder: Path = tmp_path_factory.mktemp("keys")
    catalog = Catalog(folder / "catalog.sqlite")
    _, key = Access(catalog).create("acme", ("infer",))
    yield Keyring(Access(catalog)), key
    catalog.close()


@pytest.fixture(scope="module", autouse=True)
def named_as_a_model_of_cohere(service: Service, make_task: Callable[..., Task]) -> Iterator[None]:
    call, path = client_of(service, ServingSettings()), f"/v1/tasks/{COHERES}"
    task = make_task(COHERES, type="embedding", seed=5, pooling="mean", normalize=True)
    assert call("PUT", path, content=task_to_bytes(task)).status_code == 201
    yield
    call("DELETE", path)


@pytest.fixture
def recorded(service: Service, settings: ServingSettings, keyring: tuple[Keyring, str]) -> Outcomes:
    """What the client would read of the answers to its recorded requests."""
    keys, key = keyring
    call = client_of(service, settings, keyring=keys)

    def outcome(requests: list[dict[str, Any]]) -> list[Any]:
        found: list[Any] = []
        for own in requests:
            headers = {name: value.replace(KEY, key) for name, value in own["headers"].items()}
            answer = call(own["method"], own["path"], headers=headers, json=own["body"])
            assert answer.status_code == 200, answer.text
            found += read(own["path"], answer.json())
        return found

    def outcomes(name: str) -> dict[str, Any]:
        kept = json.loads((FIXTURES / "clients" / f"{name}.json").read_text())
        return {call: outcome(requests) for call, requests in kept["calls"].items()}

    return outcomes


@pytest.fixture
def live(service: Service, keyring: tuple[Keyring, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Outcomes]:
    """What the client itself gives."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # it holds for this machine as well
    keys, key = keyring
    with listening(create_app(service, ServingSettings(), keyring=keys)) as url, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own

        def outcomes(name: str) -> dict[str, Any]:
            client = CLIENTS[name].make(url, key)
            with asyncio.Runner() as runner:
                return {call: ask(client, runner.run) for call, ask in CLIENTS[name].calls.items()}

        yield outcomes
        huggingface_hub.close_session()
        gc.collect()  # clients that leave their connections open


def read(path: str, answer: Any) -> list[Any]:
    """Vectors in the order in which they stand, or places with scores: as the clients read an answer."""
    if path == "/v1/embeddings":
        return [np.frombuffer(base64.b64decode(own["embedding"]), "<f4") for own in answer["data"]]
    if path in ("/v1/embed", "/v2/embed"):
        return [*np.array(answer["embeddings"]["float"], "float32")]
    if path == "/v2/rerank":
        return [(own["index"], own["relevance_score"]) for own in answer["results"]]
    if path.endswith("/rerank"):
        return [(own["index"], float(own["score"])) for own in answer]
    return [*np.array(answer, "float32")]


@pytest.fixture
def outcomes(source: str, request: pytest.FixtureRequest) -> Outcomes:
    found: Outcomes = request.getfixturevalue(source)
    return found


@pytest.mark.parametrize(("name", "source"), sources(EMBEDDERS))
def test_texts_get_the_engines_vectors(name: str, outcomes: Outcomes, engine: Engine) -> None:
    found = outcomes(name)
    assert found.keys() == EMBEDDERS[name].calls.keys()
    for call, vectors in found.items():
        results = engine.infer([Query(EMBEDS, text) for text in ([QUERY] if "query" in call else TEXTS)])
        expected = [own.embedding for own in results if isinstance(own, Embedding)]
        np.testing.assert_allclose(vectors, expected, atol=1e-5, err_msg=call)


@pytest.mark.parametrize(("name", "source"), sources(RANKERS))
def test_texts_are_ranked_as_by_the_engine(name: str, outcomes: Outcomes, engine: Engine) -> None:
    results = engine.infer([Query(RANKS, QUERY, text) for text in TEXTS])
    scores = sigmoid(np.array([own.logits[0] for own in results if isinstance(own, Regression)]))
    order = np.argsort(-scores)
    found = outcomes(name)
    assert found.keys() == RANKERS[name].calls.keys()
    for call, ranking in found.items():
        places, given = zip(*ranking, strict=True)
        assert len(places) >= TOP and [*places] == order[: len(places)].tolist(), call
        np.testing.assert_allclose(given, scores[order[: len(places)]], rtol=1e-3, err_msg=call)
