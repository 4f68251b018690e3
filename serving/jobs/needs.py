"""The backbones that a job needs: to read them, and to publish what it makes on one of them."""

from __future__ import annotations

from collections.abc import Sequence

from serving.jobs.folder import JobFolder
from serving.jobs.request import FurtherPretrain, JobRequest, MakeDomain, MakeStudents


def places_of(request: JobRequest) -> Sequence[str | None]:
    """The backbones of which what a job makes is for one."""
    return request.shallow if isinstance(request, MakeStudents) else (request.backbone,)


def backbones_of(request: JobRequest) -> Sequence[str | None]:
    """The backbones that a job reads. Those of ``places_of`` come first."""
    if isinstance(request, MakeStudents):
        return *request.shallow, request.teacher_backbone
    return (request.backbone, request.whole) if isinstance(request, MakeDomain) else (request.backbone,)


def has_failed(job: JobFolder) -> bool:
    """Whether its process found that there is nothing to publish."""
    return job.result is not None and job.result.problem is not None


def still_read(job: JobFolder) -> Sequence[str]:
    """Those of ``backbones_of`` its request that it names, until it has its result."""
    return [name for name in backbones_of(job.request) if name is not None] if job.result is None else ()


def published_on(job: JobFolder) -> Sequence[str | None]:
    """The backbones that have to take queries when what it makes is published: until it has chosen one, ``places_of``
    its request. None for what is no task or domain, and for a job that failed."""
    request, result = job.request, job.result
    if isinstance(request, FurtherPretrain) or has_failed(job):
        return ()
    return (result.backbone,) if result is not None and result.backbone is not None else places_of(request)
