"""Hugging Face's own client, for a server on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import huggingface_hub
import pytest
from huggingface_hub import InferenceClient
from listening import listening

from serving.app import create_app
from serving.hosted.service import Service


@pytest.fixture
def client(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], InferenceClient]]:
    """The client of a task."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # it holds for this machine as well
    with listening(create_app(service)) as url:
        yield lambda task: InferenceClient(model=f"{url}/hf/{task}", token="none")
        huggingface_hub.close_session()
