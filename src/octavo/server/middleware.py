"""Around every route, as plain ASGI: request ids, the API key, and an answer for what nobody caught."""

import hashlib
import hmac
import logging
import re
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
    """Gives each request its id (the client's X-Request-Id, or a new one), checks its key, and answers 500 where something broke."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str] = ()) -> None:
        self.app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection's request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        started = False

        async def send_named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            if self._digests and scope["path"] not in OPEN_PATHS and not self._allowed(scope):
                await reply(_DENIED)(scope, receive, send_named)
                return
            await self.app(scope, receive, send_named)
        except Disconnected:
            return  # whatever ran for it has ended; there is nobody to tell
        except Exception:
            LOGGER.exception("request %s broke", request_id.decode())
            if started:
                raise
            await reply(INTERNAL)(scope, receive, send_named)

    def _allowed(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, so that time tells nothing
        return kind.lower() == b"bearer" and any(matches)


def reply(error: ApiError) -> Response:
    """An error as a response."""
    return Response(error.body(), error.status, error.headers, "application/json")


_DENIED = ApiError(
    401, "this server asks for an API key: send the header Authorization: Bearer KEY", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
)
