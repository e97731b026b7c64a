"""What the HTTP server lets clients do: names, keys and limits."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.errors import ConfigError

MiB = 2**20
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of the HTTP app. ``served_model_names`` empty: the model argument's own name; the first is shown in answers."""

    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()  # any of them opens every route; none: no key is asked for
    key_names: tuple[tuple[str, str], ...] = ()  # (key, name) of those that have one: the tenant of what they open
    allow_unknown_fields: bool = False
    cors_origins: tuple[str, ...] = ()  # "*" for all; none: no CORS headers
    stream_interval: int = 1  # tokens per streamed chunk, from the second chunk on
    max_body_bytes: int = 32 * MiB
    max_tokenize_bytes: int = 2 * MiB  # of a text whose tokens may be more than the context: /tokenize, truncate_prompt_tokens
    max_n: int = 128
    max_choices: int = 2048  # prompts × n of one request
    max_stop: int = 64
    max_stop_chars: int = 1024
    max_logit_bias: int = 1024
    max_bad_words: int = 256  # each is tokenized twice
    max_bad_word_chars: int = 256


def named_keys(given: Sequence[str]) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """API keys, each written as KEY or NAME=KEY. → the keys, and (key, name) of those that have one.

    The first = divides, so a key with one inside is written with a name, or as =KEY; those at a key's end are its own.

    Raises: ConfigError for an empty key, an impossible name, or a key with two names. The message holds no key.
    """
    keys: list[str] = []
    names: dict[str, str] = {}
    for place, text in enumerate(given, 1):
        name, _, key = text.partition("=")
        if not key.strip("=") and name:  # no name: what base64 ends with
            name, key = "", text
        if not key:
            raise ConfigError(f"API key {place} is empty", "api_key")
        if name and not _NAME.fullmatch(name):
            raise ConfigError(
                f"the name of API key {place} must be 1 to 64 letters, digits or _ . @ -; a key that has = inside and no name is written =KEY",
                "api_key",
            )
        if name and names.setdefault(key, name) != name:
            raise ConfigError(f"API key {place} is named {name!r}, and {names[key]!r} before", "api_key")
        keys.append(key)
    return tuple(keys), tuple(names.items())
