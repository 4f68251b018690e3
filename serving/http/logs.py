"""Log lines with fields: ``time level logger message key=value ...``, or one JSON object a line."""

from __future__ import annotations

import datetime
import json
import logging
import traceback
from pathlib import Path
from typing import Any

STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
QUIET = ("absl", "jax", "asyncio", "uvicorn", "httpx", "urllib3", "huggingface_hub", "filelock")
"""Libraries that may log only warnings and errors."""


class FieldFormatter(logging.Formatter):
    """``extra`` fields are part of the line. Exceptions are logged by type: their text may quote what a user sent."""

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {k: v for k, v in vars(record).items() if k not in STANDARD}
        if record.exc_info and record.exc_info[0]:
            fields["error"] = record.exc_info[0].__name__
        head = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._as_json:
            return json.dumps({**head, **fields}, default=str)
        return " ".join([*head.values(), *(f"{k}={_quoted(v)}" for k, v in fields.items())])


def set_up_logging(level: str, as_json: bool) -> None:
    """Sends everything to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(FieldFormatter(as_json))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def places(error: BaseException) -> str:
    """Where an exception comes from, the innermost first."""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))


def _quoted(value: object) -> str:
    text = str(value)
    return json.dumps(text) if not text or " " in text or "\n" in text or '"' in text else text
