"""The prompts of a completion request: text, token ids, or a list of them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Raw

from octavo.engine.inputs import Prompt
from octavo.errors import ContextTooLong, RequestError
from octavo.server.body import decode
from octavo.server.errors import ApiError, invalid
from octavo.server.schema import Generation
from octavo.server.settings import ServerSettings

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncLLM


def parse_prompts(raw: Raw, context: int, settings: ServerSettings) -> list[str | list[int]]:
    """The prompts, each a text or token ids. Raises: ApiError, naming the place.

    Lists are measured by their brackets and commas before they are parsed: a megabyte of tiny ones would cost seconds.
    """
    text = bytes(raw)
    if text[:1] == b'"':
        return [decode(raw, str, "prompt")]
    if text[:1] != b"[":
        raise invalid("prompt must be text, a list of texts, token ids or a list of token ids", "prompt")
    second = text[1:65].lstrip()[:1]
    if second == b"]":
        raise invalid("prompt is an empty list", "prompt")
    if second in b"0123456789-":
        if (commas := text.count(b",")) >= context and b"[" not in text[1:] and b'"' not in text:
            raise _too_long(commas + 1, context)
        return [decode(raw, list[int], "prompt")]
    if second == b"[" and b'"' not in text and text.count(b"[") - 1 > settings.max_choices:
        raise _too_many(text.count(b"[") - 1, settings)
    found: list[str | list[int]] = decode(raw, list[str | list[int]], "prompt")
    if len(found) > settings.max_choices:
        raise _too_many(len(found), settings)
    for place, prompt in enumerate(found):
        if not prompt:
            raise invalid(f"prompt[{place}] is empty: at least one token is needed", "prompt")
    return found


async def encode(llm: "AsyncLLM", text: str, field: str, *, special: bool, settings: ServerSettings) -> list[int]:
    """Token ids of a text of the request's ``field``, however many they are, made in a thread. Raises: ApiError, InvalidRequest."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    if size > settings.max_tokenize_bytes:
        raise invalid(f"{field} has {size} bytes; texts of at most {settings.max_tokenize_bytes} are tokenized beyond the context", field)
    return await asyncio.to_thread(llm.inputs.encode, text, field, add_special_tokens=special)


async def tokenize(
    llm: "AsyncLLM", given: str | list[int], request: Generation, room: int, *, special: bool, settings: ServerSettings, field: str = "prompt"
) -> Prompt:
    """One prompt as checked token ids; ``room`` is what truncate_prompt_tokens=-1 leaves of it. Raises: RequestError, ApiError."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        if isinstance(given, list):
            return _checked(llm, given, None, field)
        try:
            return await llm.tokenize(given, add_special_tokens=special)
        except RequestError as error:
            raise type(error)(error.message, field if error.param == "prompt" else error.param) from None
    if keep == 0 or keep < -1:
        raise invalid(f"truncate_prompt_tokens must be at least 1, or -1 for what the context holds, not {keep}", "truncate_prompt_tokens")
    keep = room if keep == -1 else keep
    if keep > room:
        raise invalid(f"truncate_prompt_tokens is {keep}; the context leaves room for a prompt of {room} tokens", "truncate_prompt_tokens")
    ids = given if isinstance(given, list) else await encode(llm, given, field, special=special, settings=settings)
    if request.truncation_side == "right":
        kept = ids[:keep]
    elif request.truncation_side in (None, "left"):
        kept = ids[-keep:]
    else:
        raise invalid(f'truncation_side must be "left" or "right", not {request.truncation_side!r}', "truncation_side")
    return _checked(llm, kept, given if len(kept) == len(ids) and isinstance(given, str) else None, field)


def _checked(llm: "AsyncLLM", ids: list[int], text: str | None, field: str) -> Prompt:
    try:
        return llm.inputs.prompt({"prompt": text, "prompt_token_ids": ids})
    except RequestError as error:  # in a request the field has another name
        raise type(error)(error.message.replace("prompt_token_ids", field), field) from None


async def each(prompts: Sequence[Any], work: Callable[[Any], Awaitable[Prompt]]) -> list[Prompt]:
    """Tokenize all prompts; an error says which of several is meant."""

    async def one(place: int) -> Prompt:
        try:
            return await work(prompts[place])
        except RequestError as error:
            if len(prompts) == 1:
                raise
            raise type(error)(f"prompt[{place}]: {error.message}", error.param) from None

    if len(prompts) == 1:
        return [await one(0)]
    tasks = [asyncio.ensure_future(one(place)) for place in range(len(prompts))]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _too_long(length: int, context: int) -> ContextTooLong:
    return ContextTooLong(
        f"the prompt has {length} tokens; the context holds {context}, prompt and output together, "
        f"so a prompt may have at most {context - 1}", "prompt",
    )


def _too_many(count: int, settings: ServerSettings) -> ApiError:
    return invalid(f"prompt has {count} prompts; at most {settings.max_choices} are accepted in one request (prompts × n)", "prompt")
