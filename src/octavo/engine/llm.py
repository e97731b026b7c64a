"""LLM: the engine in the caller's process, with vLLM's shapes."""

import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from octavo.config import Config
from octavo.core.output import RequestOutput
from octavo.core.sampling import SamplingParams
from octavo.engine.beams import BeamSearchOutput, BeamSearchParams, beam_output, naming_the_width
from octavo.engine.compat import refuse_adapter, without_effect
from octavo.engine.console import LOGGER, progress_bar, show_log
from octavo.engine.driver import Driver
from octavo.engine.inputs import Inputs, Prompt, check_priority
from octavo.engine.outputs import Answer
from octavo.engine.report import LogReport, Report
from octavo.engine.settings import make_config
from octavo.errors import ConfigError, InvalidRequest, RequestError, WorkerDied, shown
from octavo.scheduler.preempt import PreemptionStats

if TYPE_CHECKING:
    from octavo.engine.factory import Engine
    from octavo.kv.manager import Ledger as KvLedger
    from octavo.runner.memory import Ledger


class LLM:
    """A model, ready to answer prompts.

    ``model`` is a directory in Hugging Face layout, a .gguf file, a Hub id or a short name. Settings have vLLM's names and
    are checked before anything is loaded; ``max_model_len`` may be "32k" or "auto", ``generation_config="vllm"`` ignores the
    model's own sampling defaults, ``backend="torch"`` runs the oracle instead of the native kernels. vLLM's other settings are
    accepted where they ask for nothing here (engine/compat.py). ``report`` hears the start-up (engine.report.Report); by
    default it is logged by the logger "octavo" (environment: OCTAVO_LOG=warning is quiet).

    A context manager. Calls from several threads are safe; they share the engine's steps.

    Raises: ConfigError, CheckpointError, UnsupportedError.
    """

    def __init__(
        self, model: str | os.PathLike[str], *, dtype: str = "auto", quantization: str | None = None, max_model_len: int | str | None = None,
        max_num_seqs: int = 256, max_num_batched_tokens: int | None = None, block_size: int = 16, num_kv_blocks: int | None = None,
        kv_cache_memory_bytes: int | None = None, enable_prefix_caching: bool | None = None, kv_cache_dtype: str = "auto",
        num_threads: int | None = None, seed: int = 0, tokenizer: str | None = None, revision: str | None = None,
        scheduling_policy: str = "fcfs", tenant_weights: Mapping[str, float] | str | None = None, admission: str = "optimistic",
        kv_cache_dir: str | os.PathLike[str] | None = None, kv_cache_dir_bytes: int | None = None,
        target_itl_ms: float | None = None, kv_swap_bytes: int | None = None, kv_swap_path: str | os.PathLike[str] | None = None,
        swap_space: float | None = None, preemption_mode: str = "auto", max_logprobs: int = 20, generation_config: str = "auto",
        chat_template: str | None = None, backend: str = "native", enable_weight_cache: bool | None = None, report: Report | None = None,
        **others: Any,
    ) -> None:
        from octavo.engine import factory  # numpy and all the rest: only now

        config = make_config(
            model, dtype=dtype, quantization=quantization, max_model_len=max_model_len, max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens, block_size=block_size, num_kv_blocks=num_kv_blocks,
            kv_cache_memory_bytes=kv_cache_memory_bytes, enable_prefix_caching=enable_prefix_caching, kv_cache_dtype=kv_cache_dtype,
            num_threads=num_threads, seed=seed, tokenizer=tokenizer, revision=revision, scheduling_policy=scheduling_policy,
            tenant_weights=tenant_weights, admission=admission, target_itl_ms=target_itl_ms, kv_swap_bytes=kv_swap_bytes,
            kv_swap_path=kv_swap_path, swap_space=swap_space, preemption_mode=preemption_mode,
            kv_cache_dir=kv_cache_dir, kv_cache_dir_bytes=kv_cache_dir_bytes,
            max_logprobs=max_logprobs, generation_config=generation_config, chat_template=chat_template, backend=backend,
            enable_weight_cache=enable_weight_cache, **others,
        )
        if report is None:
            show_log()
            report = LogReport(LOGGER)
        for line in without_effect(others):
            report.note(line)
        began = time.perf_counter()
        self._engine: Engine | None = factory.build(config, report)
        engine = self._engine
        report.note(f"ready in {time.perf_counter() - began:.2f} s")
        self._inputs = Inputs(
            tokenizer=engine.text.tokenizer, vocab=engine.spec.vocab, max_model_len=engine.config.scheduler.max_model_len,
            max_logprobs=engine.config.runner.max_logprobs, eos_ids=engine.text.end_ids, seed=engine.config.runner.seed,
            max_num_seqs=engine.config.scheduler.max_num_seqs, num_kv_blocks=engine.config.kv.num_kv_blocks, block_size=engine.config.kv.block_size,
            sliding=engine.spec.reach is not None,
        )
        self._driver = Driver(engine.core)
        self._numbers = itertools.count()

    # -- facts

    @property
    def engine(self) -> "Engine":
        """The wired engine, for measurements: nothing that it holds may be called while requests run."""
        return self._running()

    @property
    def config(self) -> Config:
        """The final settings."""
        return self._running().config

    @property
    def ledger(self) -> "Ledger":
        """Where the memory went."""
        return self._running().ledger

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._inputs.vocab

    @property
    def max_model_len(self) -> int:
        """The effective context in tokens: prompt and output together."""
        return self._inputs.max_model_len

    @property
    def instruction_set(self) -> str:
        """The variant of the native kernels that runs: generic, avx2, avx512, avx512_vnni, avx512_bf16, amx; or the backend's name."""
        return self._running().isa

    @property
    def num_preemptions(self) -> int:
        """How often a request lost its blocks to another since the start."""
        return self._running().core.counters.preemptions

    @property
    def preemption_stats(self) -> PreemptionStats:
        """What preemptions did since the start, and what the swap tier holds now."""
        return self._running().scheduler.preemption_stats()

    @property
    def kv_ledger(self) -> "KvLedger":
        """Where the KV blocks are now: live, shared, cached, free."""
        return self._running().scheduler.kv.ledger()

    @property
    def prefix_cache_stats(self) -> tuple[int, int]:
        """Prompt tokens looked up in the prefix cache since the start, and how many of them were found."""
        counters = self._running().core.counters
        return counters.cache_queries, counters.cache_hits

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Running requests lose nothing, so it always succeeds: True. Raises: WorkerDied."""
        with self._driver.lock:
            self._running().core.reset_prefix_cache()
        return True

    def get_tokenizer(self) -> Any:
        """The model's tokenizer. Raises: ConfigError when the model came without one."""
        tokenizer = self._running().text.tokenizer
        if tokenizer is None:
            raise ConfigError("this model came without a tokenizer: give the setting tokenizer", "tokenizer")
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What holds where a call gives no sampling parameters: the model's generation_config.json, where it says anything."""
        return self._running().text.defaults

    # -- answers

    def generate(
        self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None, *, tenant: str | Sequence[str] | None = None, lora_request: None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all of them in one batch. Results come in the prompts' order.

        ``prompts`` is one or a sequence of: a string, {"prompt": …}, {"prompt_token_ids": […]}, a list of token ids. A dictionary may
        have a ``cache_salt``: cached prefixes are shared only between prompts with the same one.
        ``sampling_params``, ``priority`` (smaller is more urgent; only with scheduling_policy="priority") and ``tenant`` (whose
        share it is under the policy "fair") are one for all, or one per prompt. ``lora_request`` is vLLM's, and None.

        Raises: InvalidRequest, ContextTooLong, naming the field (nothing has run then, and the engine goes on);
        WorkerDied.
        """
        refuse_adapter(lora_request)
        given = [prompts] if _is_one(prompts) else list(prompts)
        return self._run(given, sampling_params, priority, tenant, use_tqdm, add_special_tokens=True)

    def chat(
        self, messages: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, use_tqdm: bool = True, *,
        add_generation_prompt: bool = True, continue_final_message: bool = False, tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None, chat_template_kwargs: Mapping[str, Any] | None = None, lora_request: None = None,
    ) -> list[RequestOutput]:
        """Answer conversations: one (a list of messages) or a list of them. Results come in their order.

        Raises: as generate(); InvalidRequest also for messages that the template refuses.
        """
        refuse_adapter(lora_request)
        several = isinstance(messages, Sequence) and len(messages) > 0 and not isinstance(messages[0], Mapping)
        given = [
            self._render(one, add_generation_prompt, continue_final_message, tools, chat_template, chat_template_kwargs)
            for one in (messages if several else [messages])
        ]
        return self._run(given, sampling_params, None, None, use_tqdm, add_special_tokens=False)

    def stream(self, prompt: Any, sampling_params: SamplingParams | None = None) -> "Stream":
        """Complete one prompt, yielding what is new (texts and token ids as differences) as soon as it is there.

        The prompt is checked and queued at once. Closing the iterator, or dropping it, aborts the request.

        Raises: as generate().
        """
        return self._stream(prompt, sampling_params, add_special_tokens=True)

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], sampling_params: SamplingParams | None = None, *, add_generation_prompt: bool = True,
        continue_final_message: bool = False, tools: list[dict[str, Any]] | None = None, chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> "Stream":
        """Answer one conversation as stream() does."""
        text = self._render(messages, add_generation_prompt, continue_final_message, tools, chat_template, chat_template_kwargs)
        return self._stream(text, sampling_params, add_special_tokens=False)

    def beam_search(
        self, prompts: Any, params: BeamSearchParams, lora_request: None = None, use_tqdm: bool = False, concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The best continuations of each prompt by beam search, best first; results come in the prompts' order.

        The same as generate() with use_beam_search, in the shape of vLLM's method of this name. ``lora_request`` is vLLM's, and None;
        ``concurrency_limit`` is its bound of prompts at once, which needs none here.

        Raises: as generate().
        """
        refuse_adapter(lora_request)
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequest(f"params must be BeamSearchParams, not {type(params).__name__}", "params")
        with naming_the_width():
            outputs = self.generate(prompts, params.sampling(), use_tqdm)
        return [beam_output(output, self._running().text.tokenizer) for output in outputs]

    # -- end

    def shutdown(self) -> None:
        """End what is unfinished and give up weights, KV pool and threads; with ``kv_cache_dir``, cached prefixes are kept there now, and not
        where this is never called. May be called twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._driver.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()

    # -- inside

    def _running(self) -> "Engine":
        if self._engine is None:
            raise WorkerDied("this LLM was shut down; make a new one")
        return self._engine

    def _run(
        self, given: list[Any], params: Any, priority: Any, tenant: Any, use_tqdm: bool, *, add_special_tokens: bool
    ) -> list[RequestOutput]:
        answers = self._submit(given, params, priority, tenant, add_special_tokens=add_special_tokens)
        try:
            with progress_bar(answers, use_tqdm) as tick:
                self._driver.run(answers, tick)
        except BaseException:  # an interrupt too: what this call asked for is taken back, the engine goes on
            self._driver.abort(answers)
            raise
        outputs = [answer.output() for answer in answers]
        for output in outputs:
            for sample in output.outputs:
                if sample.finish_reason == "error":
                    LOGGER.error("request %s, sample %d: %s", output.request_id, sample.index, sample.stop_reason)
        return outputs

    def _stream(self, prompt: Any, params: SamplingParams | None, *, add_special_tokens: bool) -> "Stream":
        return Stream(self._driver, self._submit([prompt], params, None, None, add_special_tokens=add_special_tokens)[0])

    def _submit(self, given: list[Any], params: Any, priority: Any, tenant: Any, *, add_special_tokens: bool) -> list[Answer]:
        """Check everything, then queue everything."""
        engine = self._running()
        every_params = _one_each(engine.text.defaults if params is None else params, len(given), "sampling_params", SamplingParams)
        priorities = _one_each(0 if priority is None else priority, len(given), "priority", int)
        for urgency in priorities:
            check_priority(urgency, engine.config.scheduler.policy)
        tenants = _one_each("" if tenant is None else tenant, len(given), "tenant", str)
        for name in tenants:
            self._inputs.check_tenant(name)
        words: dict[int, tuple[tuple[int, ...], ...]] = {}  # by identity: one object for all prompts is checked once
        prompts: list[Prompt] = []
        for number, (one, its) in enumerate(zip(given, every_params, strict=True)):
            try:
                if id(its) not in words:
                    words[id(its)] = self._inputs.check(its)
                prompts.append(self._inputs.prompt(one, add_special_tokens=add_special_tokens))
                self._inputs.check_room(prompts[-1], its)
            except RequestError as error:
                raise _placed(error, number, len(given)) from error.__cause__
        now = time.monotonic()
        batch = []
        for prompt, its, urgency, whose in zip(prompts, every_params, priorities, tenants, strict=True):
            request_id = str(next(self._numbers))
            requests = self._inputs.requests(request_id, prompt, its, words[id(its)], arrival=now, priority=urgency, tenant=whose)
            batch.append((Answer(request_id, prompt, its, engine.text.tokenizer, now), requests))
        self._driver.submit(batch)
        return [answer for answer, _ in batch]

    def _render(self, messages: Any, add_generation_prompt: bool, continue_final_message: bool, tools: Any, chat_template: str | None,
                kwargs: Mapping[str, Any] | None) -> str:
        from octavo.text.chat_template import ChatTemplate

        if chat_template is not None and not isinstance(chat_template, str):
            raise InvalidRequest(f"chat_template must be a template's text, not {shown(chat_template)}", "chat_template")
        template = self._running().text.template
        if template is None or chat_template is not None:
            template = ChatTemplate.of(self.get_tokenizer(), chat_template)
        return template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
                               variables=kwargs)


class Stream(Iterator[RequestOutput]):
    """One answer's news as they come. ``close()``, an exception, or dropping it aborts the request."""

    def __init__(self, driver: Driver, answer: Answer) -> None:
        self._driver = driver
        self._answer = answer
        self._closed = False

    def __next__(self) -> RequestOutput:
        """The next news; steps the engine until there are some."""
        while not self._closed:
            if (news := self._answer.news()) is not None:
                return news
            if self._answer.finished:
                break
            try:
                self._driver.step()
            except BaseException:
                self.close()
                raise
        raise StopIteration

    def close(self) -> None:
        """Abort what is unfinished."""
        self._closed = True
        self._driver.abort([self._answer])

    def __del__(self) -> None:
        self.close()


def _is_one(prompts: Any) -> bool:
    """Whether this is a single prompt: text, a dictionary, or a list of token ids."""
    if isinstance(prompts, str | Mapping):
        return True
    if not hasattr(prompts, "__iter__"):
        raise InvalidRequest(f"prompts must be a prompt or a sequence of them, not {type(prompts).__name__}", "prompts")
    return isinstance(prompts, Sequence) and len(prompts) > 0 and all(hasattr(item, "__index__") for item in prompts)


def _one_each(value: Any, count: int, name: str, kind: type) -> list[Any]:
    """One value for all, or as many as there are prompts. Raises: InvalidRequest."""
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value] * count
    if len(values) != count:
        raise InvalidRequest(f"{name} has {len(values)} entries for {count} prompts", name)
    for item in values:
        if isinstance(item, bool) or not isinstance(item, kind):
            raise InvalidRequest(f"{name} must be {kind.__name__} or a sequence of them, not {shown(item)}", name)
    return values


def _placed(error: RequestError, number: int, count: int) -> RequestError:
    """The same error, saying which of several prompts is meant."""
    return error if count == 1 else type(error)(f"prompt {number} of {count}: {error.message}", error.param)
