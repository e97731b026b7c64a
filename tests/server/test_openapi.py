"""The OpenAPI document is true: requests made from it, and broken on purpose, never find a 500, and answers are what it says."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode, checks
from schemathesis.specs.openapi import checks as openapi
from tests.server.conftest import Live, serve
from tests.server.scripted import ScriptedLLM

from octavo.server.app import ROUTES, create_app
from octavo.server.openapi import OPERATIONS as DOCUMENTED
from octavo.server.openapi import document
from octavo.server.settings import ServerSettings

SMALL = ServerSettings(served_model_names=("tiny",), max_n=3, max_choices=4, max_body_bytes=100_000)
CHECKS = [
    checks.not_a_server_error, openapi.status_code_conformance, openapi.content_type_conformance,
    openapi.response_schema_conformance, openapi.response_headers_conformance,
    openapi.negative_data_rejection, openapi.unsupported_method,
]


@pytest.fixture(scope="module")
def small(tiny: str) -> Iterator[Live]:
    yield from serve(tiny, SMALL, max_model_len=48)


SCHEMA = schemathesis.openapi.from_dict(json.loads(document(SMALL, ("tiny",), False)))
OPERATIONS = [(path, method) for path, item in json.loads(document(SMALL, ("tiny",), False))["paths"].items() for method in item]
REQUESTS = {path: request for path, (_, _, request, _, _) in DOCUMENTED.items()}
ROUNDS = {"/v1/completions": 80, "/v1/chat/completions": 40, "/tokenize": 25, "/detokenize": 25}  # the others take next to nothing


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_every_operation(small: Live, path: str, method: str, mode: GenerationMode) -> None:
    operation = SCHEMA[path][method.upper()]
    if mode is GenerationMode.NEGATIVE and REQUESTS[path] is None:
        pytest.skip("nothing is sent that could be wrong")
    answers: Counter[int] = Counter()
    with httpx.Client() as http:

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=ROUNDS.get(path, 5), deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
        def ask(case: Any) -> None:
            if isinstance(case.body, dict):
                case.body.pop("stream", None)  # events are no JSON document; test_formats.py reads them
            response = case.call(base_url=small.url, session=None)
            answers[response.status_code] += 1
            case.validate_response(response, checks=CHECKS)

        ask()
        assert http.get(small.url + "/health").status_code == 200
    if mode is GenerationMode.NEGATIVE:
        assert set(answers) <= {200, 400, 404, 405, 413, 415}


def test_every_route_is_in_the_document() -> None:
    found = json.loads(document(ServerSettings(api_keys=("k",)), ("tiny",), True))
    assert {(method.upper(), path) for path, item in found["paths"].items() for method in item} == {
        (method, path.replace(":path", "")) for method, path, _ in ROUTES
    } | {("GET", "/metrics")}
    app = create_app(ScriptedLLM(), ServerSettings())  # type: ignore[arg-type]
    assert {route.path.replace(":path", "") for route in app.router.routes} == set(found["paths"]) - {"/metrics"} | {"/openapi.json"}
    assert found["security"] and found["paths"]["/health"]["get"]["security"] == []
    references = {part.partition('"')[0] for part in document(ServerSettings(), ("tiny",), True).decode().split("#/components/schemas/")[1:]}
    assert references <= set(found["components"]["schemas"])


def test_relaxed_requests_are_documented_as_such() -> None:
    strict, relaxed = (json.loads(document(ServerSettings(allow_unknown_fields=allow), ("tiny",), False)) for allow in (False, True))
    for found, closed in ((strict, True), (relaxed, False)):
        name = found["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        assert (found["components"]["schemas"][name].get("additionalProperties") is False) == closed


def test_the_document_is_served(small: Live) -> None:
    assert httpx.get(small.url + "/openapi.json").json()["openapi"] == "3.1.0"
