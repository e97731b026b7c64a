"""From an HTTP request to a checked struct: size, content type, JSON, types. What is wrong is told with the field's name."""

import difflib
import gc
import json
import re
from functools import cache
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from starlette.requests import Request

from octavo.server.errors import ApiError, invalid
from octavo.server.schema import RELAXED, Message
from octavo.server.settings import ServerSettings

T = TypeVar("T")

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_LONGEST_NAME = 64  # of a field for which a similar one is looked for
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*?)`", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`")
_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {}
_MOST_SCANNED = 2**18  # bytes of a malformed body that are looked through once more for a NaN
_LARGE = 2**20  # bytes: the lists of a larger body are measured before they are decoded
MOST_MESSAGES = 16_384  # of one request; each is looked at in Python
_MOST_ENTRIES = 2**20  # of any other list or object of a request's own: more than a vocabulary has
_MOST_SHOWN = 200  # characters of a client's text in a message


async def read_json(request: Request, kind: type[T], settings: ServerSettings) -> T:
    """The body as ``kind``. Raises: ApiError 400, 413, 415."""
    _check_type(request)
    body = await _read(request, settings.max_body_bytes)
    kind = RELAXED[kind] if settings.allow_unknown_fields else kind
    return decode(body, kind) if len(body) <= _LARGE else decode_measured(body, kind)


def decode_measured(body: bytes, kind: type[T]) -> T:
    """A large body as ``kind``: the same as decode(), but no list is built before its length is known to be bearable.

    Decoding holds the interpreter's lock, so a thread would not help: what costs seconds must not be decoded. Each field
    is decoded once, whatever the number of times that the body repeats it. Raises: ApiError 400, naming the field.
    """
    twin, containers = _raw_twin(kind)
    held = decode(body, twin)
    given = {name: getattr(held, name) for name in twin.__struct_fields__}
    for name, hint in containers.items():
        if (raw := given[name]) is None:
            continue
        if name == "messages":
            given[name] = _decode_messages(raw)
            continue
        if (found := count_marks(bytes(raw), b",") + 1) > _MOST_ENTRIES:
            raise invalid(f"{name} has {found} entries; at most {_MOST_ENTRIES} are accepted", name)
        given[name] = decode(raw, hint, name)
    return kind(**given)


def _decode_messages(raw: msgspec.Raw) -> Any:
    _Counted.made = 0  # nothing else decodes meanwhile: all of this is one call on the event loop
    try:
        return decode(raw, list[_Counted] | None, "messages")
    except TooMany:
        raise invalid(f"messages has more than {MOST_MESSAGES} entries; at most so many are accepted", "messages") from None


def count_marks(text: bytes, marks: bytes) -> int:
    """How often any of some bytes stand in a text. In time that does not depend on how often, unlike bytes.count()."""
    return len(text) - len(text.translate(None, marks))


def unescaped(text: bytes) -> bytes:
    """JSON without escaped backslashes and quotes: every quote that is left begins or ends a string."""
    return text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text


def outside_strings(text: bytes) -> bytes:
    """JSON without its strings."""
    return b"".join(unescaped(text).split(b'"')[::2])


def decode(body: bytes | msgspec.Raw, kind: Any, at: str = "") -> Any:
    """JSON as ``kind``; ``at`` is the field that the text was in. Raises: ApiError 400."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.json.Decoder(kind)
    # A hundred thousand containers set off the collector again and again, which takes longer than the parsing; there are no cycles in JSON.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error), at, getattr(kind, "__struct_encode_fields__", ())) from None
    except RecursionError:
        raise invalid(f"{at or 'the body'} is nested too deeply", at or None) from None
    except msgspec.DecodeError as error:
        raise _malformed(bytes(body), str(error), at) from None
    except UnicodeDecodeError:
        raise invalid(f"{at or 'the body'} is not valid UTF-8", at or None) from None
    finally:
        if collecting:
            gc.enable()


def first_byte(raw: msgspec.Raw) -> bytes:
    """What kind of JSON it is: a quote, a bracket, n for null …."""
    return bytes(memoryview(raw)[:1])


def shown(text: str) -> str:
    """A client's text, cut to what fits a message."""
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "…"


class TooMany(Exception):
    """A list goes on beyond what is accepted."""


class _Counted(Message):
    """A message of a large body. Decoding ends at the first one too many."""

    made: ClassVar[int] = 0

    def __post_init__(self) -> None:
        _Counted.made += 1
        if _Counted.made > MOST_MESSAGES:
            raise TooMany


@cache
def _raw_twin(kind: type) -> tuple[type[msgspec.Struct], dict[str, Any]]:
    """``kind`` with its lists and objects left raw, and the types of those."""
    hints = get_type_hints(kind, include_extras=True)
    containers, fields = {}, []
    for field in msgspec.structs.fields(kind):
        hint = hints[field.name]
        held = _is_container(hint)
        if held:
            containers[field.name] = hint
        shape = msgspec.Raw if held else hint
        fields.append((field.name, shape) if field.required else (field.name, shape, field.default))
    config = kind.__struct_config__  # type: ignore[attr-defined]
    return msgspec.defstruct(kind.__name__, fields, kw_only=True, forbid_unknown_fields=config.forbid_unknown_fields), containers


def _is_container(hint: Any) -> bool:
    """Whether values of a type are built from arbitrarily many: lists and dictionaries, alone or in a union."""
    return get_origin(hint) in (list, dict) or any(_is_container(part) for part in get_args(hint))


def _check_type(request: Request) -> None:
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, f"the content type must be application/json, not {shown(given) or 'missing'}", "content-type")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(415, f"the content encoding {shown(encoding)!r} is not served: send the body as it is", "content-encoding")


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
        raise _too_large(limit, f"{declared[:20]} bytes")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit, "more")
        parts.append(part)
    return b"".join(parts)


def _too_large(limit: int, size: str) -> ApiError:
    # What is left of the body is dropped, and not all of it is waited for (http.py), so the connection cannot be used again.
    return ApiError(413, f"the body has {size}; at most {limit} bytes are accepted", code="request_too_large", headers={"Connection": "close"})


def _invalid_field(message: str, at: str, fields: tuple[str, ...]) -> ApiError:
    """``fields``: those that there are, at the top."""
    found = _PATH.search(message)
    path = found["path"] if found else ""
    if found:
        message = message[: found.start()]
    for pattern in (_UNKNOWN, _MISSING):
        if named := pattern.match(message):
            path = f"{path}.{named['name']}" if path else named["name"]
            path = _joined(at, path)
            if pattern is _UNKNOWN:
                close = [] if found or len(named["name"]) > _LONGEST_NAME else difflib.get_close_matches(named["name"], fields, 1)
                hint = f": did you mean {close[0]!r}?" if close else ""
                return ApiError(400, f"unknown field {shown(path)!r}{hint}", shown(path), "unknown_parameter")
            return invalid(f"{path} is missing", path)
    param = _joined(at, path)
    message = message[:1].lower() + message[1:].replace("`", "")
    return invalid(f"{param or 'the body'}: {shown(message)}", param or None)


def _joined(at: str, path: str) -> str:
    return at + path if not at or path.startswith("[") else f"{at}.{path}" if path else at


def _malformed(body: bytes, message: str, at: str) -> ApiError:
    """Not JSON. Python writes NaN and Infinity all the same, so the field that holds one is looked for; lone surrogates too."""
    if len(body) <= _MOST_SCANNED:
        try:
            found = _odd(json.loads(body, parse_constant=_Constant))
        except (ValueError, RecursionError):
            found = None
        if found is not None:
            path, what = _joined(at, found[0].removeprefix(".")), found[1]
            return invalid(f"{path or 'the body'} {what}", path or None)
    return invalid(f"{at or 'the body'} is not valid JSON: {message}", at or None)


class _Constant:
    def __init__(self, name: str) -> None:
        self.name = name


def _odd(value: Any, path: str = "") -> tuple[str, str] | None:
    """Where a value holds what JSON cannot; and what."""
    if isinstance(value, _Constant):
        return path, f"is {value.name}, which is no JSON number"
    if isinstance(value, str):
        where = next((i for i, char in enumerate(value) if "\ud800" <= char <= "\udfff"), None)
        return None if where is None else (path, f"is not valid Unicode: character {where} is a lone surrogate")
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        if isinstance(key, str) and _odd(key):
            return path, "has a name that is not valid Unicode: it holds a lone surrogate"
        found = _odd(child, f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}")
        if found is not None:
            return found
    return None
