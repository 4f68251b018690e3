"""OpenAI's and Cohere's own clients against a running server, with keys."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cohere
import numpy as np
import openai
import pytest
from listening import listening

from checkpoints.access import Access
from checkpoints.catalog import Catalog
from jpets.engine.engine import Engine
from jpets.types import Embedding, Query
from serving.app import create_app
from serving.hosted.service import Service
from serving.http.settings import ServingSettings
from serving.tenants.keyring import Keyring

TEXTS = ["hello world", "a"]


@pytest.fixture(scope="module")
def place(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The URL of a server with keys, and a key."""
    folder: Path = tmp_path_factory.mktemp("keys")
    catalog = Catalog(folder / "catalog.sqlite")
    _, key = Access(catalog).create("acme", ("infer",))
    with listening(create_app(service, ServingSettings(), keyring=Keyring(Access(catalog)))) as url:
        yield url, key
    catalog.close()


@pytest.fixture
def client(place: tuple[str, str]) -> Iterator[openai.OpenAI]:
    url, key = place
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as made:
        yield made


def test_embeddings_as_the_client_asks_by_default(client: openai.OpenAI, engine: Engine) -> None:
    answer = client.embeddings.create(model="vectors", input=TEXTS)
    expected = engine.infer([Query("vectors", text) for text in TEXTS])
    for found, result in zip(answer.data, expected, strict=True):
        assert isinstance(result, Embedding)
        np.testing.assert_allclose(found.embedding, result.embedding, atol=1e-6)
    assert answer.usage.total_tokens == sum(result.tokens for result in expected)
    plain = client.embeddings.create(model="vectors", input=TEXTS, encoding_format="float")
    np.testing.assert_allclose(plain.data[0].embedding, answer.data[0].embedding, atol=1e-6)
    ids = [[2, 9, 9, 3], [2, 3]]
    for given, kept in ((ids, ids), (ids[0], ids[:1])):
        vectors = client.embeddings.create(model="vectors", input=given).data
        for each, own in zip(vectors, engine.infer([Query("vectors", input_ids=row) for row in kept]), strict=True):
            assert isinstance(own, Embedding)
            np.testing.assert_allclose(each.embedding, own.embedding, atol=1e-6)
    short = client.embeddings.create(model="vectors", input=TEXTS[0], dimensions=8).data[0].embedding
    assert len(short) == 8


def test_models(client: openai.OpenAI) -> None:
    ids = [model.id for model in client.models.list()]
    assert {"topic", "vectors", "tiny-bert"} <= set(ids)
    assert client.models.retrieve("topic").owned_by == "jpets"


def test_errors_are_the_clients_own(client: openai.OpenAI, place: tuple[str, str]) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="none-such", input="a")
    with pytest.raises(openai.UnprocessableEntityError):
        client.embeddings.create(model="topic", input="a")
    with (
        openai.OpenAI(base_url=f"{place[0]}/v1", api_key="jpets_0_1", max_retries=0) as wrong,
        pytest.raises(openai.AuthenticationError),
    ):
        wrong.models.list()


def test_rerank_by_coheres_client(place: tuple[str, str]) -> None:
    url, key = place
    documents = ["hello world", "a", "hello"]
    with cohere.ClientV2(api_key=key, base_url=url) as client:
        own = client.rerank(model="price", query="hello", documents=documents, top_n=2)
    with cohere.Client(api_key=key, base_url=url) as client:
        earlier = client.rerank(model="price", query="hello", documents=documents)
    assert len(own.results) == 2 and len(earlier.results) == 3
    scores = [each.relevance_score for each in earlier.results]
    assert scores == sorted(scores, reverse=True) and earlier.results[0].index == own.results[0].index


@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")  # the client's own
@pytest.mark.parametrize("kind", ["float", "base64"])
def test_embeddings_by_coheres_clients(place: tuple[str, str], engine: Engine, kind: str) -> None:
    url, key = place
    asked: dict[str, Any] = {"model": "vectors", "texts": TEXTS, "input_type": "search_query"}
    with cohere.ClientV2(api_key=key, base_url=url) as client:
        own: Any = client.embed(**asked, embedding_types=[kind], output_dimension=64, truncate="END")
    with cohere.Client(api_key=key, base_url=url) as client:
        plain: Any = client.embed(**asked)
        typed: Any = client.embed(**asked, embedding_types=[kind])
    results = engine.infer([Query("vectors", text) for text in TEXTS])
    expected = [each.embedding for each in results if isinstance(each, Embedding)]
    np.testing.assert_allclose(plain.embeddings, expected, atol=1e-6)
    for found in (own.embeddings, typed.embeddings):
        vectors = found.float_
        if kind == "base64":
            vectors = [np.frombuffer(base64.b64decode(each), "<f4") for each in found.base64]
        np.testing.assert_allclose(vectors, expected, atol=1e-6)
    assert own.meta.billed_units.input_tokens == sum(each.tokens for each in results)


def test_what_cannot_be_embedded_is_coheres_own_error(place: tuple[str, str]) -> None:
    url, key = place
    with (
        cohere.ClientV2(api_key=key, base_url=url) as client,
        pytest.raises(cohere.UnprocessableEntityError, match="images"),
    ):
        client.embed(model="vectors", images=["data:image/png;base64,"], input_type="image")
