"""Whose request it is: the name of its key, else the header, else the field user."""

import asyncio
from typing import Any

import pytest
from tests.server.asgi import CHAT, COMPLETIONS, client
from tests.server.scripted import END, ScriptedLLM

from octavo.errors import ConfigError
from octavo.server.app import create_app
from octavo.server.settings import ServerSettings, named_keys

BODIES: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": ["p", "q"]}, CHAT: {"messages": [{"role": "user", "content": "p"}]}}


def ask(settings: ServerSettings, path: str, headers: dict[str, str], user: Any = None, stream: bool = False) -> tuple[int, Any, list[str]]:
    """Status, error and the tenants that the engine was told, one per prompt."""

    async def run() -> tuple[int, Any, list[str]]:
        llm = ScriptedLLM([[65], [END]])
        async with client(create_app(llm, settings)) as http:  # type: ignore[arg-type]
            answer = await http.post(path, json=BODIES[path] | {"stream": stream} | ({} if user is None else {"user": user}), headers=headers)
        return answer.status_code, answer.json().get("error") if answer.status_code != 200 else None, llm.tenants

    return asyncio.run(run())


KEYS, NAMES = named_keys(["alice=secret", "plain", "bob=other"])
KEYED = ServerSettings(api_keys=KEYS, key_names=NAMES)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("settings", "headers", "user", "tenant"), [
    (ServerSettings(), {}, None, ""), (ServerSettings(), {}, "u", "u"), (ServerSettings(), {}, "", ""),
    (ServerSettings(), {"X-Tenant": "t"}, "u", "t"), (ServerSettings(), {"X-Tenant": "t"}, None, "t"),
    (KEYED, {"Authorization": "Bearer secret"}, None, "alice"), (KEYED, {"Authorization": "Bearer other", "X-Tenant": "alice"}, "alice", "bob"),
    (KEYED, {"Authorization": "Bearer plain"}, None, ""), (KEYED, {"Authorization": "Bearer plain", "X-Tenant": "t"}, "u", "t"),
    (KEYED, {"Authorization": "Bearer plain"}, "ü 名", "ü 名"),
])
def test_key_then_header_then_user(path: str, stream: bool, settings: ServerSettings, headers: dict[str, str], user: Any, tenant: str) -> None:
    status, _, told = ask(settings, path, headers, user, stream)
    assert status == 200 and told == [tenant] * (2 if path == COMPLETIONS else 1)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("headers", "user", "param", "says"), [
    ({"X-Tenant": "a b"}, None, "X-Tenant", "visible ASCII"), ({"X-Tenant": "a" * 129}, None, "X-Tenant", "128"),
    ({"X-Tenant": ""}, None, "X-Tenant", "1 to"),
    ({}, "u" * 257, "user", "257 characters; at most 256"), ({"X-Tenant": "fine"}, "u" * 257, "user", "257"),
])
def test_impossible_names_are_refused(path: str, headers: dict[str, str], user: Any, param: str, says: str) -> None:
    status, error, told = ask(ServerSettings(), path, headers, user)
    assert status == 400 and error["param"] == param and says in error["message"] and told == []


@pytest.mark.parametrize(("given", "keys", "names"), [
    ([], (), {}), (["k"], ("k",), {}), (["n=k"], ("k",), {"k": "n"}), (["c2VjcmV0a2V5=="], ("c2VjcmV0a2V5==",), {}), (["abc="], ("abc=",), {}),
    (["n=abc=="], ("abc==",), {"abc==": "n"}), (["n=a=b"], ("a=b",), {"a=b": "n"}), (["=a=b"], ("a=b",), {}),
    (["n=old", "n=new"], ("old", "new"), {"old": "n", "new": "n"}), (["n=k", "n=k"], ("k", "k"), {"k": "n"}),
    (["team.a@x-1=k"], ("k",), {"k": "team.a@x-1"}),
])
def test_how_keys_are_written(given: list[str], keys: tuple[str, ...], names: dict[str, str]) -> None:
    assert named_keys(given) == (keys, tuple(names.items()))


@pytest.mark.parametrize(("given", "says"), [
    ([""], "API key 1 is empty"), (["k", "="], "API key 2 is empty"), (["a b=secret"], "the name of API key 1"), (["a" * 65 + "=secret"], "1 to 64"),
    (["a=secret", "b=secret"], "API key 2 is named 'b', and 'a' before"),
])
def test_impossible_keys_are_refused_without_being_told(given: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        named_keys(given)
    assert says in caught.value.message and "secret" not in caught.value.message and caught.value.param == "api_key"


def test_a_client_without_a_named_key_is_not_named_after_one() -> None:
    async def run() -> None:
        llm = ScriptedLLM([[END]])
        async with client(create_app(llm, KEYED)) as http:  # type: ignore[arg-type]
            for key in ("secret", "plain", "other", "plain"):
                assert (await http.post(COMPLETIONS, json={"prompt": "p"}, headers={"Authorization": f"Bearer {key}"})).status_code == 200
            assert (await http.post(COMPLETIONS, json={"prompt": "p"}, headers={"X-Tenant": "alice"})).status_code == 401
        assert llm.tenants == ["alice", "", "bob", ""]

    asyncio.run(run())
