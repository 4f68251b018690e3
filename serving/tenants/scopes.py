"""The scope that each route needs."""

from __future__ import annotations

from collections.abc import Mapping

from jpets.access import Scope

ANY = None
"""Any key will do."""
ROUTES: Mapping[Scope | None, str] = {
    ANY: """
        GET /
        GET /v1/backbones
        GET /v1/domains
        GET /v1/models
        GET /v1/models/{id:path}
        GET /v1/tasks
        GET /v1/tasks/{id}
        GET /v1/tasks/{id}/versions
        GET /v2
        GET /v2/health/live
        GET /v2/health/ready
        GET /v2/models/{model}
        GET /v2/models/{model}/ready
        GET /v2/models/{model}/versions/{version}
        GET /v2/models/{model}/versions/{version}/ready
        POST /v2/repository/index
        GET /tei/{task}/info
    """,
    "infer": """
        POST /classify
        POST /hf/{task}
        POST /pooling
        POST /rerank
        POST /score
        POST /tei/{task}/embed
        POST /tei/{task}/predict
        POST /tei/{task}/rerank
        POST /v1/classify
        POST /v1/embed
        POST /v1/embeddings
        POST /v1/fanout
        POST /v1/rerank
        POST /v1/score
        POST /v2/embed
        POST /v2/rerank
        POST /v2/models/{model}/infer
        POST /v2/models/{model}/versions/{version}/infer
        POST /v2/repository/models/{model}/load
    """,
    "manage": """
        PUT /v1/tasks/{id}
        DELETE /v1/tasks/{id}
        GET /v1/tasks/{id}/file
        POST /v1/tasks/{id}/rollback
        PUT /v1/tasks/{id}/aliases/{alias}
        DELETE /v1/tasks/{id}/aliases/{alias}
        GET /v1/jobs
        POST /v1/jobs
        POST /v1/jobs/extract
        GET /v1/jobs/{id}
        DELETE /v1/jobs/{id}
        GET /v1/jobs/{id}/log
        POST /v1/students
        POST /v2/repository/models/{model}/unload
    """,
    "metrics": """
        GET /metrics
    """,
}
"""Every other route is the whole server's, and needs ``admin``."""
NEEDED: Mapping[tuple[str, ...], Scope | None] = {
    tuple(line.split()): scope for scope, lines in ROUTES.items() for line in lines.strip().splitlines()
}
METHODS: Mapping[str, Scope | None] = {
    "ServerLive": ANY,
    "ServerReady": ANY,
    "ServerMetadata": ANY,
    "ModelReady": ANY,
    "ModelMetadata": ANY,
    "RepositoryIndex": ANY,
    "ModelInfer": "infer",
    "ModelStreamInfer": "infer",
    "RepositoryModelLoad": "infer",
    "RepositoryModelUnload": "manage",
}
"""Those of gRPC."""


def scope_of(method: str, route: str) -> Scope | None:
    """``route`` is a path's template."""
    return NEEDED.get((method, route), "admin")
