"""The small routes: models, tokenize, detokenize, health, version, load, reset_prefix_cache."""

from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.places import Places
from octavo.errors import InvalidRequest
from octavo.server.answers import DetokenizeResponse, Health, Load, ModelCard, ModelList, TokenizeResponse, Version
from octavo.server.body import read_json
from octavo.server.context import Context
from octavo.server.errors import invalid
from octavo.server.fields import check_messages, free_json, template_options
from octavo.server.merge import while_connected
from octavo.server.prompts import encode
from octavo.server.schema import DetokenizeRequest, Json, TokenizeRequest

_TIMES_THE_CONTEXT = 4  # token ids of one /detokenize


def reply(body: msgspec.Struct, status: int = 200) -> Response:
    """A struct as JSON."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def models(context: Context, http: Request) -> Response:
    """GET /v1/models."""
    return reply(ModelList("list", [_card(context, name) for name in context.names]))


async def model(context: Context, http: Request) -> Response:
    """GET /v1/models/{id}; an id may hold slashes."""
    name = http.path_params["model_id"]
    context.check_model(name)
    return reply(_card(context, name))


def _card(context: Context, name: str) -> ModelCard:
    return ModelCard(name, "model", context.created, "octavo", str(context.llm.config.model.model), None, context.llm.max_model_len)


async def tokenize(context: Context, http: Request) -> Response:
    """POST /tokenize: token ids of a prompt, or of messages as the chat template renders them. Counts as one that waits, like a completion."""
    request = await read_json(http, TokenizeRequest, context.settings)
    with context.llm.places() as places:
        return reply(await while_connected(http.receive, _tokenized(context, request, places)))


async def _tokenized(context: Context, request: TokenizeRequest, places: Places) -> TokenizeResponse:
    llm = context.llm
    context.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    special = request.add_special_tokens
    tools, options = free_json(request.tools, list[Json], "tools"), template_options(request)  # checked with a prompt too
    places.take()
    if request.messages is not None:
        messages = check_messages(request.messages, llm.max_model_len, developer=llm.template is not None and llm.template.mentions("developer"))
        text = await llm.render(messages, tools=tools, **options)
        ids = await encode(llm, text, "messages", special=bool(special), settings=context.settings)
    else:
        ids = await encode(llm, request.prompt or "", "prompt", special=special is not False, settings=context.settings)
    strings = None
    if request.return_token_strs:
        strings = await llm.in_thread(lambda: [llm.tokenizer.id_to_token(token) or "" for token in ids])
    return TokenizeResponse(len(ids), llm.max_model_len, ids, strings)


async def detokenize(context: Context, http: Request) -> Response:
    """POST /detokenize: the text of token ids, special tokens spelled out."""
    request = await read_json(http, DetokenizeRequest, context.settings)
    llm = context.llm
    context.check_model(request.model)
    if llm.tokenizer is None:
        raise InvalidRequest("this model came without a tokenizer", "tokens")
    tokens, most = request.tokens, _TIMES_THE_CONTEXT * llm.max_model_len
    if len(tokens) > most:
        raise invalid(f"tokens has {len(tokens)} entries; at most {most} are accepted, {_TIMES_THE_CONTEXT} times the context", "tokens")
    if tokens and not 0 <= min(tokens) <= max(tokens) < llm.vocab_size:
        place = next(place for place, token in enumerate(tokens) if not 0 <= token < llm.vocab_size)
        raise invalid(f"tokens[{place}] is {str(tokens[place])[:40]}; the vocabulary has the ids 0 to {llm.vocab_size - 1}", "tokens")
    with llm.places() as places:
        places.take()
        work = llm.in_thread(partial(llm.tokenizer.decode, tokens, skip_special_tokens=False))
        return reply(DetokenizeResponse(await while_connected(http.receive, work)))


async def health(context: Context, http: Request) -> Response:
    """GET /health: 200 while the engine lives and waiting work makes progress, else 503 with the reason."""
    reason = context.llm.health()
    return reply(Health("ok")) if reason is None else reply(Health("unhealthy", reason), 503)


async def ping(context: Context, http: Request) -> Response:
    """GET /ping: whether this process answers at all."""
    return reply(Health("ok"))


async def version(context: Context, http: Request) -> Response:
    """GET /version."""
    from octavo import __version__

    return reply(Version(__version__))


async def reset_prefix_cache(context: Context, http: Request) -> Response:
    """POST /reset_prefix_cache: 200 once no cached prefix can be found any more; requests that run lose nothing. Without a body, as vLLM's."""
    await context.llm.reset_prefix_cache()
    return Response()


async def load(context: Context, http: Request) -> Response:
    """GET /load: how many requests are open."""
    return reply(Load(context.llm.num_open))
