"""Around every route, as plain ASGI: request ids, the API key, and an answer for what nobody caught."""

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.errors import INTERNAL, ApiError
from octavo.server.merge import Disconnected

LOGGER = logging.getLogger("octavo.server")
OPEN_PATHS = ("/health", "/ping")  # for probes, which have no key
_ID = re.compile(rb"[!-~]{1,128}")


class Guard:
    """Gives each request its id (the client's X-Request-Id, or a new one), checks its key (whose name becomes ``state.key_name``), and
    answers 500 where something broke.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str] = (), key_names: Sequence[tuple[str, str]] = ()) -> None:
        self.app = app
        self._names = [dict(key_names).get(key, "") for key in api_keys]
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection's request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex.encode()
        state = scope.setdefault("state", {})
        state["request_id"] = request_id.decode()
        state.setdefault("arrival", time.monotonic())  # server/http.py has the moment in which it came in
        started = False

        async def send_named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            if self._digests and scope["path"] not in OPEN_PATHS:
                name = self._name(scope)
                if name is None:
                    await reply(_DENIED)(scope, receive, send_named)
                    return
                scope["state"]["key_name"] = name
            await self.app(scope, receive, send_named)
        except Disconnected:
            return  # whatever ran for it has ended; there is nobody to tell
        except Exception:
            LOGGER.exception("request %s broke", request_id.decode())
            if started:
                raise
            await reply(INTERNAL)(scope, receive, send_named)

    def _name(self, scope: Scope) -> str | None:
        """The name of the key that was sent, "" for one without; None for a wrong key or none."""
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, so that time tells nothing
        return self._names[matches.index(True)] if kind.lower() == b"bearer" and any(matches) else None


def reply(error: ApiError) -> Response:
    """An error as a response."""
    return Response(error.body(), error.status, error.headers, "application/json")


_DENIED = ApiError(
    401, "this server asks for an API key: send the header Authorization: Bearer KEY", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
)
