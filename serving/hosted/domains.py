"""The domains that stored tasks use."""

from __future__ import annotations

from collections import Counter

from serving.hosted.services import Services


def tasks_of_domains(services: Services) -> Counter[tuple[str, str]]:
    """The stored tasks by backbone and domain."""
    found: Counter[tuple[str, str]] = Counter()
    for task in services.repository.every():
        domain = (task.metadata.get("preprocessing") or {}).get("domain") or ""
        found[task.metadata["backbone"]["fingerprint"], domain.partition("@")[0]] += 1
    return found
