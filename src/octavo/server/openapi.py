"""The OpenAPI document, from the same structs that requests are parsed into and answers are encoded from."""

from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.server import answers
from octavo.server.errors import ErrorBody
from octavo.server.schema import RELAXED, ChatRequest, CompletionRequest, DetokenizeRequest, Part, TokenizeRequest
from octavo.server.settings import ServerSettings

Json = dict[str, Any]

_GENERATION = (400, 404, 413, 415, 429, 500, 503)
_TEXT = (400, 404, 413, 415, 500)
# path → method, summary, request, response, statuses of errors
OPERATIONS: dict[str, tuple[str, str, type | None, type | None, tuple[int, ...]]] = {
    "/v1/completions": ("post", "Complete prompts", CompletionRequest, answers.CompletionResponse, _GENERATION),
    "/v1/chat/completions": ("post", "Answer a conversation", ChatRequest, answers.ChatResponse, _GENERATION),
    "/v1/models": ("get", "The models that are served", None, answers.ModelList, (500,)),
    "/v1/models/{model_id}": ("get", "One model", None, answers.ModelCard, (404, 500)),
    "/tokenize": ("post", "Token ids of a prompt or of messages", TokenizeRequest, answers.TokenizeResponse, _TEXT),
    "/detokenize": ("post", "The text of token ids", DetokenizeRequest, answers.DetokenizeResponse, _TEXT),
    "/health": ("get", "Whether the engine makes progress", None, answers.Health, (500, 503)),
    "/ping": ("get", "Whether the server answers", None, answers.Health, (500,)),
    "/version": ("get", "Octavo's version", None, answers.Version, (500,)),
    "/load": ("get", "Open requests", None, answers.Load, (500,)),
    "/reset_prefix_cache": ("post", "Forget all cached prefixes", None, None, (500, 503)),
}
_REASONS = {
    400: "A field is at fault; param names it", 401: "No valid API key", 404: "Not here", 413: "The body is too large",
    415: "The body is not JSON by its content type", 429: "The queue is full; Retry-After says when to come back", 500: "A fault of the server",
    503: "The engine has stopped or does not get on",
}
_UNGUARDED = ("/health", "/ping")


def document(settings: ServerSettings, names: Sequence[str], metrics: bool) -> bytes:
    """The document, as JSON. ``names``: the models'."""
    kinds = [request for _, _, request, _, _ in OPERATIONS.values() if request] + [reply for _, _, _, reply, _ in OPERATIONS.values() if reply]
    if settings.allow_unknown_fields:
        kinds = [RELAXED.get(kind, kind) for kind in kinds]
    _, schemas = msgspec.json.schema_components([*kinds, Part, ErrorBody], ref_template="#/components/schemas/{name}")
    for schema in schemas.values():
        known = schema.get("properties", {})
        if "model" in known and "object" not in known:  # a request
            known["model"] = {"enum": [None, *names]}
        if "n" in known:
            known["n"]["maximum"] = settings.max_n
    paths: Json = {path: {operation[0]: _operation(path, operation, settings)} for path, operation in OPERATIONS.items()}
    if metrics:
        text = {"200": {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}}
        responses = text | _errors("/metrics", (500,), settings)
        paths["/metrics"] = {"get": {"summary": "Metrics for Prometheus", "operationId": "get_metrics", "responses": responses}}
    from octavo import __version__

    found: Json = {
        "openapi": "3.1.0", "info": {"title": "Octavo", "version": __version__, "summary": "An OpenAI-compatible inference server"},
        "paths": paths, "components": {"schemas": schemas},
    }
    if settings.api_keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
        for path in _UNGUARDED:
            paths[path]["get"]["security"] = []
    return msgspec.json.encode(found)


def _operation(path: str, operation: tuple[str, str, type | None, type | None, tuple[int, ...]], settings: ServerSettings) -> Json:
    method, summary, request, reply, statuses = operation
    content: Json = {"application/json": {"schema": _ref(reply)}} if reply else {}
    if request in (CompletionRequest, ChatRequest):
        content["text/event-stream"] = {"schema": {"type": "string"}}
    found: Json = {
        "summary": summary, "operationId": f"{method}{path.replace('/', '_').replace('{', '').replace('}', '')}",
        "responses": {"200": {"description": "OK"} | ({"content": content} if content else {})} | _errors(path, statuses, settings),
    }
    if request is not None:
        kind = RELAXED[request] if settings.allow_unknown_fields else request
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(kind)}}}
    if request in (CompletionRequest, ChatRequest):
        found["parameters"] = [{
            "name": "X-Tenant", "in": "header", "required": False, "schema": {"type": "string", "pattern": "^[!-~]{1,128}$"},
            "description": "Whose share of the engine this is, where the API key has no name.",
        }]
    if "{model_id}" in path:
        found["parameters"] = [{"name": "model_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]
    if path == "/health":
        found["responses"]["503"]["content"] = {"application/json": {"schema": _ref(answers.Health)}}
    return found


def _errors(path: str, statuses: tuple[int, ...], settings: ServerSettings) -> Json:
    if settings.api_keys and path not in _UNGUARDED:
        statuses = (*statuses, 401)
    body = {"application/json": {"schema": _ref(ErrorBody)}}
    found: Json = {str(status): {"description": _REASONS[status], "content": body} for status in sorted(statuses)}
    if 429 in statuses:
        found["429"]["headers"] = {"Retry-After": {"required": True, "schema": {"type": "string"}}}
    return found


def _ref(kind: type) -> Json:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
