"""The prompts of a completion request: text, token ids, or a list of them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Raw

from octavo.engine.inputs import Prompt
from octavo.errors import ContextTooLong, RequestError
from octavo.server.body import count_marks, decode, unescaped
from octavo.server.errors import ApiError, invalid
from octavo.server.schema import Generation
from octavo.server.settings import ServerSettings

_SMALL = 2**16  # bytes: what a list of prompts of this size may hold is soon decoded
_MOST_IDS = 2**20  # of all prompts of a request that are lists of token ids

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
    second = text[1:65].lstrip()[:1] or text[1:].lstrip()[:1]
    if second == b"]":
        raise invalid("prompt is an empty list", "prompt")
    if second in b"0123456789-":
        ends = [at for mark in (b"[", b'"', b"{") if (at := text.find(mark, 1)) > 0]  # what follows is no token id and is not decoded
        if (commas := count_marks(text[: min(ends, default=len(text))], b",")) >= context:
            raise _too_long(commas + 1, context)
        return [decode(raw, list[int], "prompt")]
    _measure(text, context, settings)
    found: list[str | list[int]] = decode(raw, list[str | list[int]], "prompt")
    if len(found) > settings.max_choices:
        raise _too_many(len(found), settings)
    for place, prompt in enumerate(found):
        if not prompt:
            raise invalid(f"prompt[{place}] is empty: at least one token is needed", f"prompt[{place}]")
    return found


def _measure(text: bytes, context: int, settings: ServerSettings) -> None:
    """Refuse a list of prompts with too many of them, or too many token ids in all, before it is decoded. Raises: ApiError."""
    most = max(_MOST_IDS, context)
    if len(text) <= _SMALL:
        return
    bare = unescaped(text)
    texts = count_marks(bare, b'"') // 2 if b'"' in text else 0
    if texts <= settings.max_choices:
        outside = b"".join(bare.split(b'"')[::2]) if texts else text
        lists = count_marks(outside, b"[") - 1
        if texts + lists <= settings.max_choices:
            if lists and (ids := count_marks(outside, b",") + 1) > most:
                raise invalid(f"the prompts have {ids} token ids in all; at most {most} are accepted in one request", "prompt")
            return
        texts += lists
    raise _too_many(texts, settings)


async def encode(llm: "AsyncLLM", text: str, field: str, *, special: bool, settings: ServerSettings) -> list[int]:
    """Token ids of a text of the request's ``field``, however many they are, made in a thread. Raises: ApiError, InvalidRequest."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    if size > settings.max_tokenize_bytes:
        raise invalid(f"{field} has {size} bytes; texts of at most {settings.max_tokenize_bytes} are tokenized beyond the context", field)
    return await llm.in_thread(partial(llm.inputs.encode, text, field, add_special_tokens=special))


async def tokenize(
    llm: "AsyncLLM", given: str | list[int], request: Generation, room: int, *, special: bool, settings: ServerSettings, field: str = "prompt"
) -> Prompt:
    """One prompt as checked token ids; ``room`` is what truncate_prompt_tokens=-1 leaves of it. Raises: RequestError, ApiError."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        if isinstance(given, list):
            if len(given) >= llm.max_model_len:  # before each id is looked at
                raise _too_long(len(given), llm.max_model_len, field)
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


async def each(prompts: Sequence[Any], work: Callable[[Any, str], Awaitable[Prompt]]) -> list[Prompt]:
    """Tokenize all prompts; ``work`` gets each and its field's name, so that an error says which of several is meant."""

    async def one(place: int) -> Prompt:
        field = f"prompt[{place}]"
        try:
            return await work(prompts[place], field)
        except RequestError as error:
            message = error.message if error.message.startswith(field) else f"{field}: {error.message}"
            raise type(error)(message, error.param) from None

    if len(prompts) == 1:
        return [await work(prompts[0], "prompt")]
    tasks = {place: asyncio.ensure_future(one(place)) for place, prompt in enumerate(prompts) if isinstance(prompt, str)}
    found: list[Prompt] = []
    try:
        for place in range(len(prompts)):
            if (task := tasks.get(place)) is None:
                found.append(await one(place))
                await asyncio.sleep(0)  # token ids are checked here and now: others have a turn between
            else:
                found.append(await task)
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    return found


def _too_long(length: int, context: int, field: str = "prompt") -> ContextTooLong:
    return ContextTooLong(
        f"the prompt has {length} tokens; the context holds {context}, prompt and output together, "
        f"so a prompt may have at most {context - 1}", field,
    )


def _too_many(count: int, settings: ServerSettings) -> ApiError:
    return invalid(f"prompt has {count} prompts; at most {settings.max_choices} are accepted in one request (prompts × n)", "prompt")
