"""What a request may ask for: fields that are known and not served, limits, and the SamplingParams that come out."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, get_type_hints

import msgspec
from msgspec import Raw

from octavo.core.sampling import BEAM_NEUTRAL, SamplingParams
from octavo.errors import ContextTooLong, InvalidRequest
from octavo.server.body import MOST_MESSAGES, TooMany, count_marks, decode, first_byte, outside_strings, shown
from octavo.server.errors import ApiError, invalid, unserved
from octavo.server.schema import NOT_SERVED, ROLES, ChatRequest, CompletionRequest, Generation, Json, Message, Part, TokenizeRequest
from octavo.server.settings import ServerSettings

SAMPLING = (  # fields that are SamplingParams' own; None leaves the model's default
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids",
    "bad_words", "ignore_eos", "min_tokens", "skip_special_tokens", "include_stop_str_in_output", "logit_bias", "allowed_token_ids",
    "use_beam_search", "best_of", "length_penalty", "early_stopping",
)
_MOST_SMALL = 1000  # bytes: a harmless value of an unserved field is shorter
_MOST_PARTS = 16_384  # of all messages of a request; each is looked at in Python
MOST_FREE_BYTES = 2**20  # of tools, of documents, of chat_template_kwargs, of all messages' tool_calls
MOST_FREE_VALUES = 50_000  # in each of them: they are built on the event loop, copied, and gone through by the template


class _Head(msgspec.Struct, gc=False):
    """The least that a part must have. Decoding ends at the first one too many."""

    type: str
    made: ClassVar[int] = 0

    def __post_init__(self) -> None:
        _Head.made += 1
        if _Head.made > _MOST_PARTS:
            raise TooMany


def _unserved_fields(kind: type) -> dict[str, tuple[Any, ...]]:
    """The fields of a request that are not served, and their values that ask for nothing."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for meta in getattr(hint, "__metadata__", ()):
            if isinstance(meta, msgspec.Meta) and meta.description == NOT_SERVED:
                found[name] = tuple((meta.extra_json_schema or {})["enum"])
    return found


UNSERVED = {kind: _unserved_fields(kind) for kind in (CompletionRequest, ChatRequest, Message, Part)}


def check_unserved(item: Any, kind: type, where: str = "") -> None:
    """Raises: ApiError for a field that asks for what is not served, naming it."""
    for name, harmless in UNSERVED[kind].items():
        raw = getattr(item, name)
        if raw is None or first_byte(raw) == b"n":
            continue
        field = f"{where}.{name}" if where else name
        # As JSON: to Python, false is 0.
        if memoryview(raw).nbytes > _MOST_SMALL or _json(decode(raw, Any, field)) not in map(_json, harmless):
            more = "".join(f"; {_json(value)} asks for nothing" for value in harmless if value is not None)
            raise unserved(f"{field} is known and not served by this version: leave it out{more}", field)


def free_json(raw: Raw | None, kind: Any, field: str) -> Any:
    """A raw field as ``kind``, or None where it is absent or null. Raises: ApiError."""
    if raw is None or first_byte(raw) == b"n":
        return None
    size = memoryview(raw).nbytes
    if size > MOST_FREE_BYTES:
        raise invalid(f"{field} has {size} bytes; at most {MOST_FREE_BYTES} are accepted", field)
    if size > MOST_FREE_VALUES and (found := _count_values(bytes(raw))) > MOST_FREE_VALUES:
        raise invalid(f"{field} has {found} values; at most {MOST_FREE_VALUES} are accepted", field)
    return decode(raw, kind, field)


def _count_values(text: bytes) -> int:
    """How many values JSON holds, all of them at any depth, give or take the empty containers; an upper bound where that is few."""
    marks = b",[{"
    rough = count_marks(text, marks) + 1
    return rough if rough <= MOST_FREE_VALUES else count_marks(outside_strings(text), marks) + 1


def check_tools(request: ChatRequest) -> list[Json] | None:
    """Tools for the template to show. Raises: ApiError unless tool_choice is "none": calls are not served yet."""
    tools = free_json(request.tools, list[Json], "tools")
    if not tools:
        return None
    if free_json(request.tool_choice, Any, "tool_choice") != "none":
        raise unserved('tools are shown to the model with tool_choice "none" only: tool calls are not served by this version', "tools")
    return list(tools)


def check_stream(request: Generation) -> None:
    """Raises: ApiError for options of a stream where none is asked for."""
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options are given, and stream is not true: ask for a stream, or leave them out", "stream_options")


def sampling(
    request: Generation, defaults: SamplingParams, settings: ServerSettings, vocab: int, *, max_tokens: int | None, logprobs: int | None,
    prompt_logprobs: int | None, max_tokens_field: str = "max_tokens",
) -> SamplingParams:
    """The parameters that a request asks for, on top of the model's own. Raises: ApiError, naming the field."""
    given = {name: value for name in SAMPLING if (value := getattr(request, name)) is not None}
    given["stop"] = stop_strings(request.stop, settings)
    n = given.get("n", 1)
    if n > settings.max_n:
        raise invalid(f"n is {n}; at most {settings.max_n} answers to one prompt are given", "n")
    if (width := given.get("best_of", n)) > settings.max_n:
        raise invalid(f"best_of is {width}; at most {settings.max_n} sequences are ranked", "best_of")
    _check_sizes(given, settings, vocab)
    if request.cache_salt == "":
        raise invalid("cache_salt is empty: give a text, or leave it out", "cache_salt")
    given["max_tokens"] = defaults.max_tokens if max_tokens is None else max_tokens
    if max_tokens is None and given["max_tokens"] is not None and given.get("min_tokens", 0) > given["max_tokens"]:
        given["max_tokens"] = None  # the model's own limit gives way to what the request asks for
    base = {name: getattr(defaults, name) for name in defaults.__struct_fields__}
    if request.use_beam_search:  # how the model likes to be sampled is not asked: nothing is sampled
        base = {name: value for name, value in base.items() if name not in BEAM_NEUTRAL}
    try:
        return SamplingParams(**(base | given | {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}))
    except InvalidRequest as error:
        if error.param == "max_tokens":
            raise invalid(error.message.replace("max_tokens", max_tokens_field), max_tokens_field) from None
        raise


def stop_strings(raw: Raw | None, settings: ServerSettings) -> list[str]:
    """One stop string or several. Raises: ApiError beyond the limits."""
    if raw is None:
        return []
    if (size := memoryview(raw).nbytes) > settings.max_stop * (12 * settings.max_stop_chars + 8):  # the longest that JSON can spell a string
        most = f"at most {settings.max_stop} strings of at most {settings.max_stop_chars} characters"
        raise invalid(f"stop has {size} bytes; {most} are accepted", "stop")
    given = decode(raw, str | list[str] | None, "stop")
    stops = [given] if isinstance(given, str) else given or []
    if len(stops) > settings.max_stop:
        raise invalid(f"stop has {len(stops)} strings; at most {settings.max_stop} are accepted", "stop")
    for place, text in enumerate(stops):
        if len(text) > settings.max_stop_chars:
            raise invalid(f"stop[{place}] has {len(text)} characters; at most {settings.max_stop_chars} are accepted", "stop")
        if not text:
            raise invalid(f"stop[{place}] is empty: it would stop everything at once", "stop")
    return stops


def check_messages(messages: Sequence[Message], context: int, *, developer: bool) -> list[Json]:
    """Messages as chat templates take them. Without ``developer`` that role becomes system.

    Raises: ApiError, naming the message and its field.
    """
    if not messages:
        raise invalid("messages is empty: at least one is needed", "messages")
    if len(messages) > context:
        raise ContextTooLong(f"messages has {len(messages)} entries; the context holds {context} tokens", "messages")
    if len(messages) > MOST_MESSAGES:
        raise invalid(f"messages has {len(messages)} entries; at most {MOST_MESSAGES} are accepted", "messages")
    calls = [message.tool_calls for message in messages if message.tool_calls is not None]
    if (size := sum(memoryview(raw).nbytes for raw in calls)) > MOST_FREE_BYTES:
        raise invalid(f"the tool_calls of all messages have {size} bytes; at most {MOST_FREE_BYTES} are accepted", "messages")
    if len(calls) > 1 and size > MOST_FREE_VALUES and (found := _count_values(b",".join(map(bytes, calls)))) > MOST_FREE_VALUES:
        raise invalid(f"the tool_calls of all messages have {found} values; at most {MOST_FREE_VALUES} are accepted", "messages")
    parts = 0
    rendered = []
    for place, message in enumerate(messages):
        rendered.append(_message(message, f"messages[{place}]", developer))
        if isinstance(content := rendered[-1]["content"], list) and (parts := parts + len(content)) > _MOST_PARTS:
            raise invalid(f"messages have more than {_MOST_PARTS} parts, the last of them in messages[{place}]", f"messages[{place}].content")
    return rendered


def _message(message: Message, where: str, developer: bool) -> Json:
    role = message.role
    if role not in ROLES:
        raise invalid(f"{where}.role is {shown(role)!r}; the roles are {', '.join(ROLES)}", f"{where}.role")
    check_unserved(message, Message, where)
    content = _content(message.content, f"{where}.content")
    calls = free_json(message.tool_calls, list[Json], f"{where}.tool_calls")
    if calls and role != "assistant":
        raise invalid(f"{where}.tool_calls belongs to the role assistant, not {role}", f"{where}.tool_calls")
    if content is None and message.refusal and role == "assistant":
        content = message.refusal
    if content is None and not calls:
        raise invalid(f"{where}.content is missing: text, or a list of text parts", f"{where}.content")
    rendered: Json = {"role": "system" if role == "developer" and not developer else role, "content": content}
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            rendered[name] = value
    if calls:
        rendered["tool_calls"] = calls
    return rendered


def _content(raw: Raw | None, where: str) -> Any:
    if raw is None:
        return None
    first = first_byte(raw)
    if first == b'"':
        return decode(raw, str, where)
    if first == b"[" and count_marks(bytes(raw), b"{") > _MOST_PARTS:
        _Head.made = 0
        try:
            decode(raw, list[_Head], where)
        except TooMany:
            raise invalid(f"{where} has more than {_MOST_PARTS} parts; at most so many are accepted", where) from None
    parts = decode(raw, list[Part] | None, where) if first in (b"[", b"n") else decode(raw, str | list[Part] | None, where)
    if parts is None:
        return None
    return [{"type": "text", "text": _part(part, f"{where}[{place}]")} for place, part in enumerate(parts)]


def _part(part: Part, where: str) -> str:
    if part.type not in ("text", "refusal"):
        raise unserved(f"{where}.type is {shown(part.type)!r}: only text parts are served", f"{where}.type")
    check_unserved(part, Part, where)
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise invalid(f"{where}.{part.type} is missing", f"{where}.{part.type}")
    return text


def template_options(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """What a request hands to the chat template besides messages and tools. Raises: ApiError."""
    continued = bool(request.continue_final_message)
    begins = not continued if request.add_generation_prompt is None else request.add_generation_prompt
    variables: Mapping[str, Any] | None = free_json(request.chat_template_kwargs, Json, "chat_template_kwargs")
    return {"add_generation_prompt": begins, "continue_final_message": continued, "variables": variables}


def check_room(length: int, asked: int | None, context: int, field: str = "max_tokens") -> None:
    """Raises: ApiError when a prompt of ``length`` tokens and ``asked`` more go beyond the context."""
    if asked is not None and length + asked > context:
        raise ApiError(
            400, f"{field} is {asked} and the prompt has {length} tokens; the context holds {context}, so {field} may be at most {context - length}",
            field, "context_length_exceeded",
        )


def _check_sizes(given: Mapping[str, Any], settings: ServerSettings, vocab: int) -> None:
    """Lists that would take long to look through, or to tokenize, are refused by their lengths."""
    limits = (
        ("logit_bias", settings.max_logit_bias), ("bad_words", settings.max_bad_words), ("stop_token_ids", vocab), ("allowed_token_ids", vocab),
    )
    for name, most in limits:
        if (size := len(given.get(name, ()))) > most:
            raise invalid(f"{name} has {size} entries; at most {most} are accepted", name)
    for place, word in enumerate(given.get("bad_words", ())):
        if len(word) > settings.max_bad_word_chars:
            raise invalid(f"bad_words[{place}] has {len(word)} characters; at most {settings.max_bad_word_chars} are accepted", "bad_words")


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
