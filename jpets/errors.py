"""The exception tree.

    JpetsError
    |-- InvalidInput (ValueError)          422  the caller's query or file is wrong
    |   |-- Unparseable                    400  a body that cannot be read
    |   |-- InputTooLong                   422  more tokens than the model or the task takes
    |   |-- InvalidTask                    422  a task file or task object that cannot be accepted
    |   |   `-- UnknownClass               422  its shape class is outside the server's fixed set
    |   |-- InvalidBackbone                422  a checkpoint that lacks tensors or has them in wrong shapes
    |   |-- InvalidTable                   422  a lookup table that is damaged or was made for another backbone
    |   |-- TooLarge                       413  more inputs or bytes than one request may carry
    |   `-- UnsupportedMedia               415  a body in another format or encoding than is read here
    |-- Unauthorized                       401  no key, or one that is not accepted
    |-- Forbidden                          403  the key does not allow this
    |-- NotFound (KeyError)                404  unknown task, version or backbone; or another tenant's
    |-- Conflict                           409  the task changed meanwhile, or the name is taken or in use
    |-- OverQuota                          429  the tenant asks more than it may
    |-- DeadlineExceeded (TimeoutError)    504  no answer came in time
    |-- Saturated                          503  the queue is full, or the server drains
    |   `-- Preparing                      503  the task's class is still being made ready
    |-- OutOfSpace                         507  disk full, or no free slot on the device
    |-- NotFinite (ArithmeticError)        500  the task's own numbers gave NaN or Inf
    `-- EngineFailure (RuntimeError)       500  the device or the host loop failed

Every message says what was expected, what was found and what to do. None carries a query's text, a key or a path.
"""

from __future__ import annotations

import math


class JpetsError(Exception):
    """Base of every error that jpets raises on purpose."""

    code = "internal"
    status = 500
    retry_after: int | None = None

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else self.code

    def __str__(self) -> str:
        return self.message


class InvalidInput(JpetsError, ValueError):
    code, status = "invalid_input", 422


class Unparseable(InvalidInput):
    code, status = "unparseable", 400


class InputTooLong(InvalidInput):
    code = "input_too_long"


class InvalidTask(InvalidInput):
    code = "invalid_task"


class UnknownClass(InvalidTask):
    code = "unknown_class"


class InvalidBackbone(InvalidInput):
    code = "invalid_backbone"


class InvalidTable(InvalidInput):
    code = "invalid_table"


class TooLarge(InvalidInput):
    code, status = "too_large", 413


class UnsupportedMedia(InvalidInput):
    code, status = "unsupported_media_type", 415


class Unauthorized(JpetsError):
    code, status = "unauthorized", 401


class Forbidden(JpetsError):
    code, status = "forbidden", 403


class NotFound(JpetsError, KeyError):
    code, status = "not_found", 404


class Conflict(JpetsError):
    code, status = "conflict", 409


class OverQuota(JpetsError):
    code, status = "over_quota", 429

    def __init__(self, message: str, wait: float = 1.0) -> None:
        """``wait``: seconds until it would be accepted."""
        super().__init__(message)
        self.retry_after = max(1, math.ceil(wait))


class DeadlineExceeded(JpetsError, TimeoutError):
    code, status = "deadline_exceeded", 504


class Saturated(JpetsError):
    code, status, retry_after = "saturated", 503, 1


class Preparing(Saturated):
    code, retry_after = "preparing", 5


SHUTTING_DOWN = "the server is shutting down; send the request to another one"


class OutOfSpace(JpetsError):
    code, status = "out_of_space", 507


class NotFinite(JpetsError, ArithmeticError):
    code, status = "not_finite", 500


class EngineFailure(JpetsError, RuntimeError):
    code, status = "engine_failure", 500


def one_line(error: Exception) -> str:
    """What a command that ends by ``error`` says on the terminal: of the system's errors the file too."""
    error = getattr(error, "orig", None) or error  # SQLAlchemy wraps what the database says
    if isinstance(error, OSError) and not isinstance(error, JpetsError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__
