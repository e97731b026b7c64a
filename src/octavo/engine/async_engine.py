"""AsyncLLM: the engine in a process of its own, for callers on an event loop. The server is made of it.

This process holds what has to do with text: template, tokenizer (in threads), detokenizer, stop strings. One event loop
runs it all; nothing here is safe to call from other threads.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from octavo.config import Config
from octavo.core.sampling import SamplingParams
from octavo.engine.compat import without_effect
from octavo.engine.console import LOGGER, show_log
from octavo.engine.generation import Flight, Generation
from octavo.engine.inputs import Inputs, Prompt, check_priority
from octavo.engine.messages import Abort, Batch, Begin, End, EngineStats, FromEngine, Note, Progress, Ready
from octavo.engine.outputs import Answer
from octavo.engine.places import Places
from octavo.engine.report import LogReport, Report, phase
from octavo.engine.settings import make_config
from octavo.engine.switchboard import Listener, Switchboard
from octavo.errors import Cancelled, ConfigError, ContextTooLong, InvalidRequest, OctavoError, WorkerDied, shown

if TYPE_CHECKING:
    from octavo.engine.client import EngineClient
    from octavo.engine.textside import TextSide
    from octavo.runner.memory import Ledger

T = TypeVar("T")
STALL_SECONDS = 60.0  # without a step while work is unfinished: the engine hangs. The longest step of a large model on few cores takes less
TEXT_THREADS = 4  # a long prompt in one must not hold up the short ones


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
        for line in (*without_effect(settings.keys() - (make_config.__kwdefaults__ or {}).keys()), *text.notes(vocab)):
            report.note(line)
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
        self._board = Switchboard(client.send, most)
        self.listeners: list[Listener] = self._board.listeners
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
        self._pool = ThreadPoolExecutor(TEXT_THREADS, "octavo-text")
        self._longest_token: float | None = None  # TextSide.longest_token, looked at when the first long text comes: that costs 0.1 s
        self._ready: asyncio.Future[Ready] | None = None
        self._started = self._shut = False

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
            eos_ids=self._text.end_ids, seed=ready.config.runner.seed, max_num_seqs=ready.config.scheduler.max_num_seqs,
            num_kv_blocks=ready.config.kv.num_kv_blocks, block_size=ready.config.kv.block_size, sliding=ready.sliding,
        )
        self._started = True

    async def drain(self, timeout: float | None = None) -> bool:
        """Wait until nothing is open, at most ``timeout`` seconds; whether that came about."""
        try:
            await asyncio.wait_for(self._board.idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    async def shutdown(self) -> None:
        """End what is unfinished (its readers see finish_reason "abort"), and the engine's process. May be called twice."""
        self._shut = True
        self.failure = self.failure or "it was shut down"
        await self._client.stop()
        self._board.fail_all(WorkerDied("the engine was shut down"))
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
    def stats(self) -> EngineStats:
        """What the engine said about itself after its last step."""
        return self._board.stats

    @property
    def num_open(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self._board.flights)

    @property
    def num_waiting(self) -> int:
        """Sequences that were accepted and that the scheduler has not admitted yet."""
        return len(self._board.queued)

    @property
    def num_running(self) -> int:
        """Sequences running, after the engine's last step."""
        return self._board.stats.running

    def health(self) -> str | None:
        """None when all is well, else what is wrong."""
        if self.failure is not None:
            return self.failure
        if not self._started:
            return "the engine is starting"
        silent = time.monotonic() - self._board.progress
        if self._board.sequences and silent > self.stall_seconds:
            return f"the engine has made no step for {silent:.0f} s, and {len(self._board.sequences)} sequences are unfinished"
        return None

    # -- before the engine

    def places(self) -> Places:
        """For who will spend work on a request before it is queued: ``take`` as many as it has sequences first, and hand them to ``generate``.

        Raises: WorkerDied.
        """
        self._check_alive()
        return Places(self._board)

    async def tokenize(self, prompt: Any, *, add_special_tokens: bool = True) -> Prompt:
        """Check and tokenize a prompt of any shape that LLM.generate takes, in a thread.

        Raises: InvalidRequest, ContextTooLong: the latter at once for a text that cannot fit whatever its tokens are.
        """
        if isinstance(prompt, Prompt):
            return prompt
        self._check_alive()
        await self._check_size(prompt)
        return await self._in_pool(partial(self.inputs.prompt, prompt, add_special_tokens=add_special_tokens))

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

        return await self.in_thread(work)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do some work on text in the threads that tokenization has.

        Cancelling gives it up where it has not begun. Raises: what ``work`` raises; WorkerDied.
        """
        self._check_alive()
        return await self._in_pool(work)

    # -- answers

    def generate(
        self, prompt: Any, sampling_params: SamplingParams | None = None, *, request_id: str | None = None, priority: int = 0, tenant: str = "",
        add_special_tokens: bool = True, deltas: bool = True, arrival: float | None = None, places: Places | None = None,
    ) -> Generation:
        """Answer one prompt: an async iterator over the news (``deltas``), or over everything so far each time.

        The request counts from this call on. A Prompt (from ``tokenize``) is queued at once; another is tokenized when the
        iteration begins. ``arrival``: when it came in (monotonic seconds), if that was earlier. ``places``: of which it takes over as many
        as it has sequences (default: it finds its own). A slow reader gets fewer and larger pieces. Closing, cancelling or dropping it
        aborts the request. It ends with a finish_reason in each of the n sequences ("error": its stop_reason says what), or with WorkerDied.

        Raises: InvalidRequest, QueueFull, WorkerDied; ContextTooLong.
        """
        self._check_alive()
        params = self.defaults if sampling_params is None else sampling_params
        bad_words = self.inputs.check(params)
        check_priority(priority, self.config.scheduler.policy)
        self.inputs.check_tenant(tenant)
        name = self._board.name(request_id)
        flight = Flight(name, params, (Places(self._board) if places is None else places).split(params.num_sequences))
        self._board.open(flight)
        submit, start = partial(self._submit, flight, bad_words, priority, tenant, arrival), None
        if isinstance(prompt, Prompt):
            try:
                submit(prompt)
            except BaseException:
                self._board.forget(flight, "error")
                raise
        else:
            start = partial(self._tokenize_and_submit, flight, prompt, add_special_tokens, submit)
        return Generation(flight, start, self._board.leave, self._board.told, deltas=deltas, loop=asyncio.get_running_loop())

    async def abort(self, request_id: str) -> bool:
        """End a request: its reader sees finish_reason "abort". False when it is unknown or has ended."""
        flight = self._board.flights.get(request_id)
        if flight is None:
            return False
        if flight.open:
            self._client.send(Abort(list(flight.open)))
        else:  # in tokenization: nobody but its reader knows of it
            flight.error = Cancelled(f"request {request_id!r} was aborted before it began")
            self._board.forget(flight, "abort")
            flight.wake()
        return True

    async def abort_all(self) -> None:
        """End every open request."""
        for request_id in list(self._board.flights):
            await self.abort(request_id)

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Running requests lose nothing, so it always succeeds: True, once it is done. Raises: WorkerDied."""
        self._check_alive()
        await self._board.reset_cache()
        return True

    # -- to the engine

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise WorkerDied(self.failure)
        if not self._started:
            raise WorkerDied("this AsyncLLM is not started: await start(), or use async with")

    async def _in_pool(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def _tokenize_and_submit(self, flight: Flight, prompt: Any, add_special_tokens: bool, submit: Callable[[Prompt], None]) -> None:
        checked = await self.tokenize(prompt, add_special_tokens=add_special_tokens)
        if not flight.gone:  # its reader, or the engine, may have left meanwhile
            submit(checked)

    async def _check_size(self, prompt: Any) -> None:
        """Refuse a text that no tokenization can make fit, before any work: a token spells so many bytes at most."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is None else prompt
        if not isinstance(text, str) or len(text) * 4 <= self.max_model_len:  # that one may fit if a token has a byte
            return
        if self._longest_token is None:
            self._longest_token = await self._in_pool(self._text.longest_token)
        most = self.max_model_len * self._longest_token
        if len(text) * 4 > most and (size := len(text.encode("utf-8", "surrogatepass"))) > most:
            raise ContextTooLong(
                f"the prompt has {size} bytes; the context holds {self.max_model_len} tokens, prompt and output together, of {self._longest_token} "
                f"bytes at most each, so no text above {most} bytes can fit, and a prompt may have at most {self.max_model_len - 1} tokens", "prompt",
            )

    def _submit(self, flight: Flight, bad_words: tuple[tuple[int, ...], ...], priority: int, tenant: str, arrival: float | None,
                prompt: Prompt) -> None:
        self._check_alive()
        now = time.monotonic() if arrival is None else arrival
        requests = self.inputs.requests(
            self._board.engine_id(flight.request_id), prompt, flight.params, bad_words, arrival=now, priority=priority, tenant=tenant,
        )
        answer = Answer(flight.request_id, prompt, flight.params, self.tokenizer, now)
        self._board.submit(flight, answer, requests, len(prompt.ids))

    # -- from the engine

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, Batch):
            self._board.deliver(message)
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

    def _on_end(self, error: OctavoError) -> None:
        """The engine is gone: everybody hears of it."""
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # seen, even if nobody waits any more
        if not self._shut:
            self.failure = error.message if self._started else f"the engine could not start: {error.message}"
            if self._started:
                LOGGER.error("%s; %d requests end with it", self.failure, len(self._board.flights))
            self.on_death.set()
        self._board.fail_all(WorkerDied(error.message))


def _queue_bound(value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"max_num_queued_reqs must be a whole number from 1, or None for no bound, not {shown(value)}", "max_num_queued_reqs")
    return value
