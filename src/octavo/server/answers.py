"""The response bodies, as structs: what is encoded is what the OpenAPI document says."""

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from octavo.core.output import Logprob

PromptLogprobs = list[dict[str, Logprob] | None]


class PromptTokensDetails(Struct):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class Usage(Struct):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(Struct):
    """The legacy format: parallel lists, one entry a token. ``text_offset`` counts characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(Struct):
    """The answer of /v1/completions."""

    id: str
    object: Annotated[str, Meta(extra_json_schema={"const": "text_completion"})]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(Struct):
    """A candidate. ``bytes`` are exact where ``token`` is a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    """A token of the answer and the most likely candidates in its place."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """The chat format."""

    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(Struct):
    """The answer's message."""

    role: Annotated[str, Meta(extra_json_schema={"const": "assistant"})]
    content: str
    refusal: None = None


class ChatChoice(Struct):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatResponse(Struct):
    """The answer of /v1/chat/completions."""

    id: str
    object: Annotated[str, Meta(extra_json_schema={"const": "chat.completion"})]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: None = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelCard(Struct):
    """A model that is served."""

    id: str
    object: Annotated[str, Meta(extra_json_schema={"const": "model"})]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(Struct):
    """GET /v1/models."""

    object: Annotated[str, Meta(extra_json_schema={"const": "list"})]
    data: list[ModelCard]


class TokenizeResponse(Struct):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(Struct):
    """The answer of /detokenize."""

    prompt: str


class Version(Struct):
    """GET /version."""

    version: str


class Health(Struct):
    """GET /health: ok, or why not."""

    status: str
    reason: str | None = None


class Load(Struct):
    """GET /load: requests that are open."""

    server_load: int
