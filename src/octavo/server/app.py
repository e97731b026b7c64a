"""The HTTP app: routes to handlers, failures to OpenAI's error objects."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.errors import OctavoError
from octavo.server import utility
from octavo.server.chat import chat_completions
from octavo.server.completions import completions
from octavo.server.context import Context
from octavo.server.errors import ApiError, api_error
from octavo.server.merge import Disconnected
from octavo.server.middleware import Guard, reply
from octavo.server.openapi import document
from octavo.server.settings import ServerSettings

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncLLM

Handler = Callable[[Context, Request], Awaitable[Response]]

ROUTES: list[tuple[str, str, Handler]] = [
    ("POST", "/v1/completions", completions), ("POST", "/v1/chat/completions", chat_completions),
    ("GET", "/v1/models", utility.models), ("GET", "/v1/models/{model_id:path}", utility.model),
    ("POST", "/tokenize", utility.tokenize), ("POST", "/detokenize", utility.detokenize),
    ("GET", "/health", utility.health), ("GET", "/ping", utility.ping), ("GET", "/version", utility.version), ("GET", "/load", utility.load),
    ("POST", "/reset_prefix_cache", utility.reset_prefix_cache),
]


def create_app(llm: "AsyncLLM", settings: ServerSettings, metrics: Any | None = None) -> Starlette:
    """The app over an engine, which the caller starts and shuts down. ``metrics`` (observe.metrics.Metrics) gives GET /metrics its text."""
    app = Starlette()
    app.router.redirect_slashes = False
    context = app.state.context = Context(llm, settings)
    for method, path, handler in ROUTES:
        app.router.routes.append(Route(path, _endpoint(context, handler), methods=[method]))
    if metrics is not None:
        app.router.routes.append(Route("/metrics", _metrics(metrics), methods=["GET"]))
    text = document(settings, context.names, metrics is not None)
    app.router.routes.append(Route("/openapi.json", _static(text), methods=["GET"]))
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Guard, api_keys=settings.api_keys, key_names=settings.key_names)
    if settings.cors_origins:  # outermost: a browser asks for permission without a key
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["X-Request-Id"],
        )
    return app


def _endpoint(context: Context, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(context, request)
        except ClientDisconnect:
            raise Disconnected from None
        except (ApiError, OctavoError) as error:
            failure = api_error(error)
            assert failure is not None
            return reply(failure)

    return endpoint


def _metrics(metrics: Any) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        text, kind = metrics.render()
        return Response(text, headers={"content-type": kind})

    return endpoint


def _static(body: bytes) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return Response(body, media_type="application/json")

    return endpoint


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, wrong method."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 404:
        failure = ApiError(404, f"there is no route {request.method} {path}", code="unknown_route")
    elif error.status_code == 405:
        failure = ApiError(405, f"{request.method} is not what {path} answers to", code="method_not_allowed", headers=dict(error.headers or {}))
    else:
        failure = ApiError(error.status_code, str(error.detail or HTTPStatus(error.status_code).phrase), headers=dict(error.headers or {}))
    return reply(failure)
