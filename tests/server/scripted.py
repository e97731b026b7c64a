"""An engine that says what it is told to: the shape of AsyncLLM over the real detokenizer, for tests of every split of a text."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from octavo.core.output import Delta, LogprobRow, RequestOutput
from octavo.core.sampling import SamplingParams
from octavo.engine.inputs import Inputs, Prompt
from octavo.engine.outputs import Answer
from octavo.engine.places import Places
from octavo.engine.settings import make_config
from octavo.errors import ContextTooLong, WorkerDied
from octavo.text.chat_template import ChatTemplate

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
END = 256


class ByteTokenizer:
    """Ids 0 to 255 are the bytes; 256 is the end token."""

    vocab_size = 257
    special_ids = frozenset({END})
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    end_ids = (END,)
    strip_first_space = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        return b"<end>" if token == END else bytes([token])

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode("utf-8", "replace")

    def id_to_token(self, token: int) -> str | None:
        return self.token_text(token)

    def visible_bytes(self, ids: Sequence[int], skip_special_tokens: bool) -> bytes:
        return b"".join(self.token_bytes(i) for i in ids if not (skip_special_tokens and i in self.special_ids))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.visible_bytes(ids, skip_special_tokens).decode("utf-8", "replace")


class ScriptedLLM:
    """Answers every prompt with ``script``: the ids of each delta, in order; an Exception is raised in its place."""

    def __init__(self, script: Sequence[Sequence[int] | Exception] = (), *, context: int = 4096, finish: str = "stop") -> None:
        self.script = script
        self.finish = finish
        self.config = make_config("scripted")
        self.tokenizer = ByteTokenizer()
        self.template = ChatTemplate(TEMPLATE)
        self.defaults = SamplingParams()
        self.vocab_size, self.max_model_len = ByteTokenizer.vocab_size, context
        self.inputs = Inputs(tokenizer=self.tokenizer, vocab=self.vocab_size, max_model_len=context, max_logprobs=20, eos_ids=[END], seed=0)
        self.reason: str | None = None
        self.num_open = 0
        self.tokenized = 0
        self.resets = 0
        self.worked = 0  # pieces of other work on text
        self.thread: asyncio.Event | None = None  # waited for before each
        self.tenants: list[str] = []  # of all prompts so far
        self.refusal: Exception | None = None
        self.preparing = 0  # places in the queue
        self.hold: asyncio.Event | None = None  # waited for before each delta
        self.steps: int | None = None  # deltas until the hold is closed again

    def health(self) -> str | None:
        return self.reason

    def places(self) -> Places:
        return Places(self)

    def check_room(self, n: int) -> None:
        if self.refusal is not None:
            raise self.refusal

    async def tokenize(self, prompt: str, *, add_special_tokens: bool = True) -> Prompt:
        self.tokenized += 1
        if len(prompt) > 16 * self.max_model_len:  # what no tokenization could make fit
            raise ContextTooLong("far too long", "prompt")
        return self.inputs.prompt(prompt, add_special_tokens=add_special_tokens)

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        self.worked += 1
        if self.thread is not None:
            await self.thread.wait()
        return work()

    async def reset_prefix_cache(self) -> bool:
        if self.reason is not None:
            raise WorkerDied(self.reason)
        self.resets += 1
        return True

    async def render(self, messages: Any, **options: Any) -> str:
        return self.template.render(messages, **options)

    def generate(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str, priority: int = 0, tenant: str = "", arrival: float | None = None,
        places: Places,
    ) -> AsyncGenerator[RequestOutput, None]:
        self.tenants.append(tenant)
        places.split(params.num_sequences).give_back()
        if self.script and isinstance(self.script[0], Exception):  # refused at once, as the engine does
            raise self.script[0]
        return self._generate(prompt, params, request_id)

    async def _generate(self, prompt: Prompt, params: SamplingParams, request_id: str) -> AsyncGenerator[RequestOutput, None]:
        answer = Answer(request_id, prompt, params, self.tokenizer, 0.0)
        self.num_open += 1
        try:
            for place, ids in enumerate(self.script):
                if isinstance(ids, Exception):
                    raise ids
                if self.hold is not None:
                    await self.hold.wait()
                    if self.steps is not None:
                        self.steps -= 1
                        if self.steps <= 0:
                            self.hold.clear()
                last = place == len(self.script) - 1
                for index in range(params.num_sequences):
                    if answer.samples[index].finish_reason is None:
                        answer.apply(index, self._delta(request_id, prompt, params, ids, place == 0, last), 0.0)
                if (news := answer.news()) is not None:
                    yield news
                if answer.finished:
                    return
        finally:
            self.num_open -= 1

    def _delta(self, name: str, prompt: Prompt, params: SamplingParams, ids: Sequence[int], first: bool, last: bool) -> Delta:
        def rows(tokens: Sequence[int], wanted: int | None) -> list[LogprobRow] | None:
            if wanted is None:
                return None
            return [LogprobRow(t, -0.5 - t / 1000, 1, [t, abs(255 - t)][:wanted], [-0.5 - t / 1000, -3.0][:wanted]) for t in tokens]

        scores = rows(prompt.ids[1:], params.prompt_logprobs) if first else None
        return Delta(name, list(ids), rows(ids, params.logprobs), scores, self.finish if last else None)
