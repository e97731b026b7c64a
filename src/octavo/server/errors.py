"""Every failure as OpenAI's error object: {"error": {"message", "type", "param", "code"}} and its HTTP status."""

import msgspec

from octavo.errors import ContextTooLong, OctavoError, QueueFull, RequestError, UnsupportedError, WorkerDied

INVALID = "invalid_request_error"
SERVER = "server_error"
OVERLOADED = "rate_limit_error"


class ErrorInfo(msgspec.Struct, frozen=True):
    """What went wrong. ``param`` names the request's field where one is at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    error: ErrorInfo


class ApiError(Exception):
    """A failure that knows its HTTP status."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, *, kind: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.info = ErrorInfo(message, kind or (INVALID if status < 500 else SERVER), param, code)

    def body(self) -> bytes:
        """The JSON body."""
        return msgspec.json.encode(ErrorBody(self.info))


def invalid(message: str, param: str | None = None) -> ApiError:
    """A 400: the request's field ``param`` is at fault."""
    return ApiError(400, message, param)


def unserved(message: str, param: str) -> ApiError:
    """A 400: a known field asks for what this version does not serve."""
    return ApiError(400, message, param, "unsupported_parameter")


def api_error(error: Exception) -> ApiError | None:
    """The HTTP face of an exception; None for one that nobody raises on purpose (a 500)."""
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, OctavoError):
        return None
    if isinstance(error, QueueFull):
        headers = {"Retry-After": str(max(1, round(error.retry_after)))}
        return ApiError(429, error.message, error.param, "rate_limit_exceeded", kind=OVERLOADED, headers=headers)
    if isinstance(error, ContextTooLong):
        return ApiError(400, error.message, error.param, "context_length_exceeded")
    if isinstance(error, UnsupportedError):
        return ApiError(400, error.message, error.param, "unsupported_parameter")
    if isinstance(error, RequestError):
        return ApiError(400, error.message, error.param)
    code = "engine_dead" if isinstance(error, WorkerDied) else None
    return ApiError(503 if isinstance(error, WorkerDied) else 500, error.message, error.param, code)


INTERNAL = ApiError(500, "the server failed on this request; its log says why", code="internal_error")
