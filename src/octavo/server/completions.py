"""POST /v1/completions."""

import codecs
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.inputs import Prompt, check_priority
from octavo.engine.places import Places
from octavo.server.answers import CompletionChoice, CompletionLogprobs, CompletionResponse
from octavo.server.body import read_json
from octavo.server.collect import Offsets, completion_logprobs
from octavo.server.context import Context
from octavo.server.errors import invalid
from octavo.server.fields import check_room, check_stream, check_unserved, sampling
from octavo.server.generation import Job, encode, respond
from octavo.server.merge import while_connected
from octavo.server.prompts import each, parse_prompts, tokenize
from octavo.server.schema import DEFAULT_MAX_TOKENS, CompletionRequest


async def completions(context: Context, http: Request) -> Response:
    """Complete prompts. Raises: ApiError, OctavoError, Disconnected."""
    request = await read_json(http, CompletionRequest, context.settings)
    with context.llm.places() as places:
        job = await while_connected(http.receive, prepare(context, request, http, places))
        return await respond(http, job, CompletionFormat(job, request))


async def prepare(context: Context, request: CompletionRequest, http: Request, places: Places) -> Job:
    """Check everything, tokenize, and nothing more. Raises: ApiError, RequestError, QueueFull (before tokenizing)."""
    llm, settings = context.llm, context.settings
    context.check_model(request.model)
    answer_id = context.new_id("cmpl", request.request_id, http)
    tenant = context.tenant(request.user, http)
    check_unserved(request, CompletionRequest)
    check_stream(request)
    asked = None if request.max_tokens is UNSET else request.max_tokens  # unset: so many, or what the context leaves
    usual = DEFAULT_MAX_TOKENS if request.max_tokens is UNSET else asked
    prompt_only = asked == 0
    if prompt_only and not request.echo:
        raise invalid("max_tokens is 0: that needs echo, and gives the prompt back", "max_tokens")
    scores = request.prompt_logprobs
    if request.echo and scores is None:
        scores = request.logprobs
    params = sampling(
        request, llm.defaults, settings, llm.vocab_size, max_tokens=1 if prompt_only else usual, logprobs=request.logprobs,
        prompt_logprobs=scores,
    )
    llm.inputs.check(params)
    check_priority(request.priority or 0, llm.config.scheduler.policy)
    given = parse_prompts(request.prompt, llm.max_model_len, settings)
    count = len(given) * params.num_sequences
    if count > settings.max_choices:
        each_asks = f"{params.width_field}={params.num_sequences}"
        raise invalid(f"{len(given)} prompts with {each_asks} ask for {count} answers; at most {settings.max_choices} are given", params.width_field)
    places.take(len(given) if prompt_only else count)
    room = max(1, llm.max_model_len - (usual or 1))
    special = request.add_special_tokens is not False

    async def ready(prompt: str | list[int], field: str) -> Prompt:
        found = await tokenize(llm, prompt, request, room, special=special, settings=settings, field=field)
        if not prompt_only:
            llm.inputs.check_room(found, params, field)
        return found

    prompts = await each(given, ready)
    for prompt in prompts:
        check_room(len(prompt.ids), asked, llm.max_model_len)
    n = params.n
    if prompt_only:  # one run scores the prompt for all n
        params = msgspec.structs.replace(
            params, n=1, logprobs=None, use_beam_search=False, best_of=None, length_penalty=1.0, early_stopping=False
        )
    return Job(context, request, answer_id, prompts, params, n, places, prompt_only, tenant, http.scope["state"]["arrival"])


class CompletionFormat:
    """Writes text completions."""

    object = "text_completion"

    def __init__(self, job: Job, request: CompletionRequest) -> None:
        self._job = job
        self._request = request
        self._top = request.logprobs
        self._tokenizer = job.context.llm.tokenizer
        self._offsets: dict[int, Offsets] = {}

    def opening(self) -> list[bytes]:
        """Nothing comes before the first text."""
        return []

    def piece(self, index: int, *, first: bool) -> bytes:
        """What is new of a choice."""
        return encode(self._choice(index, first)) if first or self._top is not None or self._request.return_token_ids else self._short(index)

    def whole(self) -> CompletionResponse:
        """The answer."""
        job = self._job
        choices = [self._choice(index, True) for index in range(len(job.choices))]
        return CompletionResponse(job.id, self.object, job.created, job.context.model, job.context.fingerprint, choices, job.usage())

    def _short(self, index: int) -> bytes:
        """The same without struct and options: almost every chunk is this."""
        choice = self._job.choices[index]
        text, _, _ = choice.take()
        end = b"null" if choice.finish_reason is None else encode(choice.finish_reason)
        stop = b"null" if choice.stop_reason is None else encode(choice.stop_reason)
        return b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b,"stop_reason":%b}' % (index, encode(text), end, stop)

    def _choice(self, index: int, first: bool) -> CompletionChoice:
        job, request = self._job, self._request
        choice, place = job.choices[index], index // job.n
        prompt, scores = job.prompts[place], job.prompt_logprobs.get(place)
        text, ids, rows = choice.take()
        logprobs = None if self._top is None else self._logprobs(index, ids, rows)
        if first and request.echo:
            text = self._prompt_text(prompt) + text
            if logprobs is not None and scores is not None:
                echoed = completion_logprobs(prompt.ids, scores, request.logprobs or 0, job.speller, self._prompt_offsets(prompt))
                logprobs = _joined(echoed, logprobs)
        return CompletionChoice(
            index, text, logprobs, choice.finish_reason, choice.stop_reason,
            prompt_logprobs=scores if first and request.prompt_logprobs is not None else UNSET,
            token_ids=ids if request.return_token_ids else UNSET,
            prompt_token_ids=prompt.ids if first and request.return_token_ids else UNSET,
        )

    def _logprobs(self, index: int, ids: list[int], rows: list[Any]) -> CompletionLogprobs:
        """Of new tokens of an answer; offsets go on from the last ones, or from the echoed prompt's end."""
        offsets = self._offsets.get(index)
        if offsets is None:
            prompt = self._job.prompts[index // self._job.n]
            at = len(self._prompt_text(prompt)) if self._request.echo else 0
            skipped = self._tokenizer.special_ids if self._tokenizer is not None and self._job.params.skip_special_tokens else frozenset()
            offsets = self._offsets[index] = Offsets(self._tokenizer, skipped, at)
        return completion_logprobs(ids, rows, self._top or 0, self._job.speller, [offsets.next(token) for token in ids])

    def _prompt_text(self, prompt: Prompt) -> str:
        """The prompt as it was given; ids as their text, less a character that they leave open and the answer completes."""
        if prompt.text is not None or self._tokenizer is None:
            return prompt.text or ""
        data = self._tokenizer.visible_bytes(prompt.ids, self._job.params.skip_special_tokens)
        if self._tokenizer.strip_first_space:
            data = data.removeprefix(b" ")
        return codecs.getincrementaldecoder("utf-8")("replace").decode(data)

    def _prompt_offsets(self, prompt: Prompt) -> list[int]:
        """Where the prompt's tokens lie in its text. Tokens that were added to the text have no place of their own in it."""
        tokenizer, text = self._tokenizer, self._prompt_text(prompt)
        if tokenizer is None:
            return [0] * len(prompt.ids)
        skipped = tokenizer.special_ids if prompt.text is None and self._job.params.skip_special_tokens else frozenset()
        offsets = Offsets(tokenizer, skipped, strip=tokenizer.strip_first_space)
        added = len(tokenizer.prefix) if prompt.text is not None and tuple(prompt.ids[: len(tokenizer.prefix)]) == tokenizer.prefix else 0
        if added and text.startswith(tokenizer.decode(tokenizer.prefix, skip_special_tokens=False)):
            added = 0  # the text itself begins with them
        found = [0] * added + [offsets.next(token) for token in prompt.ids[added:]]
        return [min(at, len(text)) for at in found]  # a tokenizer may rewrite a text (NFC), so lengths can differ


def _joined(one: CompletionLogprobs, two: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        one.tokens + two.tokens, one.token_logprobs + two.token_logprobs, one.top_logprobs + two.top_logprobs, one.text_offset + two.text_offset,
    )
