"""The states of a job, and how far it is."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

DISK_IS_FULL = 75
"""Exit status of a job's process that found no space on the disk: it is started again later (``EX_TEMPFAIL``)."""
JobStateName = Literal["queued", "running", "succeeded", "failed", "cancelled"]


class JobProgress(BaseModel):
    """Batch ``step`` of ``of`` and its loss (null: not finite). Of a job in parts, such as the rates of a sweep or the
    students of a group, each ``stage`` counts its own."""

    step: int
    of: int
    loss: float | None
    stage: str = ""
