"""POST /v1/chat/completions."""

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.inputs import check_priority
from octavo.engine.places import Places
from octavo.server.answers import ChatChoice, ChatMessage, ChatResponse
from octavo.server.body import read_json
from octavo.server.collect import chat_logprobs
from octavo.server.context import Context
from octavo.server.errors import invalid
from octavo.server.fields import check_messages, check_room, check_stream, check_tools, check_unserved, free_json, sampling, template_options
from octavo.server.generation import Job, encode, respond
from octavo.server.merge import while_connected
from octavo.server.prompts import tokenize
from octavo.server.schema import ChatRequest, Json


async def chat_completions(context: Context, http: Request) -> Response:
    """Answer a conversation. Raises: ApiError, OctavoError, Disconnected."""
    request = await read_json(http, ChatRequest, context.settings)
    with context.llm.places() as places:
        job, lead = await while_connected(http.receive, prepare(context, request, http, places))
        return await respond(http, job, ChatFormat(job, request, lead))


async def prepare(context: Context, request: ChatRequest, http: Request, places: Places) -> tuple[Job, str]:
    """Check everything, render and tokenize. → the job, and the text that its answers begin with (echo).

    Raises: ApiError, RequestError, QueueFull (before rendering).
    """
    llm, settings = context.llm, context.settings
    context.check_model(request.model)
    answer_id = context.new_id("chatcmpl", request.request_id, http)
    tenant = context.tenant(request.user, http)
    tools = check_tools(request)
    check_unserved(request, ChatRequest)
    check_stream(request)
    field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    asked = getattr(request, field)
    params = sampling(
        request, llm.defaults, settings, llm.vocab_size, max_tokens=asked, logprobs=_alternatives(request), prompt_logprobs=request.prompt_logprobs,
        max_tokens_field=field,
    )
    llm.inputs.check(params)
    check_priority(request.priority or 0, llm.config.scheduler.policy)
    messages = check_messages(request.messages, llm.max_model_len, developer=llm.template is not None and llm.template.mentions("developer"))
    options = template_options(request)
    documents = free_json(request.documents, list[Json], "documents")
    places.take(params.num_sequences)
    text = await llm.render(messages, tools=tools, documents=documents, **options)
    room = llm.max_model_len - (asked or 1)
    prompt = await tokenize(llm, text, request, room, special=bool(request.add_special_tokens), settings=settings, field="messages")
    llm.inputs.check_room(prompt, params, "messages")
    check_room(len(prompt.ids), asked, llm.max_model_len, field)
    job = Job(context, request, answer_id, [prompt], params, params.n, places, tenant=tenant, arrival=http.scope["state"]["arrival"])
    return job, _lead(request, messages)


def _alternatives(request: ChatRequest) -> int | None:
    """SamplingParams.logprobs: None, or the number of alternatives. Raises: ApiError."""
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise invalid(f"top_logprobs is {request.top_logprobs}, and logprobs is not true", "top_logprobs")
    return None


def _lead(request: ChatRequest, messages: list[Json]) -> str:
    last = messages[-1]
    if not request.echo or last["role"] != "assistant":
        return ""
    content = last["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())


class ChatFormat:
    """Writes chat completions."""

    object = "chat.completion.chunk"

    def __init__(self, job: Job, request: ChatRequest, lead: str) -> None:
        self._job = job
        self._ids = bool(request.return_token_ids)
        self._prompt_logprobs = request.prompt_logprobs is not None
        self._top = (request.top_logprobs or 0) if request.logprobs else None
        self._lead = lead

    def opening(self) -> list[bytes]:
        """One chunk a choice that says whose message it is, with what is echoed."""
        lead = encode(self._lead)
        prompt = b',"prompt_token_ids":' + encode(self._job.prompts[0].ids) if self._ids else b""
        form = b'{"index":%d,"delta":{"role":"assistant","content":%b},"logprobs":null,"finish_reason":null%b}'
        return [form % (index, lead, prompt) for index in range(len(self._job.choices))]

    def piece(self, index: int, *, first: bool) -> bytes:
        """What is new of a choice."""
        job = self._job
        choice = job.choices[index]
        text, ids, rows = choice.take()
        delta = b'"content":' + encode(text) if text or choice.finish_reason is None else b""
        logprobs = b"null" if self._top is None or not ids else encode(chat_logprobs(ids, rows, self._top, job.speller))
        extra = b""
        if first and self._prompt_logprobs:
            extra += b',"prompt_logprobs":' + encode(job.prompt_logprobs.get(0))
        if self._ids:
            extra += b',"token_ids":' + encode(ids)
        if choice.finish_reason is None:
            return b'{"index":%d,"delta":{%b},"logprobs":%b,"finish_reason":null%b}' % (index, delta, logprobs, extra)
        end, stop = encode(choice.finish_reason), encode(choice.stop_reason)
        return b'{"index":%d,"delta":{%b},"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b}' % (index, delta, logprobs, end, stop, extra)

    def whole(self) -> ChatResponse:
        """The answer."""
        job = self._job
        return ChatResponse(
            job.id, "chat.completion", job.created, job.context.model, job.context.fingerprint, [self._choice(i) for i in range(len(job.choices))],
            job.usage(), prompt_logprobs=job.prompt_logprobs.get(0) if self._prompt_logprobs else UNSET,
            prompt_token_ids=job.prompts[0].ids if self._ids else UNSET,
        )

    def _choice(self, index: int) -> ChatChoice:
        choice = self._job.choices[index]
        text, ids, rows = choice.take()
        logprobs = None if self._top is None else chat_logprobs(ids, rows, self._top, self._job.speller)
        return ChatChoice(
            index, ChatMessage("assistant", self._lead + text), logprobs, choice.finish_reason, choice.stop_reason,
            token_ids=ids if self._ids else UNSET,
        )
