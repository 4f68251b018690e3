"""The domains that stored tasks use."""

from __future__ import annotations

from collections import Counter

from serving.hosted.repository import StoredTask
from serving.hosted.services import Services


def tasks_of_domains(services: Services) -> Counter[tuple[str, str]]:
    """The tasks by backbone and domain: of each the newest version, and the one that is served until that has come."""
    found: Counter[tuple[str, str]] = Counter()
    for task in services.repository.every():
        instead = (service.tasks.served_instead(task) for service in services.all)
        found.update({_domain_of(own) for own in (task, *instead) if own is not None})
    return found


def _domain_of(task: StoredTask) -> tuple[str, str]:
    domain = (task.metadata.get("preprocessing") or {}).get("domain") or ""
    return task.metadata["backbone"]["fingerprint"], domain.partition("@")[0]
