"""What the HTTP server lets clients do: names, keys and limits."""

from dataclasses import dataclass

MiB = 2**20


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of the HTTP app. ``served_model_names`` empty: the model argument's own name; the first is shown in answers."""

    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()  # any of them opens every route; none: no key is asked for
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
