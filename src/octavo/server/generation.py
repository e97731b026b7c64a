"""One request's life: prompts to the engine, news back, as one JSON body or as server-sent events. Both APIs run through here."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.output import CompletionOutput, RequestOutput
from octavo.core.sampling import SamplingParams
from octavo.engine.inputs import Prompt
from octavo.engine.places import Places
from octavo.server.answers import PromptLogprobs, PromptTokensDetails, Usage
from octavo.server.collect import Choice, Speller
from octavo.server.context import Context
from octavo.server.errors import ApiError
from octavo.server.merge import Merged, while_connected
from octavo.server.schema import Generation
from octavo.server.stream import DONE, EventStream

encode = msgspec.json.encode


@dataclass(slots=True, eq=False)
class Job:
    """A checked request, ready to run: every prompt gets ``params``, and choice p·n + i is the i-th answer to prompt p."""

    context: Context
    request: Generation
    id: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    n: int  # answers per prompt; params.n is 1 where only the prompt is wanted
    places: Places  # in the queue, for all of them
    prompt_only: bool = False  # echo with max_tokens 0: nothing is generated
    tenant: str = ""
    arrival: float | None = None  # when the HTTP request came in: its times count from there
    created: int = field(default_factory=lambda: int(time.time()))
    given: int = field(init=False)  # tokens of all prompts
    made: int = 0  # tokens of all answers
    cached: int = 0  # prompt tokens that the cache had
    prompt_logprobs: dict[int, PromptLogprobs | None] = field(default_factory=dict)  # by prompt
    choices: list[Choice] = field(init=False)
    speller: Speller = field(init=False)

    def __post_init__(self) -> None:
        tokenizer = self.context.llm.tokenizer
        self.given = sum(len(prompt.ids) for prompt in self.prompts)
        self.choices = [Choice(textless=tokenizer is None) for _ in range(self.n * len(self.prompts))]
        self.speller = Speller(tokenizer, bool(self.request.return_tokens_as_token_ids))

    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(self.given, self.made, self.given + self.made, PromptTokensDetails(self.cached))

    async def start(self) -> Merged:
        """Hand every prompt to the engine. Raises: what it refuses one with; then none is left running."""
        llm, urgency, salt = self.context.llm, self.request.priority or 0, self.request.cache_salt or ""
        generators: list[AsyncGenerator[RequestOutput, None]] = []
        try:
            for prompt in self.prompts:
                if generators:
                    await asyncio.sleep(0)  # a thousand prompts at once would hold everybody else up
                if self.prompt_only and self.params.prompt_logprobs is None:
                    generators.append(_unrun(prompt))
                else:
                    name, salted = self.context.engine_id(self.id), replace(prompt, cache_salt=salt)
                    generators.append(llm.generate(
                        salted, self.params, request_id=name, priority=urgency, tenant=self.tenant, arrival=self.arrival, places=self.places))
        except BaseException:
            for generator in generators:
                await generator.aclose()
            raise
        return Merged(generators)

    def take_in(self, place: int, output: RequestOutput) -> list[int]:
        """Add a prompt's news to its choices. → which. Raises: ApiError when the engine gave a choice up."""
        if place not in self.prompt_logprobs:
            self.prompt_logprobs[place] = output.prompt_logprobs
            self.cached += output.num_cached_tokens
        touched = []
        for news in self._answers(output):
            if news.finish_reason == "error":
                raise ApiError(500, f"the engine failed on this request: {news.stop_reason}", code="engine_error")
            if news.finish_reason == "abort":
                raise ApiError(503, "the server ended this request before it was finished", code="aborted")
            index = place * self.n + news.index
            self.choices[index].add(news)
            self.made += len(news.token_ids)
            touched.append(index)
        return touched


    def _answers(self, output: RequestOutput) -> list[CompletionOutput]:
        """The news of the n answers; where only the prompt is wanted, the one token that the engine needs to score it is no news."""
        if not self.prompt_only or any(sample.finish_reason in ("error", "abort") for sample in output.outputs):
            return output.outputs
        return [CompletionOutput(index, "", [], finish_reason="length") for index in range(self.n)] if output.finished else []


class Format(Protocol):
    """How an API writes answers."""

    object: str  # of streamed chunks

    def opening(self) -> list[bytes]:
        """Choices (JSON) that a stream begins with, before there is news."""

    def piece(self, index: int, *, first: bool) -> bytes:
        """What is new of a choice, as JSON; takes it. ``first``: nothing of it was told yet."""

    def whole(self) -> msgspec.Struct:
        """The answer that is not streamed."""


async def respond(http: Request, job: Job, form: Format) -> Response:
    """Run a job. Raises: ApiError, OctavoError; Disconnected when the client went (then nothing runs any more)."""
    if not job.request.stream:
        return Response(encode(await while_connected(http.receive, _gather(job, form))), media_type="application/json")
    merged = await job.start()
    return EventStream(events(job, form, merged), merged.close)


async def _gather(job: Job, form: Format) -> msgspec.Struct:
    merged = await job.start()
    try:
        async with aclosing(merged.news()) as news:
            async for place, output in news:
                job.take_in(place, output)
    finally:
        await merged.close()
    return form.whole()


async def events(job: Job, form: Format, merged: Merged) -> AsyncIterator[bytes]:
    """The server-sent events of a job, some at a time. The parts that never change are encoded once."""
    options = job.request.stream_options
    totals = options is not None and bool(options.include_usage)
    running = totals and options is not None and bool(options.continuous_usage_stats)
    interval = job.context.settings.stream_interval
    fixed = {"id": job.id, "object": form.object, "created": job.created, "model": job.context.model, "system_fingerprint": job.context.fingerprint}
    head = b"data: " + encode(fixed)[:-1] + b',"choices":['
    plain_tail = b'],"usage":null}\n\n' if totals else b"]}\n\n"

    def tail() -> bytes:
        return b'],"usage":' + encode(job.usage()) + b"}\n\n" if running else plain_tail

    if opening := form.opening():
        yield b"".join([head + choice + tail() for choice in opening])
    async with aclosing(merged.news()) as news:
        async for place, output in news:
            out = b""
            for index in job.take_in(place, output):
                choice = job.choices[index]
                if choice.ready(interval):
                    out += head + form.piece(index, first=not choice.said) + tail()
            if out:
                yield out
    if totals:
        yield head + b'],"usage":' + encode(job.usage()) + b"}\n\n"
    yield DONE


async def _unrun(prompt: Prompt) -> AsyncGenerator[RequestOutput, None]:
    """The answer to a prompt that needs no engine: it is only echoed."""
    yield RequestOutput("", prompt.text, prompt.ids, finished=True)
