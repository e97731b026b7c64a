"""AsyncLLM: the engine in a process of its own, for callers on an event loop. The server is made of it.

This process holds what has to do with text: template, tokenizer (in threads), detokenizer, stop strings. One event loop
runs it all; nothing here is safe to call from other threads.
"""

import asyncio
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from octavo.config import Config
from octavo.core.sampling import SamplingParams
from octavo.engine.console import LOGGER, show_log
from octavo.engine.generation import Flight, Generation
from octavo.engine.inputs import Inputs, Prompt
from octavo.engine.messages import Abort, Add, Batch, Begin, End, EngineStats, FromEngine, Note, Progress, Ready
from octavo.engine.outputs import Answer
from octavo.engine.report import LogReport, Report, phase
from octavo.engine.settings import make_config
from octavo.errors import Cancelled, ConfigError, ContextTooLong, InvalidRequest, OctavoError, QueueFull, WorkerDied
from octavo.observe.events import Admitted, Preempted

if TYPE_CHECKING:
    from octavo.engine.client import EngineClient
    from octavo.engine.textside import TextSide
    from octavo.runner.memory import Ledger

T = TypeVar("T")
STALL_SECONDS = 60.0  # without a step while work is unfinished: the engine hangs. The longest step of a large model on few cores takes less
TEXT_THREADS = 4  # a long prompt in one must not hold up the short ones
MOST_RETRY_SECONDS = 60
PRIORITIES = 2**63


class Listener(Protocol):
    """Hears what happens to sequences, on the event loop; ``sequence`` is an id in the engine. Once per sequence and in this order:"""

    def arrived(self, sequences: Iterable[str], num_prompt: int, params: SamplingParams, arrival: float) -> None:
        """A request was accepted; its n sequences."""

    def batch(self, batch: Batch, now: float) -> None:
        """One step's news, before they are handed out."""

    def ended(self, sequence: str, reason: str, now: float) -> None:
        """A sequence is over, for the reason that its caller is told: stop (a stop string too), length, abort, error."""


class AsyncLLM:
    """A model that answers many callers at once.

    Settings are LLM's. Making it launches the engine's process and reads the tokenizer meanwhile; ``await start()``, or
    ``async with``, waits until the engine is ready. ``max_num_queued_reqs`` bounds the sequences that wait (None: no bound).

    Raises: ConfigError, CheckpointError, UnsupportedError, here or in start().
    """

    def __init__(
        self, model: str | os.PathLike[str], *, report: Report | None = None, max_num_queued_reqs: int | None = None, **settings: Any,
    ) -> None:
        from octavo.engine.process import launch

        most = _queue_bound(max_num_queued_reqs)
        config = make_config(model, **settings)
        if report is None:
            show_log()
            report = LogReport(LOGGER)
        handle = launch(config, report)
        try:
            from octavo.engine.client import ProcessClient
            from octavo.engine.textside import read_text

            with phase(report, "reading the tokenizer"):
                text, vocab = read_text(config, handle.path)
        except BaseException:
            handle.close()
            raise
        if text.tokenizer is None:
            report.note("no tokenizer came with the model: prompts must be token ids, and outputs have no text")
        self._init(ProcessClient(handle), config, text, vocab, report, most)

    @classmethod
    def over(cls, client: "EngineClient", config: Config, text: "TextSide", vocab: int, *, max_num_queued_reqs: int | None = None) -> "AsyncLLM":
        """An AsyncLLM over another engine than a new process: how tests script one."""
        made = cls.__new__(cls)
        made._init(client, config, text, vocab, LogReport(LOGGER), _queue_bound(max_num_queued_reqs))
        return made

    def _init(self, client: "EngineClient", config: Config, text: "TextSide", vocab: int, report: Report, most: int | None) -> None:
        self.config = config  # final once started
        self.vocab_size = vocab
        self.tokenizer, self.template, self.defaults = text.tokenizer, text.template, text.defaults
        self.listeners: list[Listener] = []
        self.stats = EngineStats()
        self.failure: str | None = None  # why the engine can answer no more
        self.on_death = asyncio.Event()  # set when it cannot, unless it was shut down
        self.stall_seconds = STALL_SECONDS
        self.inputs: Inputs  # once started; so are the next three
        self.max_model_len: int
        self.ledger: Ledger
        self.instruction_set: str
        self._client = client
        self._text = text
        self._report = report
        self._most_queued = most
        self._pool = ThreadPoolExecutor(TEXT_THREADS, "octavo-text")
        self._longest_token = text.longest_token()
        self._ready: asyncio.Future[Ready] | None = None
        self._started = self._shut = False
        self._numbers = itertools.count()  # of requests: an id in the engine is never used twice
        self._flights: dict[str, Flight] = {}  # by request id; accepted and not ended
        self._sequences: dict[str, tuple[Flight, int]] = {}  # by id in the engine; its place among the n
        self._queued: set[str] = set()  # sequences that the scheduler has not admitted yet
        self._preparing = 0  # places held by what is being rendered or tokenized
        self._admissions: deque[float] = deque(maxlen=64)  # when the last ones were
        self._idle = asyncio.Event()
        self._idle.set()
        self._progress = 0.0  # when the engine last showed life, or was given work after a pause

    # -- start and end

    async def start(self) -> None:
        """Wait until the engine is ready. Its start-up is told to the report meanwhile.

        Raises: what a start can raise, as it was raised in the engine's process: ConfigError, CheckpointError … WorkerDied.
        """
        if self._started:
            return
        if self._shut:
            raise WorkerDied("this AsyncLLM was shut down; make a new one")
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._client.attach(self._on_message, self._on_end)
        ready = await asyncio.shield(self._ready)
        if self._started:
            return
        named = replace(ready.config.model, model=self.config.model.model, revision=self.config.model.revision)
        self.config, self.ledger, self.instruction_set = replace(ready.config, model=named), ready.ledger, ready.isa
        self.max_model_len = ready.config.scheduler.max_model_len
        self.inputs = Inputs(
            tokenizer=self.tokenizer, vocab=self.vocab_size, max_model_len=self.max_model_len, max_logprobs=ready.config.runner.max_logprobs,
            eos_ids=self._text.end_ids, seed=ready.config.runner.seed,
        )
        self._started = True

    async def drain(self, timeout: float | None = None) -> bool:
        """Wait until nothing is open, at most ``timeout`` seconds; whether that came about."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    async def shutdown(self) -> None:
        """End what is unfinished (its readers see finish_reason "abort"), and the engine's process. May be called twice."""
        self._shut = True
        self.failure = self.failure or "it was shut down"
        await self._client.stop()
        self._end_all(WorkerDied("the engine was shut down"))
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> "AsyncLLM":
        try:
            await self.start()
        except BaseException:
            await self.shutdown()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.shutdown()

    # -- facts

    @property
    def num_open(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self._flights)

    @property
    def num_waiting(self) -> int:
        """Sequences that were accepted and that the scheduler has not admitted yet."""
        return len(self._queued)

    @property
    def num_running(self) -> int:
        """Sequences running, after the engine's last step."""
        return self.stats.running

    def health(self) -> str | None:
        """None when all is well, else what is wrong."""
        if self.failure is not None:
            return self.failure
        if not self._started:
            return "the engine is starting"
        silent = time.monotonic() - self._progress
        if self._sequences and silent > self.stall_seconds:
            return f"the engine has made no step for {silent:.0f} s, and {len(self._sequences)} sequences are unfinished"
        return None

    # -- before the engine

    def check_room(self, n: int = 1) -> None:
        """Whether ``n`` more sequences may wait: ask before any work is spent on a request. Where nobody waits, any number may.

        Raises: QueueFull; WorkerDied.
        """
        self._check_alive()
        waiting, most = len(self._queued) + self._preparing, self._most_queued
        if most is not None and waiting and waiting + n > most:
            retry = self._retry_after(waiting)
            raise QueueFull(f"{waiting} requests wait, and the queue has room for {most} (max_num_queued_reqs): try again in {retry} s", None, retry)

    async def tokenize(self, prompt: Any, *, add_special_tokens: bool = True) -> Prompt:
        """Check and tokenize a prompt of any shape that LLM.generate takes, in a thread.

        Raises: InvalidRequest, ContextTooLong: the latter at once for a text that cannot fit whatever its tokens are.
        """
        if isinstance(prompt, Prompt):
            return prompt
        self._check_alive()
        with self._place():
            return await self._tokenize(prompt, add_special_tokens)

    async def render(self, messages: Sequence[Mapping[str, Any]], *, chat_template: str | None = None, **options: Any) -> str:
        """The text of a conversation by the model's chat template (text/chat_template.py), in a thread.

        Raises: InvalidRequest.
        """
        template = self.template
        if self.tokenizer is None or template is None:
            raise InvalidRequest("this model came without a tokenizer, so it has no chat template: complete token ids", "messages")

        def work() -> str:
            from octavo.text.chat_template import ChatTemplate

            chosen = template if chat_template is None else ChatTemplate.of(self.tokenizer, chat_template)
            return chosen.render(messages, **options)

        with self._place():
            return await self._in_pool(work)

    # -- answers

    def generate(
        self, prompt: Any, sampling_params: SamplingParams | None = None, *, request_id: str | None = None, priority: int = 0,
        add_special_tokens: bool = True, deltas: bool = True,
    ) -> Generation:
        """Answer one prompt: an async iterator over the news (``deltas``), or over everything so far each time.

        The request counts from this call on. A Prompt (from ``tokenize``) is queued at once; another is tokenized when the
        iteration begins. A slow reader gets fewer and larger pieces. Closing, cancelling or dropping it aborts the request.
        It ends with a finish_reason in each of the n sequences ("error": its stop_reason says what), or with WorkerDied.

        Raises: InvalidRequest, QueueFull (not for a Prompt: ask check_room before tokenizing), WorkerDied; ContextTooLong.
        """
        self._check_alive()
        params = self.defaults if sampling_params is None else sampling_params
        bad_words = self.inputs.check(params)
        if isinstance(priority, bool) or not isinstance(priority, int) or not -PRIORITIES <= priority < PRIORITIES:
            raise InvalidRequest(f"priority must be a whole number of 64 bits, not {priority!r}", "priority")
        if not isinstance(prompt, Prompt):
            self.check_room(params.n)
        flight = Flight(self._name(request_id), params)
        submit, start = partial(self._submit, flight, bad_words, priority), None
        if isinstance(prompt, Prompt):
            submit(prompt)
        else:
            start = partial(self._tokenize_and_submit, flight, prompt, add_special_tokens, submit)
            flight.reserved = params.n
            self._preparing += flight.reserved
        self._flights[flight.request_id] = flight
        self._idle.clear()
        return Generation(flight, start, self._leave, deltas=deltas, loop=asyncio.get_running_loop())

    async def abort(self, request_id: str) -> bool:
        """End a request: its reader sees finish_reason "abort". False when it is unknown or has ended."""
        flight = self._flights.get(request_id)
        if flight is None:
            return False
        if flight.open:
            self._client.send(Abort(list(flight.open)))
        else:  # in tokenization: nobody but its reader knows of it
            flight.error = Cancelled(f"request {request_id!r} was aborted before it began")
            self._forget(flight, "abort")
            flight.wake()
        return True

    async def abort_all(self) -> None:
        """End every open request."""
        for request_id in list(self._flights):
            await self.abort(request_id)

    # -- to the engine

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise WorkerDied(self.failure)
        if not self._started:
            raise WorkerDied("this AsyncLLM is not started: await start(), or use async with")

    def _name(self, given: str | None) -> str:
        if given is None:
            while (made := f"request-{next(self._numbers)}") in self._flights:
                pass
            return made
        if not isinstance(given, str) or not given:
            raise InvalidRequest(f"request_id must be a non-empty string, not {given!r}", "request_id")
        if given in self._flights:
            raise InvalidRequest(f"request id {given!r} is in use by an unfinished request", "request_id")
        return given

    @contextmanager
    def _place(self) -> Iterator[None]:
        """Count a text that is worked on as one that waits, so that a burst is refused before it is tokenized."""
        self._preparing += 1
        try:
            yield
        finally:
            self._preparing -= 1

    async def _in_pool(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def _tokenize(self, prompt: Any, add_special_tokens: bool) -> Prompt:
        self._check_size(prompt)
        return await self._in_pool(partial(self.inputs.prompt, prompt, add_special_tokens=add_special_tokens))

    async def _tokenize_and_submit(self, flight: Flight, prompt: Any, add_special_tokens: bool, submit: Callable[[Prompt], None]) -> None:
        checked = await self._tokenize(prompt, add_special_tokens)
        if not flight.gone:  # its reader, or the engine, may have left meanwhile
            submit(checked)

    def _check_size(self, prompt: Any) -> None:
        """Refuse a text that no tokenization can make fit, before any work: a token spells so many bytes at most."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is None else prompt
        if not isinstance(text, str) or self._longest_token is None:
            return
        most = self.max_model_len * self._longest_token
        if len(text) * 4 > most and (size := len(text.encode("utf-8", "surrogatepass"))) > most:
            raise ContextTooLong(
                f"the prompt has {size} bytes; the context holds {self.max_model_len} tokens, prompt and output together, of {self._longest_token} "
                f"bytes at most each, so no text above {most} bytes can fit, and a prompt may have at most {self.max_model_len - 1} tokens", "prompt",
            )

    def _submit(self, flight: Flight, bad_words: tuple[tuple[int, ...], ...], priority: int, prompt: Prompt) -> None:
        """Send a checked request. From here on its sequences are known, until each has ended."""
        self._check_alive()
        now = time.monotonic()
        requests = self.inputs.requests(
            f"{flight.request_id}~{next(self._numbers)}", prompt, flight.params, bad_words, arrival=now, priority=priority,
        )
        self._client.send(Add.of(requests, self.vocab_size))
        self._release(flight)
        flight.answer = Answer(flight.request_id, prompt, flight.params, self.tokenizer, now)
        if not self._sequences:
            self._progress = now
        for index, request in enumerate(requests):
            flight.open.add(request.id)
            self._queued.add(request.id)
            self._sequences[request.id] = flight, index
        self._tell("arrived", [request.id for request in requests], len(prompt.ids), flight.params, now)

    # -- from the engine

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, Batch):
            self._on_batch(message)
        elif isinstance(message, Ready):
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(message)
        elif isinstance(message, Begin):
            self._report.begin(message.phase)
        elif isinstance(message, Progress):
            self._report.progress(message.what, message.done, message.total)
        elif isinstance(message, End):
            self._report.end(message.phase, message.seconds)
        elif isinstance(message, Note):
            self._report.note(message.text)

    def _on_batch(self, batch: Batch) -> None:
        now = self._progress = time.monotonic()
        self.stats = batch.stats
        self._tell("batch", batch, now)
        for event in batch.events:
            if isinstance(event, Admitted | Preempted) and (found := self._sequences.get(event.request_id)) is not None:
                self._on_event(event, found[0], batch.begun)
        stopped = []
        for delta in batch.deltas:
            found = self._sequences.get(delta.request_id)
            if found is None:
                continue  # its reader left, or a stop string ended it
            flight, index = found
            assert flight.answer is not None
            try:
                by_text = flight.answer.apply(index, delta, now)
            except Exception as error:  # one answer's text is at fault, nobody else's
                LOGGER.exception("the text of request %s could not be made", flight.request_id)
                self._fail(flight, WorkerDied(f"the text of this answer could not be made: {type(error).__name__}: {error}"))
                continue
            if by_text:
                stopped.append(delta.request_id)
            if by_text or delta.finish_reason is not None:
                self._end_sequence(flight, delta.request_id, flight.answer.samples[index].finish_reason or "error", now)
            flight.wake()
        if stopped:
            self._client.send(Abort(stopped))

    def _on_event(self, event: Admitted | Preempted, flight: Flight, at: float) -> None:
        assert flight.answer is not None
        metrics = flight.answer.metrics
        if isinstance(event, Preempted):
            metrics.preemptions += 1
            return
        if metrics.first_scheduled is None:
            metrics.first_scheduled = at
        if event.request_id in self._queued:
            self._queued.remove(event.request_id)
            self._admissions.append(at)

    def _on_end(self, error: OctavoError) -> None:
        """The engine is gone: everybody hears of it."""
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # seen, even if nobody waits any more
        if not self._shut:
            self.failure = error.message if self._started else f"the engine could not start: {error.message}"
            if self._started:
                LOGGER.error("%s; %d requests end with it", self.failure, len(self._flights))
            self.on_death.set()
        self._end_all(WorkerDied(error.message))

    # -- the end of a request

    def _end_all(self, error: WorkerDied) -> None:
        for flight in list(self._flights.values()):
            self._fail(flight, WorkerDied(error.message), tell_engine=False)

    def _fail(self, flight: Flight, error: Exception, *, tell_engine: bool = True) -> None:
        flight.error = error
        if tell_engine and flight.open:
            self._client.send(Abort(list(flight.open)))
        self._forget(flight, "error")
        flight.wake()

    def _leave(self, flight: Flight) -> None:
        """Its reader is gone: end what is unfinished."""
        if flight.open:
            self._client.send(Abort(list(flight.open)))
        self._forget(flight, "abort")

    def _forget(self, flight: Flight, reason: str) -> None:
        now, flight.gone = time.monotonic(), True
        for sequence in list(flight.open):
            self._end_sequence(flight, sequence, reason, now)
        self._release(flight)
        self._drop(flight)

    def _end_sequence(self, flight: Flight, sequence: str, reason: str, now: float) -> None:
        flight.open.discard(sequence)
        self._queued.discard(sequence)
        del self._sequences[sequence]
        self._tell("ended", sequence, reason, now)
        if not flight.open:
            self._drop(flight)

    def _drop(self, flight: Flight) -> None:
        if self._flights.get(flight.request_id) is flight:
            del self._flights[flight.request_id]
            if not self._flights:
                self._idle.set()

    def _release(self, flight: Flight) -> None:
        """Give back the places that it held while it was tokenized."""
        self._preparing -= flight.reserved
        flight.reserved = 0

    # -- small things

    def _tell(self, what: str, *args: Any) -> None:
        for listener in self.listeners:
            try:
                getattr(listener, what)(*args)
            except Exception:  # who watches must not break what is watched
                LOGGER.exception("a listener failed in %s()", what)

    def _retry_after(self, waiting: int) -> int:
        """Seconds in which the queue should be through, at the pace of the last admissions."""
        times = self._admissions
        span = time.monotonic() - times[0] if times else 0.0
        return 1 if span <= 0 else max(1, min(MOST_RETRY_SECONDS, math.ceil(waiting * span / len(times))))


def _queue_bound(value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"max_num_queued_reqs must be a whole number of at least 1, or None for no bound, not {value!r}", "max_num_queued_reqs")
    return value
