"""Every error that Octavo raises on purpose.

    OctavoError
    ├── ConfigError          a setting of the engine (also a ValueError)
    ├── CheckpointError      a model file is missing, truncated, damaged or lying
    ├── UnsupportedError     a thing that is known but not (yet) served
    ├── WorkerDied           a part of the engine stopped; nothing can go on
    ├── RemoteError          another server cannot be reached, or answers with an error
    └── RequestError         one request is at fault; the others go on
        ├── InvalidRequest   a field has an impossible value (also a ValueError)
        ├── ContextTooLong   prompt and output do not fit the context or the KV pool (also a ValueError)
        ├── QueueFull        the bounded queue has no room now; carries retry_after, in seconds
        ├── GrammarError     a schema, regex or grammar cannot be compiled
        └── Cancelled        the caller took the request back

Messages say what was wrong, with the numbers, and what would work. ``param`` names the field, where one is at fault.
"""

_SHOWN = 80  # characters of a value in a message


def shown(value: object) -> str:
    """A value as a message shows it: like repr(), cut to a readable length, and never an error of its own."""
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"a number of {value.bit_length()} bits"  # Python refuses to write very long ones
    try:
        text = repr(value if not isinstance(value, str | bytes) else value[:_SHOWN + 1])
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


class OctavoError(Exception):
    """Base of all errors raised on purpose."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __reduce__(self) -> tuple[type, tuple[str, str | None]]:
        return type(self), (self.message, self.param)


class ConfigError(OctavoError, ValueError):
    """An engine setting is impossible."""


class CheckpointError(OctavoError):
    """A model's files are missing, truncated, damaged or contradict themselves."""


class UnsupportedError(OctavoError):
    """A known thing that this version does not serve."""


class WorkerDied(OctavoError):
    """A part of the engine stopped and cannot go on."""


class RemoteError(OctavoError):
    """Another server cannot be reached, or answers with an error."""


class RequestError(OctavoError):
    """One request is at fault; the engine goes on with the others."""


class InvalidRequest(RequestError, ValueError):
    """A field of a request has an impossible value."""


class ContextTooLong(RequestError, ValueError):
    """A prompt, or prompt and output together, exceed the context or the KV pool."""


class QueueFull(RequestError):
    """The bounded queue of waiting requests has no room. ``retry_after``: seconds after which to try again."""

    def __init__(self, message: str, param: str | None = None, retry_after: int = 1) -> None:
        super().__init__(message, param)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[type, tuple[str, str | None, int]]:  # type: ignore[override]
        return type(self), (self.message, self.param, self.retry_after)


class GrammarError(RequestError):
    """A structured-output constraint cannot be compiled."""


class Cancelled(RequestError):
    """The caller took the request back."""
