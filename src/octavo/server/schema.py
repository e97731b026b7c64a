"""The request bodies: every field of OpenAI's documented requests and of vLLM's extras, typed.

Parsed by msgspec into these structs: strict (no text for a number), and fast enough that megabytes of prompt cost milliseconds of the event
loop. Large or free-form values stay raw JSON until something needs them (fields.py, prompts.py). Bounds written here are for the OpenAPI
document; SamplingParams and fields.py check them, with messages that say the numbers.
"""

from typing import Annotated, Any

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from octavo.core.sampling import MOST_COUNT, MOST_LENGTH_PENALTY
from octavo.engine.inputs import PRIORITIES

Json = dict[str, Any]
DEFAULT_MAX_TOKENS = 16  # of a completion, as the API has it; less where the context leaves less


def bounded(low: float | None = None, high: float | None = None, **more: Any) -> Meta:
    """Bounds for the document only."""
    schema = {key: value for key, value in (("minimum", low), ("maximum", high)) if value is not None}
    return Meta(extra_json_schema=schema | more)


# What is accepted and changes nothing.
NO_EFFECT = Meta(description="Accepted; has no effect.")
NoOp = Annotated[Raw, NO_EFFECT]
SALTED = Meta(description="Cached prefixes are shared only between requests with the same one.")
TENANT = Meta(description="Whose share of the engine this is, where neither API key nor X-Tenant says.")
STREAMED = Meta(description="Only with stream true.")
BEAMS = Meta(description="The n best sequences of a search with best_of beams. A stream gets each whole, when all are found.")
NOT_SERVED = "Not served yet: only values that ask for nothing are accepted."


def unserved(*harmless: Any) -> Any:
    """A field that this version does not serve: null and ``harmless`` values are accepted, others are a 400 that names the field (fields.py)."""
    return Annotated[Raw, Meta(description=NOT_SERVED, extra_json_schema={"enum": [None, *harmless]})]


Unserved = unserved()

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1}, _IDS,
        {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string", "minLength": 1}, _IDS]}},
    ]
}
CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/components/schemas/Part"}}, {"type": "null"}]}
STOP_SCHEMA = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string", "minLength": 1}}, {"type": "null"}]}
OBJECTS_SCHEMA = {"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]}
OBJECT_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "null"}]}
ROLES = ("system", "developer", "user", "assistant", "tool")

Ids = list[Annotated[int, bounded(0)]]
Stop = Annotated[Raw, Meta(extra_json_schema=STOP_SCHEMA)]


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stream tells besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[bool | None, NO_EFFECT] = None  # a no-op: nothing is obfuscated


class Generation(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that completions and chat completions share."""

    model: str | None = None
    # sampling
    n: Annotated[int | None, bounded(1)] = None
    temperature: Annotated[float | None, bounded(0)] = None
    top_p: Annotated[float | None, bounded(None, 1, exclusiveMinimum=0)] = None
    top_k: Annotated[int | None, bounded(-1, MOST_COUNT)] = None
    min_p: Annotated[float | None, bounded(0, 1)] = None
    presence_penalty: Annotated[float | None, bounded(-2, 2)] = None
    frequency_penalty: Annotated[float | None, bounded(-2, 2)] = None
    repetition_penalty: Annotated[float | None, bounded(exclusiveMinimum=0)] = None
    seed: Annotated[int | None, bounded(-(2**63), 2**64 - 1)] = None
    stop: Stop = None  # type: ignore[assignment]  # raw, so that one text and a list need no union of their own
    stop_token_ids: Ids | None = None
    bad_words: list[Annotated[str, bounded(minLength=1)]] | None = None
    logit_bias: dict[int, Annotated[float, bounded(-100, 100)]] | None = None
    allowed_token_ids: Ids | None = None
    use_beam_search: Annotated[bool | None, BEAMS] = None
    best_of: Annotated[int | None, bounded(1)] = None  # the number of beams; without use_beam_search only n itself is served
    length_penalty: Annotated[float | None, bounded(-MOST_LENGTH_PENALTY, MOST_LENGTH_PENALTY)] = None
    early_stopping: Annotated[bool | str | None, bounded(enum=[True, False, "never", None])] = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int | None, bounded(0, MOST_COUNT)] = None
    prompt_logprobs: Annotated[int | None, bounded(-1, MOST_COUNT)] = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    # the prompt and the shape of the answer
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int | None, bounded(-1, MOST_COUNT)] = None
    truncation_side: Annotated[str | None, bounded(enum=["left", "right", None])] = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, STREAMED] = None
    priority: Annotated[int | None, bounded(-PRIORITIES, PRIORITIES - 1)] = None
    cache_salt: Annotated[str | None, SALTED, bounded(minLength=1)] = None
    request_id: Annotated[str | None, bounded(pattern="^[!-~]{1,128}$")] = None
    user: Annotated[str | None, bounded(maxLength=256), TENANT] = None
    # accepted, without effect
    spaces_between_special_tokens: Annotated[bool | None, NO_EFFECT] = None
    # known, not served
    response_format: unserved({"type": "text"}) = None  # type: ignore[valid-type]
    structured_outputs: Unserved = None  # type: ignore[assignment]
    guided_json: Unserved = None  # type: ignore[assignment]
    guided_regex: Unserved = None  # type: ignore[assignment]
    guided_choice: Unserved = None  # type: ignore[assignment]
    guided_grammar: Unserved = None  # type: ignore[assignment]
    guided_decoding_backend: unserved("auto") = None  # type: ignore[valid-type]
    guided_whitespace_pattern: Unserved = None  # type: ignore[assignment]
    structural_tag: Unserved = None  # type: ignore[assignment]
    logits_processors: unserved([]) = None  # type: ignore[valid-type]
    kv_transfer_params: Unserved = None  # type: ignore[assignment]
    vllm_xargs: unserved({}) = None  # type: ignore[valid-type]
    repetition_detection: Unserved = None  # type: ignore[assignment]
    lora_request: Unserved = None  # type: ignore[assignment]


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: Annotated[Raw, Meta(extra_json_schema=PROMPT_SCHEMA)]
    max_tokens: Annotated[int | UnsetType | None, bounded(0, MOST_COUNT, default=DEFAULT_MAX_TOKENS)] = UNSET
    logprobs: Annotated[int | None, bounded(-1, MOST_COUNT)] = None
    suffix: unserved("") = None  # type: ignore[valid-type]
    prompt_embeds: Unserved = None  # type: ignore[assignment]


class Part(Struct, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One part of a message's content; text is what is served."""

    type: Annotated[str, bounded(enum=["text", "refusal"])]
    text: str | None = None
    refusal: str | None = None
    prompt_cache_breakpoint: NoOp = None  # type: ignore[assignment]
    cache_control: NoOp = None  # type: ignore[assignment]
    # parts of other types, refused by their type
    image_url: Unserved = None  # type: ignore[assignment]
    input_audio: Unserved = None  # type: ignore[assignment]
    audio_url: Unserved = None  # type: ignore[assignment]
    video_url: Unserved = None  # type: ignore[assignment]
    file: Unserved = None  # type: ignore[assignment]
    uuid: Unserved = None  # type: ignore[assignment]


class Message(Struct, kw_only=True, forbid_unknown_fields=True):
    """One message. An answer's own message, sent back whole, is one too."""

    role: Annotated[str, bounded(enum=list(ROLES))]
    content: Annotated[Raw, Meta(extra_json_schema=CONTENT_SCHEMA)] = None  # type: ignore[assignment]
    name: str | None = None
    tool_calls: Annotated[Raw, Meta(extra_json_schema=OBJECTS_SCHEMA)] = None  # type: ignore[assignment]
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    annotations: NoOp = None  # type: ignore[assignment]
    audio: Unserved = None  # type: ignore[assignment]
    function_call: Unserved = None  # type: ignore[assignment]


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], bounded(minItems=1)]
    max_tokens: Annotated[int | None, bounded(1, MOST_COUNT)] = None
    max_completion_tokens: Annotated[int | None, bounded(1, MOST_COUNT)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, bounded(-1, MOST_COUNT)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[Raw, Meta(extra_json_schema=OBJECT_SCHEMA)] = None  # type: ignore[assignment]
    documents: Annotated[Raw, Meta(extra_json_schema=OBJECTS_SCHEMA)] = None  # type: ignore[assignment]
    tools: Annotated[Raw, Meta(extra_json_schema=OBJECTS_SCHEMA)] = None  # type: ignore[assignment]  # shown to the template with tool_choice none
    tool_choice: unserved("none") = None  # type: ignore[valid-type]
    # accepted, without effect
    store: Annotated[bool | None, NO_EFFECT] = None
    metadata: NoOp = None  # type: ignore[assignment]
    service_tier: Annotated[str | None, NO_EFFECT] = None
    safety_identifier: Annotated[str | None, NO_EFFECT] = None
    prompt_cache_key: Annotated[str | None, NO_EFFECT] = None
    prompt_cache_retention: Annotated[str | None, NO_EFFECT] = None
    prompt_cache_options: NoOp = None  # type: ignore[assignment]
    parallel_tool_calls: Annotated[bool | None, NO_EFFECT] = None
    include_reasoning: Annotated[bool | None, NO_EFFECT] = None
    mm_processor_kwargs: NoOp = None  # type: ignore[assignment]
    media_io_kwargs: NoOp = None  # type: ignore[assignment]
    # known, not served
    audio: Unserved = None  # type: ignore[assignment]
    modalities: unserved(["text"]) = None  # type: ignore[valid-type]
    prediction: Unserved = None  # type: ignore[assignment]
    web_search_options: Unserved = None  # type: ignore[assignment]
    functions: unserved([]) = None  # type: ignore[valid-type]
    function_call: unserved("none") = None  # type: ignore[valid-type]
    reasoning_effort: unserved("none") = None  # type: ignore[valid-type]
    reasoning: Unserved = None  # type: ignore[assignment]
    thinking_token_budget: Unserved = None  # type: ignore[assignment]
    verbosity: unserved("medium") = None  # type: ignore[valid-type]
    moderation: Unserved = None  # type: ignore[assignment]
    chat_template: Unserved = None  # type: ignore[assignment]  # a client's template is a program; the server's own is used


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None  # true for a prompt, false for messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: Annotated[Raw, Meta(extra_json_schema=OBJECT_SCHEMA)] = None  # type: ignore[assignment]
    tools: Annotated[Raw, Meta(extra_json_schema=OBJECTS_SCHEMA)] = None  # type: ignore[assignment]


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: Ids
    model: str | None = None


class AnyCompletionRequest(CompletionRequest, forbid_unknown_fields=False):
    """The same, ignoring fields that nobody knows."""


class AnyChatRequest(ChatRequest, forbid_unknown_fields=False):
    """The same, ignoring fields that nobody knows."""


class AnyTokenizeRequest(TokenizeRequest, forbid_unknown_fields=False):
    """The same, ignoring fields that nobody knows."""


class AnyDetokenizeRequest(DetokenizeRequest, forbid_unknown_fields=False):
    """The same, ignoring fields that nobody knows."""


RELAXED: dict[type, type] = {
    CompletionRequest: AnyCompletionRequest, ChatRequest: AnyChatRequest, TokenizeRequest: AnyTokenizeRequest,
    DetokenizeRequest: AnyDetokenizeRequest,
}
